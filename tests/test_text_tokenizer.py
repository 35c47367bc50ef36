import itertools
import json
import pickle
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import TEXT, make_backend, make_folder
from tokenizers import AddedToken, Tokenizer, models
from tokenizers.processors import TemplateProcessing

from dataset.text_tokenizer import TextTokenizer
from errors import DataError

UNSAFE_KINDS = ("none", "metaspace")
SAFE_KINDS = ("gpt2", "cl100k", "words", "prefix")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tokenizer"))


def plain_ids(backend: Tokenizer, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


def test_special_strings_in_a_text_are_plain_text_unless_parse_special(folder):
    text = "before<|im_end|>after"
    plain, parsed = TextTokenizer.load(folder), TextTokenizer.load(folder, parse_special=True)
    assert plain.eos_id not in plain.encode_batch([text])[0]
    assert plain.decode(plain.encode_batch([text])[0]) == text
    assert parsed.encode_batch([text])[0].count(parsed.eos_id) == 1


def with_added_tokens() -> Tokenizer:
    """A vocabulary with tokens added that are not flagged special: markup, a run of spaces, a word."""
    backend = make_backend()
    backend.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "[TOOL]", "    ", "COVID-19")])
    backend.add_tokens([AddedToken("</think>", normalized=True, lstrip=True, rstrip=True)])
    return backend


def test_markup_in_a_text_is_plain_text_unless_parse_special(tmp_path):
    folder = make_folder(tmp_path, with_added_tokens())
    plain, parsed = TextTokenizer.load(folder), TextTokenizer.load(folder, parse_special=True)
    text = "a <think> b </think> [TOOL]<|im_end|>"
    expected = TextTokenizer.load(make_folder(tmp_path / "bare")).encode_batch([text])
    assert plain.encode_batch([text]) == expected and plain.markup == ["</think>", "<think>", "[TOOL]"]
    assert {plain.backend.token_to_id(name) for name in plain.markup} < set(parsed.encode_batch([text])[0])
    assert plain.digest == parsed.digest and parsed.markup == []
    copy = pickle.loads(pickle.dumps(plain))
    assert copy.encode_batch([text]) == expected and copy.digest == plain.digest
    assert plain.decode(parsed.encode_batch(["a<think>"])[0], skip_special_tokens=True) == "a<think>"


def test_other_added_tokens_are_ordinary_vocabulary(tmp_path):
    tokenizer = TextTokenizer.load(make_folder(tmp_path, with_added_tokens()))
    ids = tokenizer.encode_batch(["if    COVID-19"])[0]
    assert {tokenizer.backend.token_to_id(name) for name in ("    ", "COVID-19")} < set(ids)


def test_truncation_of_the_file_does_not_apply_to_markup(tmp_path):
    backend = with_added_tokens()
    backend.enable_truncation(5)
    tokenizer = TextTokenizer.load(make_folder(tmp_path, backend))
    assert tokenizer.encode_batch([TEXT])[0] == plain_ids(make_backend(), TEXT)


def test_ids_carry_no_bos_or_eos_even_with_a_template_in_the_file(tmp_path):
    backend = make_backend()
    backend.post_processor = TemplateProcessing(
        "<|im_start|> $A <|im_end|>", None, [("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    tokenizer = TextTokenizer.load(make_folder(tmp_path, backend))
    assert tokenizer.encode_batch([TEXT])[0] == plain_ids(make_backend(), TEXT)


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path):
    backend = make_backend()
    backend.enable_truncation(5)
    backend.enable_padding(length=50)
    tokenizer = TextTokenizer.load(make_folder(tmp_path, backend))
    assert tokenizer.encode_batch([TEXT, "a"]) == [plain_ids(make_backend(), TEXT), plain_ids(make_backend(), "a")]


@pytest.mark.parametrize("form", [str, lambda name: {"content": name, "lstrip": False, "__type": "AddedToken"}])
def test_special_tokens_are_read_as_strings_and_as_objects(tmp_path, form):
    make_folder(tmp_path, bos_token=form("<|im_start|>"), eos_token=form("<|im_end|>"), pad_token=form("<|endoftext|>"))
    tokenizer = TextTokenizer.load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 0)


def test_special_tokens_map_fills_what_the_config_leaves_out(tmp_path):
    make_folder(tmp_path, bos_token=None, eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(
        '{"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}}'
    )
    tokenizer = TextTokenizer.load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 2)


def test_without_bos_the_eos_opens_a_document_and_without_pad_it_pads(tmp_path):
    tokenizer = TextTokenizer.load(make_folder(tmp_path, bos_token=None, pad_token=None))
    assert tokenizer.bos_id == tokenizer.pad_id == tokenizer.eos_id == 2


def test_vocab_size_covers_the_highest_added_id(tmp_path):
    backend = make_backend()
    before = backend.get_vocab_size()
    backend.add_tokens(["<extra>"])
    backend.add_special_tokens(["<|more|>"])
    tokenizer = TextTokenizer.load(make_folder(tmp_path, backend))
    assert tokenizer.vocab_size == before + 2 == max(backend.get_vocab().values()) + 1


REFUSED = {
    "missing": (lambda f: None, "no such folder"),
    "empty": (lambda f: f.mkdir(), "no usable tokenizer"),
    "broken": (lambda f: (make_folder(f) / "tokenizer.json").write_text('{"version"'), "no readable tokenizer"),
    "no eos": (lambda f: make_folder(f, eos_token=None), "names no eos token"),
    "unknown eos": (lambda f: make_folder(f, eos_token="</s>"), "'</s>' is not in the vocabulary"),
    "broken config": (lambda f: (make_folder(f) / "tokenizer_config.json").write_text("{"), "not readable JSON"),
    "list config": (lambda f: (make_folder(f) / "tokenizer_config.json").write_text("[]"), "no JSON object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unusable_folders_are_refused_in_words(tmp_path, case):
    make, phrase = REFUSED[case]
    make(tmp_path / "tokenizer")
    with pytest.raises(DataError, match=phrase) as caught:
        TextTokenizer.load(tmp_path / "tokenizer")
    assert len(caught.value.problems) == 1 and str(tmp_path) in caught.value.problems[0]


def test_digest_follows_what_changes_ids_and_nothing_else(tmp_path):
    digest = TextTokenizer.load(make_folder(tmp_path / "a")).digest
    truncating = make_backend()
    truncating.enable_truncation(5)
    truncating.post_processor = TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
    same = [
        TextTokenizer.load(make_folder(tmp_path / "b", truncating)),
        TextTokenizer.load(make_folder(tmp_path / "c", pad_token="<|im_end|>")),
        TextTokenizer.load(tmp_path / "a", parse_special=True),
    ]
    other = [
        TextTokenizer.load(make_folder(tmp_path / "d", make_backend(vocab_size=421))),
        TextTokenizer.load(make_folder(tmp_path / "e", make_backend("cl100k"))),
        TextTokenizer.load(make_folder(tmp_path / "f", make_backend(normalizer="NFC"))),
        TextTokenizer.load(make_folder(tmp_path / "g", bos_token="<|endoftext|>")),
        TextTokenizer.load(make_folder(tmp_path / "h", eos_token="<|endoftext|>")),
    ]
    assert {tokenizer.digest for tokenizer in same} == {digest}
    assert len({tokenizer.digest for tokenizer in other} | {digest}) == len(other) + 1


def test_digest_survives_older_ways_of_writing_the_same_file(tmp_path):
    digest = TextTokenizer.load(make_folder(tmp_path)).digest
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    del content["model"]["ignore_merges"], content["normalizer"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content, indent=4), encoding="utf-8")
    assert TextTokenizer.load(tmp_path).digest == digest


def test_folder_without_tokenizer_json_goes_through_transformers_to_the_same_ids(tmp_path):
    backend = make_backend()
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    backend.model.save(str(tmp_path))  # vocab.json and merges.txt
    config = {"tokenizer_class": "GPT2Tokenizer", "unk_token": "<|endoftext|>"} | names
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = TextTokenizer.load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.encode_batch([TEXT])[0] == plain_ids(backend, TEXT)
    assert pickle.loads(pickle.dumps(tokenizer)).digest == tokenizer.digest


def test_texts_that_a_vocabulary_cannot_express_are_refused_in_words(tmp_path):
    backend = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}))
    tokenizer = TextTokenizer.load(make_folder(tmp_path, backend, bos_token=None, eos_token="</s>", pad_token=None))
    assert tokenizer.encode_batch(["a"]) == [[0]]
    with pytest.raises(DataError, match="cannot encode these texts"):
        tokenizer.encode_batch(["b"])


def test_a_pickled_tokenizer_gives_the_same_ids_and_digest(folder):
    tokenizer = TextTokenizer.load(folder, parse_special=True)
    copy = pickle.loads(pickle.dumps(tokenizer))
    text = TEXT + "<|im_end|>"
    assert copy.encode_batch([text]) == tokenizer.encode_batch([text])
    assert (copy.digest, copy.pad_id, copy.parse_special) == (tokenizer.digest, tokenizer.pad_id, True)


# --- cutting long texts ---


def joined_ids(tokenizer: TextTokenizer, chunks: list[str]) -> list[int]:
    return [number for ids in tokenizer.encode_batch(chunks) for number in ids]


def random_text(seed: int, length: int) -> str:
    rng = random.Random(seed)
    marks = [" ", "  ", "\n", "\n\n", "\t", "，", "。", "'", "’s", "'s", ".", ",", "...", "\u3000", "\u2028"]
    words = [
        "fox",
        "It",
        "café",
        "狐狸",
        "天气",
        "Ünï",
        "e\u0301",
        "ß",
        "<|im_end|>",
        "🦊",
        "\u00a0",
        "(x)",
        "don't",
        "7",
    ]
    parts = [marks, words]
    return "".join(rng.choice(rng.choice(parts)) for _ in range(length))


@pytest.mark.parametrize("kind", SAFE_KINDS)
@pytest.mark.parametrize("normalizer", [None, "NFC", "NFKD", "Lowercase"])
def test_chunks_of_a_long_text_give_the_ids_of_the_whole(tmp_path, kind, normalizer):
    tokenizer = TextTokenizer.load(make_folder(tmp_path, make_backend(kind, normalizer)))
    for seed in range(3):
        text = random_text(seed, 3000)
        chunks = list(tokenizer.chunks(text, limit=200))
        assert "".join(chunks) == text
        assert len(chunks) > 10, "cut too rarely to bound the memory"
        assert joined_ids(tokenizer, chunks) == tokenizer.encode_batch([text])[0]


@pytest.mark.parametrize("kind", UNSAFE_KINDS)
def test_texts_are_left_whole_where_cutting_could_change_ids(tmp_path, kind):
    tokenizer = TextTokenizer.load(make_folder(tmp_path, make_backend(kind)))
    text = random_text(0, 2000)
    assert list(tokenizer.chunks(text, limit=200)) == [text]


def test_added_tokens_that_reach_over_a_cut_prevent_cutting(tmp_path):
    backend = make_backend()
    backend.add_tokens([AddedToken("New York", normalized=False)])
    tokenizer = TextTokenizer.load(make_folder(tmp_path, backend))
    text = "New York " * 500
    assert list(tokenizer.chunks(text, limit=100)) == [text]


def test_a_text_without_any_place_to_cut_stays_whole(folder):
    tokenizer = TextTokenizer.load(folder)
    assert list(tokenizer.chunks("狐" * 5000, limit=100)) == ["狐" * 5000]
    assert list(tokenizer.chunks("", limit=100)) == [""]


@settings(max_examples=60, deadline=None)
@given(
    st.text(alphabet=st.sampled_from("aé狐 \n\t'’s.，。1<|_🦊\u0301\u00a0\u2028(!"), max_size=400),
    st.integers(1, 60),
    st.sampled_from(SAFE_KINDS),
)
@example("a a a a.a", 1, "gpt2")
def test_chunks_give_the_ids_of_the_whole_for_any_text(text, limit, kind):
    tokenizer = _cached(kind)
    chunks = list(itertools.islice(tokenizer.chunks(text, limit=limit), len(text) + 1))
    assert all(chunks) or chunks == [""]
    assert "".join(chunks) == text
    assert joined_ids(tokenizer, chunks) == tokenizer.encode_batch([text])[0]


_CACHE: dict[str, TextTokenizer] = {}


def _cached(kind: str) -> TextTokenizer:
    if kind not in _CACHE:
        backend = make_backend(kind)
        _CACHE[kind] = TextTokenizer(backend, json.loads(backend.to_str()), 1, 2, 0)
    return _CACHE[kind]
