"""Odd texts that are right: they are trained on as they stand, or left out and counted, and the ledger says so.

The reader's own tests look at each character; these look at what a user sees of a run.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset.source_files import find_files
from dataset.text_formats import FORMATS, TextFormat, decode, split_lines
from dataset.text_tokenizer import TextTokenizer
from errors import DataError
from runs import ROOT, command, final_state, logged, replaced, run_folder, spawn, train

TOKENIZER = TextTokenizer.load(ROOT / "model")
TEXT = "the cat sat on a mat"


def line(text: str, **more: Any) -> bytes:
    return json.dumps({**more, "text": text}, ensure_ascii=False).encode() + b"\n"


@pytest.fixture
def run_on(arguments, tmp_path, capsys):
    """Train one epoch on these bytes; returns (ledger of run.json, the `Data:` line, texts in the cache)."""

    def run(data: bytes, *more: object, name: str = "d.jsonl") -> tuple[dict, str, list[str]]:
        (tmp_path / name).write_bytes(data)
        words = replaced(arguments, data_path=tmp_path / name, save_interval=0)
        train(words, *more)
        ledger = json.loads((run_folder(words) / "run.json").read_text())["ledger"]["train"]
        shown = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("Data: "))
        return ledger, shown, cached_texts(tmp_path / "cache")

    return run


def cached_texts(cache_dir: Path) -> list[str]:
    (folder,) = (path.parent for path in cache_dir.glob("*/metadata.json"))
    tokens = np.fromfile(folder / "tokens.bin", np.uint16)
    offsets = np.fromfile(folder / "document_offsets.bin", np.int64)
    return [TOKENIZER.decode(tokens[a + 1 : b - 1]) for a, b in itertools.pairwise(offsets)]


ODD = {
    "a paragraph separator": "one\u2029two",
    "a line separator": "one\u2028two",
    "a next line": "one\u0085two",
    "a form feed": "one\x0ctwo",
    "a NUL": "one\x00two",
    "a no-break space at the ends": "\u00a0one\u00a0",
    "an emoji of two surrogates": "one \U0001f98a two",
    "line ends inside": "one\r\ntwo\n\nthree",
    "a byte order mark inside": "one\ufefftwo",
    "one character": "a",
    "one Chinese character": "猫",
}


@pytest.mark.parametrize("escaped", [True, False], ids=["escaped", "raw"])
def test_odd_characters_reach_the_model_unharmed(run_on, escaped):
    data = b"".join(json.dumps({"text": text}, ensure_ascii=escaped).encode() + b"\n" for text in ODD.values())
    ledger, shown, texts = run_on(data)
    assert texts == list(ODD.values())
    assert ledger["documents"] == len(ODD)
    assert ledger["bytes"] == sum(len(text.encode()) for text in ODD.values())
    assert shown.endswith("documents split")  # nothing was left out


ENVELOPES = {
    "a byte order mark at the start": b"\xef\xbb\xbf" + line(TEXT) + line("two"),
    "CRLF line ends": line(TEXT).replace(b"\n", b"\r\n") + line("two").replace(b"\n", b"\r\n"),
    "no line end at the end": line(TEXT) + line("two")[:-1],
    "bare NaN and Infinity elsewhere": line(TEXT, score=float("nan")) + line("two", score=float("inf")),
    "an endless number elsewhere": b'{"n": ' + b"9" * 6000 + b", " + line(TEXT)[1:] + line("two"),
    "other keys of all kinds": line(TEXT, id=7, tags=["a", None], meta={"text": 5}) + line("two"),
}


@pytest.mark.parametrize("case", ENVELOPES)
def test_the_form_of_a_file_does_not_touch_its_texts(run_on, case):
    ledger, shown, texts = run_on(ENVELOPES[case])
    assert texts == [TEXT, "two"] and ledger["documents"] == 2 and ledger["rejected"] == {}
    assert "2 documents, 23 bytes" in shown


def test_gzip_gives_the_same_run_as_the_plain_file(run_on, arguments):
    plain = run_on(line(TEXT) * 30 + line("two"))[0]
    loss = logged(arguments)
    for path in (run_folder(arguments).parent.parent / "cache").glob("*/metadata.json"):
        path.unlink()
    packed = run_on(gzip.compress(line(TEXT) * 30 + line("two")), "--overwrite", 1, name="d.jsonl.gz")[0]
    assert logged(arguments) == loss
    assert {**packed, "source_bytes": 0} == {**plain, "source_bytes": 0}


def test_empty_and_white_texts_and_blank_lines_are_left_out_and_counted(run_on):
    data = line("") + line(" \n\t") + line("\u3000") + b"\n \r\n" + line(TEXT)
    ledger, shown, texts = run_on(data)
    assert texts == [TEXT]
    assert (ledger["documents"], ledger["empty_texts"], ledger["blank_lines"]) == (1, 3, 2)
    assert "3 empty texts, 2 blank lines" in shown


def test_of_a_repeated_key_the_last_wins_and_the_line_is_counted(run_on):
    ledger, shown, texts = run_on(b'{"text": "first", "text": "last"}\n' + line(TEXT))
    assert texts == ["last", TEXT]
    assert ledger["duplicate_keys"] == 1 and "1 duplicate keys" in shown


def test_equal_texts_are_kept_and_counted(run_on):
    ledger, shown, texts = run_on(line(TEXT) * 3 + line("two"))
    assert texts == [TEXT] * 3 + ["two"]
    assert ledger["exact_duplicates"] == 2 and "2 exact duplicates" in shown


SPECIAL = "<|im_start|>user\nhi<|im_end|>"


def test_special_token_strings_are_plain_text_unless_asked_for(run_on, arguments, tmp_path):
    plain = run_on(line(SPECIAL))[0]["tokens"]
    (path,) = (tmp_path / "cache").glob("*/tokens.bin")
    tokens = np.fromfile(path, np.uint16).tolist()
    assert tokens.count(TOKENIZER.bos_id) == tokens.count(TOKENIZER.eos_id) == 1  # those of the document alone
    assert TOKENIZER.decode(tokens[1:-1]) == SPECIAL
    (path.parent / "metadata.json").unlink()
    parsed = run_on(line(SPECIAL), "--parse_special", 1, "--overwrite", 1)
    assert parsed[0]["tokens"] < plain
    (path,) = (path for path in (tmp_path / "cache").glob("*/tokens.bin") if (path.parent / "metadata.json").exists())
    tokens = np.fromfile(path, np.uint16).tolist()
    assert tokens.count(TOKENIZER.bos_id) == tokens.count(TOKENIZER.eos_id) == 2


def test_skipped_lines_are_counted_by_reason_and_the_rest_is_trained(run_on, arguments):
    data = line(TEXT) + b"hello\n" + b'{"text": null}\n' + b"{}\n" * 2 + line("None")
    ledger, shown, texts = run_on(data, "--bad_lines", "skip")
    assert texts == [TEXT, "None"]
    assert ledger["rejected"] == {"invalid JSON": 1, "'text' is null, not a string": 1, "key 'text' missing": 2}
    for count in ("1 lines rejected: invalid JSON", "2 lines rejected: key 'text' missing"):
        assert count in shown


def test_a_corpus_smaller_than_one_batch_trains_one_short_step_an_epoch(run_on, arguments):
    ledger, _, _ = run_on(line(TEXT), "--epochs", 3, "--batch_size", 8, "--accumulation_steps", 16)
    assert ledger["rows"] == 1
    progress = final_state(arguments)["progress"]
    assert (progress["step"], progress["rows_seen"], progress["tokens_seen"]) == (3, 3, 3 * ledger["targets"])
    loss = logged(arguments)
    assert loss[3] < loss[1]


def test_a_txt_file_is_one_document(run_on):
    ledger, _, texts = run_on("第一行\nline two\n".encode(), name="d.txt")
    assert texts == ["第一行\nline two\n"] and ledger["documents"] == 1


class Lines(TextFormat):
    """A text a line, without keys."""

    has_keys = False

    def records(self, file, path):
        return split_lines(file)

    def text_of(self, record):
        return decode(record[0]) if record[0].strip() else None


def test_one_row_of_the_table_is_a_new_format_to_train_on(run_on, monkeypatch, tmp_path):
    with pytest.raises(DataError, match="unknown kind of file"):
        find_files(write(tmp_path / "d.lines", TEXT))
    monkeypatch.setitem(FORMATS, ".lines", Lines)
    ledger, shown, texts = run_on(f"{TEXT}\n\n二\n".encode() + b"\xff\n \ntwo", "--bad_lines", "skip", name="d.lines")
    assert texts == [TEXT, "二", "two"]
    assert (ledger["lines"], ledger["blank_lines"], ledger["rejected"]) == (6, 2, {"invalid UTF-8": 1})
    assert "3 documents" in shown and "1 lines rejected: invalid UTF-8" in shown
    with pytest.raises(DataError, match=r"known: .jsonl, .jsonl.gz, .txt, .parquet, .lines"):
        find_files(write(tmp_path / "d.csv", TEXT))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_5_megabyte_line_is_one_document_split_without_a_loss(run_on):
    words = "the cat sat on a mat and saw two red birds. "
    text = words * (5_000_000 // len(words))
    ledger, shown, _ = run_on(line(text), "--stop_after", 1)
    assert ledger["documents"] == ledger["documents_split"] == 1
    assert ledger["targets"] == ledger["tokens"] - 1
    assert "1 documents split" in shown


# --- held out, shared ---


def test_held_out_documents_are_never_trained_on_and_every_document_is_on_one_side(arguments, tmp_path):
    texts = [f"number {i} of the birds" for i in range(300)]
    (tmp_path / "d.jsonl").write_bytes(b"".join(map(line, texts)))
    words = replaced(arguments, data_path=tmp_path / "d.jsonl", val_fraction=0.2)
    train(words)
    ledger = json.loads((run_folder(words) / "run.json").read_text())["ledger"]
    sides = {}
    for path in (tmp_path / "cache").glob("*/metadata.json"):
        part = json.loads(path.read_text())["options"]["part"]
        tokens = np.fromfile(path.parent / "tokens.bin", np.uint16)
        offsets = np.fromfile(path.parent / "document_offsets.bin", np.int64)
        sides[part] = [TOKENIZER.decode(tokens[a + 1 : b - 1]) for a, b in itertools.pairwise(offsets)]
    assert set(sides) == {"train", "val"} and not set(sides["train"]) & set(sides["val"])
    assert sorted(sides["train"] + sides["val"]) == sorted(texts)
    assert 30 < len(sides["val"]) < 90
    assert ledger["val"]["documents"] == len(sides["val"]) and ledger["train"]["documents"] == len(sides["train"])
    assert ledger["val"]["shared_with_train"] == 0
    progress = final_state(words)["progress"]
    assert progress["tokens_seen"] == ledger["train"]["targets"]  # an epoch is the training side and no more
    assert len(logged(words, "val_loss")) == 1


def test_which_documents_are_held_out_depends_on_their_text_alone(arguments, tmp_path):
    held = []
    for name, texts in (("a", [f"bird {i}" for i in range(200)]), ("b", [f"bird {i}" for i in range(400, -1, -1)])):
        (tmp_path / "d.jsonl").write_bytes(b"".join(map(line, texts)))
        words = replaced(
            arguments, data_path=tmp_path / "d.jsonl", val_fraction=0.1, save_weight=name, cache_dir=tmp_path / name
        )
        train(words, "--stop_after", 1)
        (path,) = (p for p in (tmp_path / name).glob("*/metadata.json") if '"part": "val"' in p.read_text())
        tokens = np.fromfile(path.parent / "tokens.bin", np.uint16)
        decoded = TOKENIZER.decode(tokens, skip_special_tokens=True)
        held.append(set(re.findall(r"bird \d+", decoded)))
    assert held[0] <= held[1] and len(held[0]) > 5


def test_validation_texts_that_are_trained_on_too_are_told(arguments, tmp_path, capsys):
    corpus = Path(dict(zip(arguments[::2], arguments[1::2], strict=True))["--data_path"])
    first = corpus.read_bytes().splitlines(keepends=True)[:7]
    (tmp_path / "v.jsonl").write_bytes(b"".join(first) + line("a text of its own"))
    train(arguments, "--val_path", tmp_path / "v.jsonl")
    shown = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("Validation: "))
    assert "8 documents" in shown and "7 shared with train" in shown


# --- texts that change between runs ---


def test_texts_that_changed_get_a_new_cache_and_a_resume_refuses_them(arguments, tmp_path, capsys):
    corpus = Path(dict(zip(arguments[::2], arguments[1::2], strict=True))["--data_path"])
    train(arguments, "--stop_after", 4)
    before = logged(arguments)
    with corpus.open("ab") as file:
        file.write(line("one more"))
    train(arguments, "--from_resume", 1, expect=2)
    err = capsys.readouterr().err
    assert "its data fingerprint is" in err and "give the same texts" in err
    assert logged(arguments) == before and final_state(arguments)["progress"]["step"] == 4
    assert len(list((tmp_path / "cache").glob("*/metadata.json"))) == 2
    train(arguments, "--overwrite", 1)  # another run may take them


def test_texts_replaced_at_the_same_size_and_time_are_noticed_by_a_resume(arguments, capsys):
    corpus = Path(dict(zip(arguments[::2], arguments[1::2], strict=True))["--data_path"])
    train(arguments, "--stop_after", 4)
    info, data = corpus.stat(), corpus.read_bytes()
    corpus.write_bytes(data.replace(b"cat", b"dog"))
    os.utime(corpus, ns=(info.st_atime_ns, info.st_mtime_ns))
    train(arguments, "--from_resume", 1, expect=2)
    captured = capsys.readouterr()
    assert "has changed though its size and time have not" in captured.out
    assert "its data fingerprint is" in captured.err
    corpus.write_bytes(data)
    train(arguments, "--from_resume", 1)


def test_token_ids_damaged_on_the_disk_are_found_and_built_again(arguments, tmp_path, capsys):
    train(arguments)
    loss = logged(arguments)
    (path,) = (tmp_path / "cache").glob("*/tokens.bin")
    data = bytearray(path.read_bytes())
    for damaged in (bytes([data[100] ^ 1]), b"\xff\xff"):  # a valid id in another's place; an id of no token
        path.write_bytes(data[:100] + damaged + data[100 + len(damaged) :])
        train(arguments, "--overwrite", 1)
        shown = capsys.readouterr().out
        assert f"token cache {path.parent} is not used: the content of tokens.bin has changed; building it" in shown
        assert logged(arguments) == loss


def test_files_given_twice_are_read_once_and_counted(arguments, tmp_path, capsys):
    corpus = Path(dict(zip(arguments[::2], arguments[1::2], strict=True))["--data_path"])
    other = write(tmp_path / "other.jsonl", line("two").decode())
    (tmp_path / "link.jsonl").symlink_to(corpus)
    for paths, count in (
        (f"{corpus},{other}", 0),
        (f"{corpus},{corpus},{other}", 1),
        (f"{corpus},{tmp_path}/*.jsonl", 1),
        (f"{corpus},{other},{tmp_path}/link.jsonl,{other},{other}", 2),
    ):
        words = replaced(arguments, data_path=paths, overwrite=1)
        train(words, "--stop_after", 1)
        ledger = json.loads((run_folder(words) / "run.json").read_text())["ledger"]["train"]
        shown = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("Data: "))
        assert (ledger["documents"], ledger["given_twice"]) == (61, count)
        assert (f", {count} files given twice, read once" in shown) == bool(count)


# --- very much text ---


@pytest.mark.slow
def test_a_50_megabyte_line_trains_in_bounded_memory(arguments, tmp_path):
    text = "the cat sat on a mat and saw two red birds. " * (50_000_000 // 44)
    (tmp_path / "d.jsonl").write_bytes(line(text))
    report(arguments, tmp_path / "d.jsonl", "one line of 50 MB")


@pytest.mark.slow
def test_a_million_one_word_lines_train_in_bounded_memory(arguments, tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b"".join(line(f"word{i % 5000}") for i in range(1_000_000)))
    report(arguments, tmp_path / "d.jsonl", "1,000,000 lines of a word")


def report(arguments: list[str], path: Path, what: str) -> None:
    """One step of a small model on these texts as a program of its own; prints seconds and memory."""
    began = time.perf_counter()
    out = spawn(command(replaced(arguments, data_path=path, max_seq_len=512), "--stop_after", 1), timeout=900)
    memory = float(re.findall(r"memory: ([\d.]+)GiB", out)[-1])
    print(f"{what}: {time.perf_counter() - began:.1f} s in all, peak memory {memory:.2f} GiB")
    print(next(text for text in out.splitlines() if text.startswith("Data: ")))
    assert memory < 1.2  # torch itself takes 0.4
