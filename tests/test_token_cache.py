import errno
import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_tokenizer import TEXT, make_backend, make_folder
from tokenizers import Tokenizer, models, pre_tokenizers

import dataset.cache_builder as cache_builder
import dataset.token_cache as token_cache
from dataset.text_tokenizer import TextTokenizer
from dataset.token_cache import build_or_open, count_shared
from errors import DataError
from storage.files import HashedFile

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return TextTokenizer.load(tokenizer_folder)


def write(path: Path, texts) -> Path:
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def texts_of(cache, tokenizer):
    pairs = zip(cache.document_offsets[:-1], cache.document_offsets[1:], strict=True)
    return [tokenizer.decode(cache.tokens[start + 1 : end - 1]) for start, end in pairs]


@pytest.fixture
def texts():
    return [f"{i} {TEXT[i % 90 :]}" for i in range(200)] + ["a", "狐", "<|im_end|>"]


@pytest.fixture
def build(tmp_path, tokenizer):
    def call(path, **options):
        options = {"cache_dir": tmp_path / "cache", "progress": False, **options}
        return build_or_open(path, options.pop("tokenizer", tokenizer), **options)

    return call


def built_folders(cache_dir: Path) -> list[str]:
    return sorted(entry.name for entry in cache_dir.iterdir() if entry.is_dir())


# --- what is in it ---


def test_each_document_is_bos_ids_eos_in_file_order(tmp_path, build, tokenizer, texts):
    cache = build(write(tmp_path / "a.jsonl", texts))
    assert texts_of(cache, tokenizer) == texts
    starts, ends = cache.document_offsets[:-1], cache.document_offsets[1:]
    assert set(cache.tokens[starts].tolist()) == {tokenizer.bos_id}
    assert set(cache.tokens[ends - 1].tolist()) == {tokenizer.eos_id}
    assert cache.document_bytes.tolist() == [len(text.encode("utf-8")) for text in texts]
    assert cache.tokens.dtype == np.uint16 and cache.document_offsets.dtype == np.int64


@pytest.mark.parametrize("size, chunks", [(1, 10), (50, 1), (1000, 3), (10**9, 10**9)])
def test_the_size_of_a_tokenizer_call_does_not_change_the_tokens(tmp_path, build, texts, monkeypatch, size, chunks):
    path = write(tmp_path / "a.jsonl", texts)
    expected = build(path)
    monkeypatch.setattr(cache_builder, "BATCH_BYTES", size)
    monkeypatch.setattr(cache_builder, "BATCH_CHUNKS", chunks)
    cache = build(path, cache_dir=tmp_path / "other")
    for name in ("tokens", "document_offsets", "document_bytes", "document_hashes"):
        assert np.array_equal(getattr(cache, name), getattr(expected, name)), name
    assert cache.ledger == expected.ledger and cache.fingerprint == expected.fingerprint


def test_long_texts_in_chunks_give_the_ids_of_the_whole(tmp_path, build, tokenizer, monkeypatch):
    texts = [TEXT * 40, "short", TEXT * 25, "x" * 3000]
    monkeypatch.setattr(cache_builder, "BATCH_BYTES", 500)
    monkeypatch.setattr(TextTokenizer, "chunks", lambda self, text: self._cuts.chunks(text, 200))
    cache = build(write(tmp_path / "a.jsonl", texts))
    expected = [[tokenizer.bos_id, *ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(texts)]
    assert cache.tokens.tolist() == [number for ids in expected for number in ids]
    assert cache.document_bytes.tolist() == [len(text.encode("utf-8")) for text in texts]


def test_vocabularies_over_65536_are_stored_in_four_bytes(tmp_path, build):
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(70_000)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = make_folder(tmp_path / "wide", backend, bos_token="w1", eos_token="w2", pad_token=None)
    cache = build(write(tmp_path / "a.jsonl", ["w69999 w65536 w7"]), tokenizer=TextTokenizer.load(folder))
    assert cache.tokens.dtype == np.uint32 and cache.tokens.tolist() == [1, 69999, 65536, 7, 2]


def test_a_text_that_normalises_to_nothing_counts_as_empty(tmp_path, build):
    backend = make_backend(normalizer="StripAccents")
    folder = make_folder(tmp_path / "stripping", backend)
    cache = build(write(tmp_path / "a.jsonl", ["one", "\u0301", " ", "two"]), tokenizer=TextTokenizer.load(folder))
    assert cache.documents == 2 and cache.ledger["empty_texts"] == 2


def test_the_ledger_counts_everything_that_was_read(tmp_path, build, texts):
    path = tmp_path / "a.jsonl"
    write(path, [*texts, "", texts[3], texts[3]])
    with open(path, "ab") as handle:
        handle.write(b'\n{"text": "x", "text": "y"}\nnonsense\n{}\n')
    cache = build(path, bad_lines="skip")
    ledger = cache.ledger
    assert ledger["documents"] == len(texts) + 3 == cache.documents
    assert ledger["tokens"] == len(cache.tokens)
    assert ledger["bytes"] == cache.document_bytes.sum()
    assert ledger["bytes_per_token"] == ledger["bytes"] / (ledger["tokens"] - 2 * ledger["documents"])
    counted = {key: ledger[key] for key in ("exact_duplicates", "blank_lines", "empty_texts", "duplicate_keys")}
    assert counted == {"exact_duplicates": 2, "blank_lines": 1, "empty_texts": 1, "duplicate_keys": 1}
    assert ledger["rejected"] == {"invalid JSON": 1, "key 'text' missing": 1}


def test_duplicates_are_counted_in_turns_as_at_once(tmp_path, monkeypatch):
    hashes = np.random.default_rng(0).integers(0, 5000, 20_000).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    hashes.tofile(tmp_path / "hashes.bin")
    expected = len(hashes) - len(np.unique(hashes))
    for size in (300, 7000, 20_000, 1 << 22):
        monkeypatch.setattr(cache_builder, "SORTED_HASHES", size)
        assert cache_builder.count_duplicates(tmp_path / "hashes.bin") == expected


def peak_bytes(call, *arguments):
    tracemalloc.start()
    try:
        call(*arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_counting_takes_no_more_memory_for_more_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_builder, "SORTED_HASHES", 1 << 14)
    peaks, shared = [], []
    for count in (200_000, 1_600_000):
        hashes = np.random.default_rng(0).integers(0, 2**64, count, np.uint64)
        hashes.tofile(tmp_path / "document_hashes.bin")
        few = SimpleNamespace(document_hashes=hashes[[5, 5, 1000, count - 1]] + np.array([0, 0, 0, 1], np.uint64))
        peaks.append(peak_bytes(cache_builder.count_duplicates, tmp_path / "document_hashes.bin"))
        shared.append(peak_bytes(count_shared, SimpleNamespace(folder=tmp_path), few))
        assert count_shared(SimpleNamespace(folder=tmp_path), few) == 3
    assert peaks[1] - peaks[0] < 300_000 and shared[1] - shared[0] < 300_000  # 1.4 million hashes take 11 MB


def test_a_pickled_cache_maps_the_same_files(tmp_path, build, texts):
    cache = build(write(tmp_path / "a.jsonl", texts))
    assert cache.tokens is cache.tokens
    copy = pickle.loads(data := pickle.dumps(cache))
    assert len(data) < 10_000 and np.array_equal(copy.tokens, cache.tokens) and copy.ledger == cache.ledger


# --- found again or not ---


def forbid_building(monkeypatch):
    def fail(*_):
        raise AssertionError("tokenised again")

    monkeypatch.setattr(token_cache, "build_cache", fail)


def test_a_second_call_opens_without_reading_the_texts(tmp_path, build, texts, monkeypatch):
    path = write(tmp_path / "a.jsonl", texts)
    first = build(path)
    forbid_building(monkeypatch)
    assert build(path).fingerprint == first.fingerprint
    monkeypatch.chdir(tmp_path)
    assert build("a.jsonl").folder == first.folder


def test_any_change_of_files_tokenizer_or_options_makes_another_cache(tmp_path, build, tokenizer_folder, texts):
    path = write(tmp_path / "a.jsonl", texts)
    other = make_folder(tmp_path / "other", make_backend(vocab_size=400))
    caches = [
        build(path),
        build(path, tokenizer=TextTokenizer.load(other)),
        build(path, tokenizer=TextTokenizer.load(tokenizer_folder, parse_special=True)),
        build(path, val_fraction=0.3),
        build(path, val_fraction=0.3, part="val"),
    ]
    write(path, [*texts, "one more"])
    caches.append(build(path))
    assert len({cache.folder for cache in caches}) == len({cache.fingerprint for cache in caches}) == len(caches)


def test_markup_taken_as_text_is_other_data_only_where_there_is_some(tmp_path, build):
    backend = make_backend()
    backend.add_tokens(["<think>"])
    folder = make_folder(tmp_path / "thinking", backend)
    now, earlier = TextTokenizer.load(folder), TextTokenizer.load(folder)
    earlier.markup = []  # an earlier release parsed it
    for texts, same in ((["one", "two"], True), (["one", "<think>", "two"], False)):
        path = write(tmp_path / "a.jsonl", texts)
        caches = build(path, tokenizer=now), build(path, tokenizer=earlier)
        assert caches[0].folder != caches[1].folder
        assert (caches[0].fingerprint == caches[1].fingerprint) == same


def test_a_file_rewritten_with_the_same_size_is_noticed_by_its_time(tmp_path, build, tokenizer):
    path = write(tmp_path / "a.jsonl", ["one", "two"])
    before = build(path)
    write(path, ["one", "six"])
    os.utime(path, ns=(1, 1))
    after = build(path)
    assert texts_of(after, tokenizer) == ["one", "six"] and after.fingerprint != before.fingerprint


def test_the_fingerprint_is_of_the_content_wherever_it_lies(tmp_path, build, texts):
    first = build(write(tmp_path / "a.jsonl", texts))
    (tmp_path / "moved").mkdir()
    second = build(write(tmp_path / "moved" / "b.jsonl", texts), cache_dir=tmp_path / "cache2")
    assert first.fingerprint == second.fingerprint and first.folder.name != second.folder.name


def flip_a_byte(file: Path):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def edit_metadata(folder: Path, **changes):
    """As an earlier release wrote it: without a digest of its own, which would tell of any change."""
    path = folder / "metadata.json"
    metadata = json.loads(path.read_text()) | changes
    del metadata["manifest_sha256"]
    path.write_text(json.dumps(metadata))


DAMAGE = {
    "tokens cut": lambda f: os.truncate(f / "tokens.bin", 100),
    "tokens gone": lambda f: (f / "tokens.bin").unlink(),
    "offsets cut": lambda f: os.truncate(f / "document_offsets.bin", 8),
    "hashes longer": lambda f: (f / "document_hashes.bin").write_bytes(b"12345678" * 9999),
    "no metadata": lambda f: (f / "metadata.json").unlink(),
    "metadata cut": lambda f: os.truncate(f / "metadata.json", 50),
    "metadata garbage": lambda f: (f / "metadata.json").write_bytes(b"\xff\xfe\x00"),
    "metadata a list": lambda f: (f / "metadata.json").write_text("[]"),
    "metadata without files": lambda f: (f / "metadata.json").write_text('{"version": 1}'),
    "another version": lambda f: edit_metadata(f, version=999),
    "another dtype": lambda f: edit_metadata(f, dtype="uint32"),
    "no ledger": lambda f: edit_metadata(f, ledger={}),
    "only a folder": lambda f: [file.unlink() for file in f.iterdir()],
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_cache_is_built_again_with_a_notice(tmp_path, build, tokenizer, texts, capsys, case):
    path = write(tmp_path / "a.jsonl", texts)
    folder = build(path).folder
    DAMAGE[case](folder)
    cache = build(path, progress=True)
    assert texts_of(cache, tokenizer) == texts
    assert "is not used: " in capsys.readouterr().out
    assert built_folders(tmp_path / "cache") == [folder.name]


FILES = ["tokens.bin", "document_offsets.bin", "document_bytes.bin", "document_hashes.bin"]


@pytest.mark.parametrize("verify, hashed", [(False, 1 << 25), (True, 0)], ids=["small, at each start", "verify"])
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_any_file_is_found(
    tmp_path, build, tokenizer, texts, capsys, monkeypatch, name, verify, hashed
):
    monkeypatch.setattr(token_cache, "HASHED_BYTES", hashed)
    path = write(tmp_path / "a.jsonl", texts)
    flip_a_byte(build(path).folder / name)
    cache = build(path, verify=verify, progress=True)
    assert texts_of(cache, tokenizer) == texts
    told = f"{name} is damaged: its SHA-256 differs from that in metadata.json"
    assert (told if verify else f"the content of {name} has changed") in capsys.readouterr().out


def overwrite(name: str, start: float, data: bytes):
    """Write over a file from this part of it on, as far as `data` goes and no further than its end."""

    def damage(folder: Path) -> None:
        size = (folder / name).stat().st_size
        with open(folder / name, "r+b") as file:
            file.seek(int(start * size) // 8 * 8)
            file.write(data[: size - file.tell()])

    return damage


LARGE_DAMAGE = {
    "zeros to the end": (overwrite("tokens.bin", 0.8, bytes(10**6)), "tokens.bin is damaged near document"),
    "ids beyond the vocabulary": (overwrite("tokens.bin", 0.5, b"\xff" * 2000), "tokens.bin is damaged near document"),
    "valid ids that are no documents": (
        overwrite("tokens.bin", 0.1, np.arange(300, 400, dtype=np.uint16).tobytes() * 90),
        "tokens.bin is damaged near document",
    ),
    "ids of one byte's shift": (
        lambda f: (f / "tokens.bin").write_bytes((f / "tokens.bin").read_bytes()[1:] + b"\0"),
        "tokens.bin is damaged near document 1",
    ),
    "offsets of zero": (overwrite("document_offsets.bin", 0.4, bytes(400)), "document_offsets.bin is damaged near"),
    "offsets beyond the tokens": (
        overwrite("document_offsets.bin", 0.2, b"\x7f" * 400),
        "document_offsets.bin is damaged near",
    ),
    "negative offsets": (overwrite("document_offsets.bin", 0.0, b"\xff" * 8), "document_offsets.bin is damaged near"),
}


@pytest.mark.parametrize("case", LARGE_DAMAGE)
def test_damage_of_files_too_large_to_hash_is_found(tmp_path, build, tokenizer, texts, capsys, monkeypatch, case):
    monkeypatch.setattr(token_cache, "HASHED_BYTES", 0)
    damage, phrase = LARGE_DAMAGE[case]
    path = write(tmp_path / "a.jsonl", texts)
    damage(build(path).folder)
    assert texts_of(build(path, progress=True), tokenizer) == texts
    shown = capsys.readouterr().out
    assert phrase in shown and "; building it again" in shown


def test_a_good_cache_too_large_to_hash_is_opened_as_it_is(tmp_path, build, texts, monkeypatch):
    monkeypatch.setattr(token_cache, "HASHED_BYTES", 0)
    for number, some in enumerate((texts, texts[:1], texts[:3], ["x " * 30_000, "y"])):
        path = write(tmp_path / f"{number}.jsonl", some)
        build(path)
        with monkeypatch.context() as patch:
            forbid_building(patch)
            build(path)


def test_the_error_for_damage_found_later_names_folder_and_remedy(tmp_path, build, texts):
    cache = build(write(tmp_path / "a.jsonl", texts))
    (problem,) = cache.damaged("row 7 holds the id 9999").problems
    assert problem.startswith(f"token cache {cache.folder}: row 7 holds the id 9999; ")
    assert "delete this folder or start with --verify_data 1" in problem


def replace_quietly(path: Path, old: bytes, new: bytes) -> None:
    """Put other content of the same size in place; size and modification time stay."""
    info = path.stat()
    path.write_bytes(path.read_bytes().replace(old, new))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert path.stat().st_size == info.st_size and path.stat().st_mtime_ns == info.st_mtime_ns


def test_texts_replaced_at_the_same_size_and_time_are_noticed(tmp_path, build, tokenizer, capsys):
    path = write(tmp_path / "a.jsonl", ["one", "two"])
    before = build(path)
    replace_quietly(path, b"two", b"six")
    after = build(path, progress=True)
    assert texts_of(after, tokenizer) == ["one", "six"] and after.fingerprint != before.fingerprint
    assert "though its size and time have not" in capsys.readouterr().out


def test_another_file_moved_into_the_place_is_noticed(tmp_path, build, tokenizer):
    path = write(tmp_path / "a.jsonl", ["one", "two"])
    build(path)
    other = write(tmp_path / "b.jsonl", ["one", "six"])
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    os.replace(other, path)
    assert texts_of(build(path), tokenizer) == ["one", "six"]


def large_file(path: Path) -> Path:
    """3 MiB in documents of their own; those named `middle` lie between the samples."""
    texts = [f"{i} " + "a" * 1000 for i in range(3000)]
    texts[1550] = "middle one"
    return write(path, texts)


def test_a_touched_file_keeps_its_cache_with_a_word_where_samples_could_miss(tmp_path, build, capsys, monkeypatch):
    small, large = write(tmp_path / "a.jsonl", ["one"]), large_file(tmp_path / "b.jsonl")
    build([small, large])
    forbid_building(monkeypatch)
    for path in (small, large):
        path.chmod(0o600)
    build([small, large], progress=True)
    shown = capsys.readouterr().out
    assert shown.startswith(f"{large}: touched since the cache was built; samples are unchanged, --verify_data 1")
    build([small, large], progress=True, verify=True)
    assert capsys.readouterr().out == ""


def test_verify_finds_what_lies_between_the_samples(tmp_path, build, capsys):
    path = large_file(tmp_path / "a.jsonl")
    before = build(path).fingerprint
    replace_quietly(path, b"middle one", b"middle two")
    assert build(path, progress=True).fingerprint == before
    assert "touched since the cache was built" in capsys.readouterr().out
    assert build(path, verify=True, progress=True).fingerprint != before
    assert "though its size and time have not" in capsys.readouterr().out


@pytest.mark.parametrize("at", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_samples_of_a_large_file_reach_from_end_to_end(tmp_path, build, at):
    path = large_file(tmp_path / "a.jsonl")
    before = build(path).fingerprint
    (data, wide), info = (path.read_bytes(), 300_000), path.stat()  # no gap between samples is as wide
    start = int(at * (len(data) - wide))
    path.write_bytes(data[:start] + data[start : start + wide].replace(b"a", b"b") + data[start + wide :])
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert build(path).fingerprint != before


def test_a_cache_that_holds_no_samples_opens_as_before(tmp_path, build, monkeypatch):
    path = write(tmp_path / "a.jsonl", ["one", "two"])
    folder = build(path).folder
    sources = json.loads((folder / "metadata.json").read_text())["sources"]
    edit_metadata(folder, sources=[{k: s[k] for k in ("path", "bytes", "mtime_ns", "sha256")} for s in sources])
    path.chmod(0o600)
    forbid_building(monkeypatch)
    assert build(path).documents == 2


def test_verify_keeps_a_good_cache(tmp_path, build, texts, monkeypatch):
    path = write(tmp_path / "a.jsonl", texts)
    build(path)
    forbid_building(monkeypatch)
    build(path, verify=True)


# --- wrong lines, no cache ---


def test_wrong_lines_publish_no_cache_and_skip_builds_one(tmp_path, build, texts):
    path = write(tmp_path / "a.jsonl", texts)
    with open(path, "ab") as handle:
        handle.write(b"nonsense\n")
    with pytest.raises(DataError, match=f":{len(texts) + 1}: invalid JSON"):
        build(path)
    assert built_folders(tmp_path / "cache") == []
    assert build(path, bad_lines="skip").documents == len(texts)


def test_a_cache_built_with_skip_still_stops_a_run_that_does_not(tmp_path, build, texts, monkeypatch):
    path = write(tmp_path / "a.jsonl", texts)
    with open(path, "ab") as handle:
        handle.write(b"nonsense\n")
    build(path, bad_lines="skip")
    forbid_building(monkeypatch)
    with pytest.raises(DataError) as caught:
        build(path)
    assert caught.value.problems[0].startswith(f"{path}:{len(texts) + 1}: invalid JSON")


@pytest.mark.parametrize("data", [b"\n\n", b'{"text": ""}\n{"text": "  "}\n'])
def test_files_without_a_single_document_are_refused(tmp_path, build, data):
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(DataError, match="no document to use"):
        build(tmp_path / "a.jsonl")
    assert built_folders(tmp_path / "cache") == []


# --- held-out documents ---


def test_held_out_documents_are_never_trained_on_and_none_is_lost(tmp_path, build, tokenizer, texts):
    path = write(tmp_path / "a.jsonl", texts + texts[:20])  # copies of a document fall on the same side
    train, val = build(path, val_fraction=0.25), build(path, val_fraction=0.25, part="val")
    train_texts, val_texts = texts_of(train, tokenizer), texts_of(val, tokenizer)
    assert sorted(train_texts + val_texts) == sorted(texts + texts[:20])
    assert not set(train_texts) & set(val_texts)
    assert 0.1 < len(val_texts) / len(texts) < 0.4
    assert train.ledger["other_part"] == val.documents and count_shared(train, val) == 0


def test_which_documents_are_held_out_does_not_depend_on_the_rest_of_the_corpus(tmp_path, build, tokenizer, texts):
    small = build(write(tmp_path / "a.jsonl", texts[:100]), val_fraction=0.25, part="val")
    large = build(write(tmp_path / "b.jsonl", texts[::-1]), val_fraction=0.25, part="val")
    assert set(texts_of(small, tokenizer)) == set(texts_of(large, tokenizer)) & set(texts[:100])
    wider = build(tmp_path / "b.jsonl", val_fraction=0.5, part="val")
    assert set(texts_of(large, tokenizer)) <= set(texts_of(wider, tokenizer))


def test_the_choice_is_the_same_for_ever(tmp_path, build, tokenizer):
    path = write(tmp_path / "a.jsonl", [f"document {i}" for i in range(20)])
    held_out = texts_of(build(path, val_fraction=0.25, part="val"), tokenizer)
    assert held_out == [f"document {i}" for i in (0, 3, 6, 16, 17, 18)]


def test_shared_documents_are_counted(tmp_path, build, texts):
    train = build(write(tmp_path / "train.jsonl", texts))
    val = build(write(tmp_path / "val.jsonl", ["new", texts[0], texts[5], texts[5] + " "]))
    assert count_shared(train, val) == 2


@pytest.mark.parametrize("options", [{"val_fraction": 1.0}, {"val_fraction": -0.1}, {"part": "val"}, {"part": "test"}])
def test_impossible_fractions_and_parts_are_refused(tmp_path, build, texts, options):
    with pytest.raises(DataError, match="val_fraction"):
        build(write(tmp_path / "a.jsonl", texts), **options)


def test_a_fraction_that_holds_nothing_out_is_refused_in_words(tmp_path, build):
    with pytest.raises(DataError, match="1 documents in the other part of val_fraction 1e-06"):
        build(write(tmp_path / "a.jsonl", ["one"]), val_fraction=1e-6, part="val")


# --- disks and processes ---


DISK_ERRORS = {errno.ENOSPC: "No space left", errno.EROFS: "Read-only file system", errno.EIO: "Input/output error"}


@pytest.mark.parametrize("number", DISK_ERRORS)
def test_a_disk_that_fails_while_writing_is_reported_and_leaves_nothing(tmp_path, build, texts, monkeypatch, number):
    def fail(self, array):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(HashedFile, "write", fail)
    with pytest.raises(DataError, match=f"{DISK_ERRORS[number]}.*--cache_dir"):
        build(write(tmp_path / "a.jsonl", texts))
    assert built_folders(tmp_path / "cache") == []


def test_a_cache_dir_that_is_a_file_is_reported_in_words(tmp_path, build, texts):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="--cache_dir"):
        build(write(tmp_path / "a.jsonl", texts), cache_dir=tmp_path / "file" / "cache")


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small disk: Linux, as root")
def test_a_really_full_and_a_really_read_only_disk_are_reported(tmp_path, build, tokenizer, texts):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine does not allow mounting")
    try:
        path = write(tmp_path / "a.jsonl", texts)
        with pytest.raises(DataError, match="No space left"):
            build(path, cache_dir=disk)
        subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
        assert texts_of(build(path, cache_dir=disk), tokenizer) == texts
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert build(path, cache_dir=disk).documents == len(texts)  # a good cache needs no writing
        with pytest.raises(DataError, match="Read-only file system"):
            build(path, cache_dir=disk, val_fraction=0.5)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_ctrl_c_leaves_nothing_behind(tmp_path, build, texts, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_builder._Writer, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build(write(tmp_path / "a.jsonl", texts))
    assert built_folders(tmp_path / "cache") == []


SLOW_BUILDER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what runs in the background
import dataset.cache_builder as cache_builder
import dataset.token_cache as token_cache
from dataset.text_tokenizer import TextTokenizer
write = cache_builder._Writer.write
def slow(self, *arguments):
    write(self, *arguments)
    print("writing", flush=True)
    time.sleep(float(sys.argv[4]))
cache_builder._Writer.write = slow
cache = token_cache.build_or_open(sys.argv[1], TextTokenizer.load(sys.argv[2]), cache_dir=sys.argv[3])
print(cache.fingerprint)
"""


def start_builder(path, tokenizer_folder, cache_dir, pause):
    command = [sys.executable, "-c", SLOW_BUILDER, str(path), str(tokenizer_folder), str(cache_dir), str(pause)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def wait_for_writing(process):
    for line in process.stdout:
        if line == "writing\n":
            return
    raise AssertionError("the builder ended without writing")


def test_a_killed_builder_is_cleaned_up_and_replaced(tmp_path, build, tokenizer, tokenizer_folder, texts):
    path = write(tmp_path / "a.jsonl", texts)
    process = start_builder(path, tokenizer_folder, tmp_path / "cache", 60)
    wait_for_writing(process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert built_folders(tmp_path / "cache")[0].startswith(".tmp-")
    cache = build(path)
    assert texts_of(cache, tokenizer) == texts
    assert built_folders(tmp_path / "cache") == [cache.folder.name]


def test_of_two_processes_at_once_one_builds_and_the_other_waits(tmp_path, tokenizer_folder, texts):
    path = write(tmp_path / "a.jsonl", texts)
    first = start_builder(path, tokenizer_folder, tmp_path / "cache", 3)
    wait_for_writing(first)
    second = start_builder(path, tokenizer_folder, tmp_path / "cache", 0)
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in (first, second)]
    assert outputs[0][-1] == outputs[1][-1] and len(outputs[0][-1]) == 64
    assert "writing" not in outputs[1] and not any(line.startswith("tokenised") for line in outputs[1])
    assert any(line.startswith("waiting for another process") for line in outputs[1])


def test_a_waiting_process_can_be_interrupted(tmp_path, tokenizer_folder, texts):
    path = write(tmp_path / "a.jsonl", texts)
    first = start_builder(path, tokenizer_folder, tmp_path / "cache", 60)
    wait_for_writing(first)
    second = start_builder(path, tokenizer_folder, tmp_path / "cache", 0)
    try:
        assert second.stdout.readline().startswith("waiting for another process")
        asked = time.monotonic()
        second.send_signal(signal.SIGINT)
        second.communicate(timeout=20)
        assert second.returncode != 0 and time.monotonic() - asked < 10
    finally:
        first.kill()
        first.communicate()


# --- what is said ---


def test_the_size_is_announced_before_and_close_to_what_it_becomes(tmp_path, build, capsys):
    texts = [TEXT * (i % 7 + 1) for i in range(2000)]
    plain = write(tmp_path / "a.jsonl", texts)
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, packed):
        cache = build(path, progress=True)
        announced, done = capsys.readouterr().out.splitlines()
        assert announced.startswith("tokenising ") and done.startswith("tokenised 2,000 documents")
        megabytes = float(announced.split("about ")[1].split(" MB")[0])
        actual = cache.metadata["files"]["tokens.bin"]["bytes"] / 1e6
        assert 0.5 * actual < megabytes < 2 * actual + 0.2
    build(plain, progress=True)
    assert capsys.readouterr().out == ""


def test_without_progress_nothing_is_printed(tmp_path, build, texts, capfd):
    build(write(tmp_path / "a.jsonl", texts))
    assert capfd.readouterr() == ("", "")


# --- sizes ---

MEASURE = """
import re, sys
import dataset.cache_builder as cache_builder
from dataset.text_tokenizer import TextTokenizer
from dataset.token_cache import build_or_open
cache_builder.SORTED_HASHES = int(sys.argv[4])
cache = build_or_open(sys.argv[1], TextTokenizer.load(sys.argv[2]), cache_dir=sys.argv[3], progress=False)
# Not ru_maxrss: a started program inherits the peak of the one that started it.
peak_kib = int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
print(cache.documents, len(cache.tokens), peak_kib * 1024)
"""


def measure(path, tokenizer_folder, cache_dir, sorted_hashes=1 << 22):
    words = (path, tokenizer_folder, cache_dir, sorted_hashes)
    command = [sys.executable, "-c", MEASURE, *map(str, words)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(int(word) for word in output.split())


@pytest.mark.slow
def test_a_50_megabyte_line_is_tokenised_whole_in_bounded_memory(tmp_path, tokenizer_folder, tokenizer):
    repeats = 50_000_000 // len(TEXT.encode("utf-8"))
    text = (TEXT * repeats)[:-1]
    documents, tokens, peak = measure(write(tmp_path / "a.jsonl", [text]), tokenizer_folder, tmp_path / "cache")
    assert documents == 1 and peak < 600e6
    twice, thrice = tokenizer.encode_batch([TEXT * 2, TEXT * 3])
    assert abs(tokens - repeats * (len(thrice) - len(twice))) < 10


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_documents(tmp_path, tokenizer_folder):
    peaks = []
    for count in (500_000, 2_000_000):  # below the first, the tokenizer fills its own table of words
        path = write(tmp_path / f"{count}.jsonl", (f"word{i}" for i in range(count)))
        documents, _, peak = measure(path, tokenizer_folder, tmp_path / "cache", sorted_hashes=1 << 16)
        assert documents == count
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 8e6  # 5 bytes a document
