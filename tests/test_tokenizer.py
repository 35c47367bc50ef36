"""The committed tokenizer and the command that makes one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from model.train_tokenizer import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    evaluate,
    is_chinese,
    main,
    read_texts,
    save_tokenizer,
    tokenizer_config,
    train_tokenizer,
)

REPO = Path(__file__).resolve().parent.parent
FOLDER = REPO / "model"
SHARED = Path(os.environ.get("MINIMIND_SHARED_DATA", REPO.parent / "shared" / "data"))
COMMITTED = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
TINY_CORPUS = ["the cat sat on the mat", "那只猫坐在垫子上", "a cat, the cat: 12 + 34 = 46", "我们 和 猫"] * 5


@pytest.fixture(scope="module")
def auto():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


def test_the_committed_vocabulary_is_36_special_tokens_then_256_bytes_then_merges():
    assert COMMITTED.get_vocab_size() == 6400
    assert SPECIAL_TOKENS[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len(set(SPECIAL_TOKENS)) == 36
    assert [COMMITTED.id_to_token(i) for i in range(36)] == SPECIAL_TOKENS
    assert all(len(COMMITTED.id_to_token(i)) == 1 for i in range(36, 36 + 256))
    assert all(len(COMMITTED.id_to_token(i)) > 1 for i in range(36 + 256, 6400))
    assert all(token.special for token in COMMITTED.get_added_tokens_decoder().values())


def test_the_pre_tokenizer_is_the_one_gguf_converters_know_as_gpt2():
    state = json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    assert state["normalizer"] is None and state["post_processor"] is None
    expected = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    assert expected.items() <= state["pre_tokenizer"].items()


@settings(deadline=None, max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_any_text_comes_back_as_it_was(text):
    assert COMMITTED.decode(COMMITTED.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_is_one_token_and_comes_back():
    latin = bytes(range(256)).decode("latin-1")
    assert COMMITTED.decode(COMMITTED.encode(latin).ids) == latin
    # A byte that is no UTF-8 by itself can still be a token: the 256 single-byte tokens are all different and spell
    # every encoded text when put side by side.
    from tokenizers.pre_tokenizers import ByteLevel

    ids = {COMMITTED.token_to_id(character) for character in ByteLevel.alphabet()}
    assert ids == set(range(36, 36 + 256))


def test_special_names_in_plain_text_become_plain_tokens_when_recognition_is_off():
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    text = "".join(SPECIAL_TOKENS)
    assert tokenizer.encode(text).ids == list(range(36))
    tokenizer.encode_special_tokens = True
    plain = tokenizer.encode(text).ids
    assert min(plain) >= 36
    assert tokenizer.decode(plain) == text


def test_transformers_loads_the_folder_and_gives_the_same_ids(auto):
    assert (auto.pad_token_id, auto.bos_token_id, auto.eos_token_id, len(auto)) == (0, 1, 2, 6400)
    for text in [
        "Hello, world! 12 + 34 = 46",
        "从前有一只小猫。\n\n  它 爱 鱼。",
        "<think>嗯</think> naïve 🐱\t\r\n",
        "",
    ]:
        assert auto(text)["input_ids"] == COMMITTED.encode(text).ids
        assert auto.decode(auto(text)["input_ids"]) == text


def test_the_chat_template_wraps_each_message_in_im_start_and_im_end(auto):
    messages = [{"role": "system", "content": "简短"}, {"role": "user", "content": "Hi"}]
    prompt = auto.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>system\n简短<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = auto.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == COMMITTED.encode(prompt).ids
    assert ids.count(1) == 3 and ids.count(2) == 2


def test_the_committed_config_is_what_the_command_writes():
    written = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written == tokenizer_config()
    assert written["chat_template"] == CHAT_TEMPLATE


def test_training_twice_writes_the_same_bytes_whatever_the_thread_count(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in TINY_CORPUS), "utf-8")
    command = [sys.executable, str(FOLDER / "train_tokenizer.py"), "--data_path", str(corpus), "--vocab_size", "310"]
    for threads in ("1", "2"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"}
        subprocess.run([*command, "--out", str(tmp_path / threads)], check=True, env=environment, capture_output=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "1").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_sizes_that_cannot_be_reached_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="need 292"):
        train_tokenizer(TINY_CORPUS, 291)
    with pytest.raises(ValueError, match="yield only"):
        train_tokenizer(TINY_CORPUS, 6400)


@pytest.mark.parametrize("line", ["{broken", '{"content": "x"}', '{"text": 5}', "[1]", "7"])
def test_a_line_without_text_is_reported_with_file_and_line(tmp_path, line, capsys):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "fine"}\n\n' + line + "\n", "utf-8")
    with pytest.raises(ValueError, match=r"corpus\.jsonl:3: "):
        list(read_texts([corpus]))
    with pytest.raises(SystemExit) as stop:
        main(["--evaluate", str(corpus)])
    assert stop.value.code == 2
    assert "corpus.jsonl:3" in capsys.readouterr().err


def test_evaluation_counts_chinese_and_english_apart(tmp_path, capsys):
    assert is_chinese("你好，猫 cat") is True
    assert is_chinese("hello 你") is False
    counts = evaluate(COMMITTED, ["你好吗", "hello"])
    assert (counts["zh"]["documents"], counts["zh"]["bytes"], counts["zh"]["characters"]) == (1, 9, 3)
    assert (counts["en"]["documents"], counts["en"]["bytes"]) == (1, 5)
    assert counts["all"]["tokens"] == counts["zh"]["tokens"] + counts["en"]["tokens"] > 0
    save_tokenizer(train_tokenizer(TINY_CORPUS, 300), tmp_path)
    corpus = tmp_path / "val.jsonl"
    corpus.write_text('{"text": "你好吗"}\n', "utf-8")
    assert main(["--evaluate", str(corpus), "--tokenizer_path", str(tmp_path)]) == 0
    assert "bytes/token" in capsys.readouterr().out


@pytest.mark.skipif(not (SHARED / "val.jsonl").exists(), reason=f"no real corpus at {SHARED}")
def test_the_committed_tokenizer_packs_more_than_three_bytes_into_a_token_of_either_language():
    counts = evaluate(COMMITTED, read_texts([SHARED / "val.jsonl"]))
    for kind in ("zh", "en"):
        assert counts[kind]["documents"] > 400
        assert counts[kind]["bytes"] / counts[kind]["tokens"] > 3.0
