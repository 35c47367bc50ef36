import gzip
import json
import os
import pickle
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.source_files import find_files
from dataset.text_reader import TextReader
from errors import DataError


def read(data_path, text_key="text", bad_lines="stop"):
    """Texts and ledger, or DataError."""
    reader = TextReader(find_files(data_path), text_key, bad_lines)
    texts = [document.text for document in reader]
    reader.finish()
    return texts, reader.ledger


def problems(data_path, **options):
    with pytest.raises(DataError) as caught:
        read(data_path, **options)
    return caught.value.problems


def line(text, **more):
    return json.dumps({"text": text, **more}, ensure_ascii=False).encode("utf-8") + b"\n"


@pytest.fixture
def jsonl(tmp_path):
    def write(data: bytes, name="data.jsonl"):
        path = tmp_path / name
        path.write_bytes(data)
        return str(path)

    return write


# --- texts survive ---


@pytest.mark.parametrize(
    "odd", ["\u2028", "\u2029", "\u0085", "\x0c", "\x0b", "\x1c", "\x00", "\r", "\ufeff", "🦊", "\u0301"]
)
def test_odd_characters_inside_a_text_survive_escaped_and_raw(jsonl, odd):
    text = f"one{odd}two"
    escaped = json.dumps({"text": text}).encode() + b"\n"
    raw = b'{"text": "' + text.encode("utf-8") + b'"}\n'
    assert read(jsonl(escaped + raw + line(text)))[0] == [text] * 3


def test_bom_at_the_start_crlf_and_a_missing_last_newline_are_accepted(jsonl):
    data = b"\xef\xbb\xbf" + line("one").replace(b"\n", b"\r\n") + line("two").rstrip(b"\n")
    texts, ledger = read(jsonl(data))
    assert texts == ["one", "two"] and ledger.lines == 2 and not ledger.rejected


def test_surrogate_pairs_in_escapes_are_one_character(jsonl):
    assert read(jsonl(b'{"text": "\\ud83e\\udd8a"}\n'))[0] == ["🦊"]


def test_lines_longer_than_a_block_and_lines_at_block_borders_come_out_whole(jsonl):
    texts = ["狐" * 900_000, "short", "x" * (1 << 20), "y" * ((1 << 20) - 13), "end"]
    assert read(jsonl(b"".join(map(line, texts))))[0] == texts


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.text(min_size=1).filter(lambda t: t.strip()), min_size=1),
    st.booleans(),
    st.sampled_from([7, 64, 1 << 20]),
)
def test_whatever_texts_are_written_come_out_again(tmp_path_factory, texts, ascii_only, block):
    path = tmp_path_factory.mktemp("texts") / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=ascii_only) for text in texts]
    path.write_bytes("\n".join(lines).encode("utf-8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dataset.text_formats.BLOCK_BYTES", block)
        assert read(str(path))[0] == texts


# --- counted, not wrong ---


def test_blank_lines_and_empty_texts_are_counted_and_left_out(jsonl):
    data = line("one") + b"\n \t\r\n" + line("") + line(" \n\u3000") + line("two") + b"\n"
    texts, ledger = read(jsonl(data))
    assert texts == ["one", "two"]
    assert (ledger.blank_lines, ledger.empty_texts, ledger.lines) == (3, 2, 7)


def test_of_a_repeated_key_the_last_wins_and_the_line_is_counted(jsonl):
    data = b'{"text": "no", "text": "yes"}\n{"text": null, "id": 1, "text": "also"}\n' + line("plain", meta={"a": 1})
    texts, ledger = read(jsonl(data))
    assert texts == ["yes", "also", "plain"] and ledger.duplicate_keys == 2


def test_nan_and_endless_numbers_elsewhere_in_the_object_are_accepted(jsonl):
    data = (
        b'{"score": NaN, "text": "one"}\n{"n": -Infinity, "text": "two"}\n{"n": '
        + b"9" * 6000
        + b', "text": "three"}\n'
    )
    assert read(jsonl(data))[0] == ["one", "two", "three"]


# --- wrong lines ---

WRONG = {
    "not json": (b"hello", "invalid JSON"),
    "unquoted": (b"{text: 1}", "invalid JSON"),
    "two values": (b'{"text": "a"} {"text": "b"}', "more than one JSON value"),
    "invalid utf-8": (b'{"text": "\xff\xfe"}', "invalid UTF-8"),
    "overlong utf-8": (b'{"text": "\xc0\xaf"}', "invalid UTF-8"),
    "utf-8 surrogate": (b'{"text": "\xed\xa0\x80"}', "invalid UTF-8"),
    "utf-16": ('{"text": "abc"}'.encode("utf-16-le"), "UTF-16"),
    "lone surrogate": (b'{"text": "a\\ud800b"}', "lone surrogate"),
    "low surrogate first": (b'{"text": "\\udc00\\ud800"}', "lone surrogate"),
    "list": (b'["text"]', "not an object: the line is a list"),
    "string": (b'"text"', "not an object: the line is a string"),
    "number": (b"17", "not an object: the line is a number"),
    "null": (b"null", "not an object: the line is null"),
    "bare nan": (b"NaN", "not an object"),
    "key missing": (b'{"content": "a"}', "key 'text' missing: it has 'content'; choose with --text_key"),
    "no key": (b"{}", "key 'text' missing: it has no key at all"),
    "text null": (b'{"text": null}', "'text' is null"),
    "text number": (b'{"text": 5}', "'text' is a number"),
    "text nan": (b'{"text": NaN}', "'text' is a number"),
    "text boolean": (b'{"text": true}', "'text' is a boolean"),
    "text list": (b'{"text": ["a"]}', "'text' is a list"),
    "text object": (b'{"text": {}}', "'text' is an object"),
    "deep": (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    "bom inside": (b'\xef\xbb\xbf{"text": "a"}', "byte order mark inside the file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_line_is_named_with_file_line_and_reason(jsonl, case):
    wrong, reason = WRONG[case]
    path = jsonl(line("one") + wrong + b"\n" + line("two"))
    found = problems(path)
    assert found[0].startswith(f"{path}:2: ") and reason in found[0]
    assert found[-1].startswith("1 wrong line (") and "--bad_lines skip" in found[-1]


@pytest.mark.parametrize("case", WRONG)
def test_skip_leaves_exactly_the_wrong_line_out_and_counts_it(jsonl, case):
    texts, ledger = read(jsonl(line("one") + WRONG[case][0] + b"\n" + line("two")), bad_lines="skip")
    assert texts == ["one", "two"]
    assert sum(ledger.rejected.values()) == 1 and len(ledger.examples) == 1


@pytest.mark.parametrize("cut", [1, 5, 9, 12, 15])
def test_a_cut_last_line_is_called_cut_short(jsonl, cut):
    whole = b'{"text": "fox"}'
    found = problems(jsonl(line("one") + whole[:cut])) if cut < len(whole) else []
    assert not found or "cut short" in found[0]
    assert found or read(jsonl(line("one") + whole))[0] == ["one", "fox"]


def test_null_never_becomes_the_word_none(jsonl):
    texts, _ = read(jsonl(b'{"text": null}\n' + line("one")), bad_lines="skip")
    assert texts == ["one"]


def test_the_first_ten_wrong_lines_are_shown_and_all_are_counted_by_reason(jsonl):
    data = (line("fine") + b"{}\n") * 12 + b"nonsense\n" * 3
    found = problems(jsonl(data))
    assert len(found) == 11 and found[9].split(": ")[0].endswith(":20")
    assert found[-1].startswith("15 wrong lines (key 'text' missing 12, invalid JSON 3); the first 10 are named above")


def test_every_line_of_a_utf16_file_is_called_utf16(jsonl):
    for encoding in ("utf-16", "utf-16-be"):
        texts = "\n".join(json.dumps({"text": "abc"}) for _ in range(3)) + "\n"
        found = problems(jsonl(texts.encode(encoding)))
        assert "UTF-16 text" in found[0] and "invalid" not in found[-1]


def test_another_text_key_is_read_and_a_bad_option_is_refused(jsonl):
    path = jsonl(b'{"content": "a", "text": 5}\n')
    assert read(path, text_key="content")[0] == ["a"]
    assert "neither 'stop' nor 'skip'" in problems(path, bad_lines="ignore")[0]


MUTANTS = 10_000


def test_ten_thousand_mutated_lines_never_give_a_traceback(jsonl):
    rng = random.Random(1)
    seeds = [
        line('It was a fox. 狐狸 🦊 \n\t"quoted"', id=7, list=[1, {"a": None}]).rstrip(b"\n"),
        b'{"text": "\\ud83e\\udd8a"}',
    ]
    mutated = b"\n".join(mutate(rng, rng.choice(seeds)) for _ in range(MUTANTS))
    texts, ledger = read(jsonl(mutated), bad_lines="skip")
    outcomes = len(texts) + ledger.blank_lines + ledger.empty_texts + sum(ledger.rejected.values())
    assert outcomes == ledger.lines >= MUTANTS
    assert len(texts) > MUTANTS // 40 and sum(ledger.rejected.values()) > MUTANTS // 40


def mutate(rng, data: bytes) -> bytes:
    data = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del data[at : at + rng.randint(1, 8)]
        elif kind == 2:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 4)))
        elif kind == 3:
            data[at:at] = rng.choice(
                [b"\\u", b"\\ud800", b"null", b"NaN", b"1e999", b'"', b"}", b"{", b"[[[[", b"\x00", b","]
            )
        else:
            del data[at:]
    return bytes(data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_at_all_are_read_or_reported(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bytes") / "a.jsonl"
    path.write_bytes(data)
    try:
        read(str(path))
    except DataError as error:
        assert all(isinstance(problem, str) and problem for problem in error.problems)


# --- kinds of files ---


def test_gzip_is_read_and_counted_like_plain(jsonl):
    texts = [f"text {i}" for i in range(1000)]
    data = b"".join(map(line, texts))
    two_members = gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :])
    assert read(jsonl(two_members, "a.jsonl.gz"))[0] == texts


def test_a_truncated_gzip_names_the_byte(jsonl):
    packed = gzip.compress(b"".join(line(f"text {random.random()}") for _ in range(1000)))
    found = problems(jsonl(packed[:-500], "a.jsonl.gz"), bad_lines="skip")
    assert f"ends too early, at byte {len(packed) - 500}" in found[-1]


def test_a_damaged_gzip_is_refused_in_words(jsonl):
    packed = bytearray(gzip.compress(b"".join(line(f"text {random.random()}") for _ in range(1000))))
    packed[len(packed) // 2] ^= 0xFF
    assert "gzip data is damaged" in problems(jsonl(bytes(packed), "a.jsonl.gz"))[-1]


def test_a_txt_file_is_one_document_with_its_line_ends(jsonl):
    texts, ledger = read(jsonl(b"\xef\xbb\xbfone\r\n\r\ntwo\n", "a.txt"))
    assert texts == ["one\r\n\r\ntwo\n"] and ledger.blank_lines == 0


def test_a_txt_file_in_another_encoding_is_named_with_its_line(jsonl):
    found = problems(jsonl("eins\nzwei äöü\n".encode("latin-1"), "a.txt"))
    assert ":2: invalid UTF-8: byte 11 is 0xe4" in found[0]
    assert "UTF-16" in problems(jsonl("abc".encode("utf-16"), "b.txt"))[0]


def test_parquet_without_pyarrow_is_refused_in_words(jsonl, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "pip install pyarrow" in problems(jsonl(b"PAR1 and so on", "a.parquet"))[0]


def test_parquet_columns_are_read_and_nulls_are_wrong_lines(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an optional package")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an optional package")
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"text": ["one", None, "", "two"], "id": [1, 2, 3, 4]}), path)
    texts, ledger = read(path, bad_lines="skip")
    assert texts == ["one", "two"] and ledger.empty_texts == 1 and sum(ledger.rejected.values()) == 1
    assert "no column 'content'; name one of these with --text_key: text, id" in problems(path, text_key="content")[0]
    assert problems(path, text_key="id")[0].startswith(f"{path}:1: 'id' is a number")
    (tmp_path / "b.parquet").write_bytes(b"PAR1" + b"x" * 100)
    assert "cannot be read as parquet" in problems(str(tmp_path / "b.parquet"))[0]


# --- JSON in another shape ---


def converted(problem, tmp_path):
    """What the command at the end of a message writes."""
    line = problem[problem.index("python -c") :].replace("python", sys.executable, 1)
    subprocess.run(line, shell=True, check=True, cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "utf-8"})


OBJECTS = [{"text": "one 猫"}, {"text": "two"}]
ARRAYS = {
    "indented": json.dumps(OBJECTS, indent=1),
    "on one line": json.dumps(OBJECTS),
    "on one line with an end": json.dumps(OBJECTS) + "\n \n",
    "an object a line": "[" + ",\n".join(map(json.dumps, OBJECTS)) + "]",
    "after a byte order mark": "\ufeff" + json.dumps(OBJECTS, indent=1),
    "after blank lines": "\n\n" + json.dumps(OBJECTS, indent=1),
    "CRLF": json.dumps(OBJECTS, indent=1).replace("\n", "\r\n"),
    "longer than a block": json.dumps([*OBJECTS, {"text": "x" * 3_000_000}]),
}


@pytest.mark.parametrize("name", ["a b.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("case", ARRAYS)
def test_a_json_array_gets_one_message_with_a_command_that_helps(jsonl, tmp_path, case, name):
    data = ARRAYS[case].encode()
    path = jsonl(gzip.compress(data) if name.endswith("gz") else data, name)
    for bad_lines in ("stop", "skip"):
        (problem,) = problems(path, bad_lines=bad_lines)
        assert problem.startswith(f"{path}: is one JSON array, not one object a line; ")
    converted(problem, tmp_path)
    assert read(str(tmp_path / "lines.jsonl"))[0][:2] == ["one 猫", "two"]


def test_an_object_spread_over_lines_gets_one_message(jsonl):
    data = "\n".join(json.dumps(each, indent=1) for each in OBJECTS).encode()
    assert "JSON objects spread over several lines" in problems(jsonl(data))[0]


@pytest.mark.parametrize("first", [b'["a list"]', b"[INFO] a log", b"[1,", b"{", b"[] {}"])
def test_a_first_line_that_is_wrong_alone_is_a_wrong_line(jsonl, first):
    data = first + b"\n" + line("two")
    assert problems(jsonl(data))[0].startswith(f"{jsonl(data)}:1: ")
    assert read(jsonl(data), bad_lines="skip")[0] == ["two"]


CHATS = {
    "conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "你好", "think": None}],
    "messages": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "你好"}],
}


@pytest.mark.parametrize("options", [{}, {"text_key": "conversations"}, {"text_key": "content"}])
@pytest.mark.parametrize("key", CHATS)
def test_chat_data_is_called_so_once_with_a_command_that_helps(jsonl, tmp_path, key, options):
    path = jsonl((json.dumps({"id": 1, key: CHATS[key]}, ensure_ascii=False).encode() + b"\n") * 3, "chat.jsonl")
    (problem,) = problems(path, **options)
    assert problem.startswith(f"{path}: line 1 is chat data: {key!r} holds the turns") and "--text_key" not in problem
    converted(problem, tmp_path)
    assert read(str(tmp_path / "texts.jsonl"))[0] == ["hi\n你好"] * 3


def test_of_chat_lines_among_texts_skip_leaves_out_and_counts(jsonl):
    data = line("one") + json.dumps(CHATS).encode() + b"\n" + line("two", messages=CHATS["messages"])
    texts, ledger = read(jsonl(data), bad_lines="skip")
    assert texts == ["one", "two"] and ledger.rejected == {"chat data": 1}
    assert ":2: chat data: 'conversations' holds" in ledger.examples[0]


def test_a_parquet_column_of_turns_is_called_chat_data(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an optional package")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an optional package")
    parquet.write_table(pyarrow.table({"messages": [CHATS["messages"]]}), tmp_path / "a.parquet")
    assert "chat data: 'messages' holds the turns" in problems(str(tmp_path / "a.parquet"))[0]


# --- which files ---


def names(data_path):
    return [os.path.basename(file.path) for file in find_files(data_path)]


def test_files_folders_globs_and_lists_are_found_in_a_fixed_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "deep/er/c.txt", "d.JSONL", ".hidden.jsonl", "notes.md", "with,comma.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(line("x"))
    assert names(str(tmp_path)) == ["a.jsonl", "b.jsonl", "d.JSONL", "c.txt", "with,comma.jsonl"]
    assert names(f"{tmp_path}/[ab].jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(f"{tmp_path}/with,comma.jsonl") == ["with,comma.jsonl"]
    assert names([tmp_path / "b.jsonl", f"{tmp_path}/*.jsonl"]) == ["b.jsonl", "a.jsonl", "with,comma.jsonl"]


def test_a_file_counts_how_often_the_data_path_leads_to_it(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(line("x"))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "link.jsonl").symlink_to(tmp_path / "b.jsonl")
    found = find_files([tmp_path / "b.jsonl", tmp_path, f"{tmp_path}/../{tmp_path.name}/a.jsonl"])
    assert [(file.path.name, file.times_given) for file in found] == [("b.jsonl", 3), ("a.jsonl", 2)]


REFUSED = {
    "missing": (lambda d: None, "x.jsonl", "no such file or folder"),
    "no match": (lambda d: None, "*.jsonl", "no file matches this pattern"),
    "empty file": (lambda d: (d / "x.jsonl").touch(), "x.jsonl", "is empty (0 bytes)"),
    "empty folder": (lambda d: (d / "sub").mkdir(), "sub", "holds no file ending in .jsonl"),
    "other kind": (lambda d: (d / "x.csv").write_text("a,b"), "x.csv", "unknown kind of file"),
    "fifo": (lambda d: os.mkfifo(d / "x.jsonl"), "x.jsonl", "is a named pipe (fifo), not a file"),
    "fifo in folder": (lambda d: os.mkfifo(d / "x.jsonl"), "", "is a named pipe (fifo), not a file"),
    "broken link": (lambda d: (d / "x.jsonl").symlink_to("nowhere"), "x.jsonl", "cannot be looked at"),
    "html": (lambda d: (d / "x.jsonl").write_text("\n<!DOCTYPE html><html>"), "x.jsonl", "is a web page (HTML)"),
    "lfs": (
        lambda d: (d / "x.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid"),
        "x.jsonl",
        "git-lfs",
    ),
    "gzip named jsonl": (
        lambda d: (d / "x.jsonl").write_bytes(gzip.compress(b"{}")),
        "x.jsonl",
        "rename it to .jsonl.gz",
    ),
    "jsonl named gzip": (lambda d: (d / "x.jsonl.gz").write_bytes(b"{}"), "x.jsonl.gz", "is not gzip data"),
    "text named parquet": (lambda d: (d / "x.parquet").write_bytes(b"{}"), "x.parquet", "is not a parquet file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_path_that_leads_to_no_text_is_refused_in_words(tmp_path, case):
    make, name, phrase = REFUSED[case]
    make(tmp_path)
    found = problems(str(tmp_path / name))
    assert len(found) == 1 and phrase in found[0] and str(tmp_path) in found[0]


def test_a_device_and_an_empty_data_path_are_refused(tmp_path):
    assert "is a device, not a file" in problems("/dev/null")[0]
    assert "is empty" in problems([])[0]


def test_all_wrong_paths_are_reported_together(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    assert len(problems([f"{tmp_path}/empty.jsonl", f"{tmp_path}/none.jsonl", f"{tmp_path}/*.txt"])) == 3


@pytest.mark.parametrize("change", ["grow", "shrink", "touch", "delete"])
def test_a_file_that_changes_while_it_is_read_is_refused(jsonl, change):
    path = jsonl(b"".join(line(f"text {i}") for i in range(100_000)))
    reader = TextReader(find_files(path))
    documents = iter(reader)
    next(documents)
    if change == "grow":
        with open(path, "ab") as handle:
            handle.write(line("more"))
    elif change == "shrink":
        os.truncate(path, 2_000_000)
    elif change == "touch":
        os.utime(path, ns=(1, 1))
    else:
        os.remove(path)
    assert sum(1 for _ in documents) > 0
    with pytest.raises(DataError, match=r"changed while it was being read|reading failed"):
        reader.finish()


def test_digests_are_of_the_file_as_it_lies_on_disk(jsonl):
    import hashlib

    packed = gzip.compress(line("one")) + b"\0" * 100  # padding after the data belongs to the file
    path = jsonl(packed, "a.jsonl.gz")
    reader = TextReader(find_files(path))
    assert len(list(reader)) == 1
    assert reader.digests == {path: hashlib.sha256(packed).hexdigest()}


def test_a_data_error_keeps_its_problems_through_pickle():
    copy = pickle.loads(pickle.dumps(DataError(["one", "two"])))
    assert copy.problems == ["one", "two"] and str(copy) == "one\ntwo"
