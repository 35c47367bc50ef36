"""The bundled sample: its texts, its exact entropy, and the folder it is written to."""

import hashlib
import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from dataset import make_sample as sample
from dataset.make_sample import Again, Draw, Expand, Grammar, Part, load_grammar, make_sample, recall

TOKENIZER = Tokenizer.from_file(str(Path(__file__).resolve().parent.parent / "model" / "tokenizer.json"))
GRAMMAR = load_grammar()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sample") / "made"
    make_sample(path)
    return path


def texts_of(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def derivations(grammar: Grammar, text: str) -> list[float]:
    """-ln p of every way in which the grammar can have made the whole text: an independent, exhaustive parser."""

    def match(parts: tuple[Part, ...], at: int, known: dict) -> Iterator[tuple[int, dict, float]]:
        if not parts:
            yield at, known, 0.0
            return
        part, rest = parts[0], parts[1:]
        for middle, seen, nats in step(part, at, known):
            for end, last, more in match(rest, middle, seen):
                yield end, last, nats + more

    def step(part: Part, at: int, known: dict) -> Iterator[tuple[int, dict, float]]:
        if isinstance(part, Draw):
            entries = grammar.words[part.words]
            for entry in entries:
                if text.startswith(entry[part.fact], at):
                    seen = {**known, part.name: entry} if part.name else known
                    yield at + len(entry[part.fact]), seen, math.log(len(entries))
        elif isinstance(part, Expand):
            rule = grammar.rules[part.rule]
            for parts, nats in zip(rule.alternatives, rule.nats, strict=True):
                for end, seen, more in match(parts, at, known):
                    yield end, seen, nats + more
        else:
            literal = recall(part, known) if isinstance(part, Again) else part
            if text.startswith(literal, at):
                yield at + len(literal), known, 0.0

    return [nats for end, _, nats in step(Expand("document"), 0, {}) if end == len(text)]


def sources(grammar: Grammar) -> dict[str, set[str]]:
    """Variable -> the word lists it is drawn from, over the whole grammar."""
    found: dict[str, set[str]] = {}
    for rule in grammar.rules.values():
        for part in (part for parts in rule.alternatives for part in parts):
            if isinstance(part, Draw) and part.name:
                found.setdefault(part.name, set()).add(part.words)
    return found


def openings(grammar: Grammar, parts: tuple[Part, ...], length: int) -> set[str]:
    """How texts of these parts can begin, cut at `length` characters; a remembered word may be any of its lists."""
    if not parts or length <= 0:
        return {""}
    part, rest = parts[0], parts[1:]
    if isinstance(part, str):
        heads = {part[:length]}
    elif isinstance(part, Draw):
        heads = {entry[part.fact][:length] for entry in grammar.words[part.words]}
    elif isinstance(part, Expand):
        heads = {head for p in grammar.rules[part.rule].alternatives for head in openings(grammar, p, length)}
    else:
        lists = sources(grammar)
        entries = [e for n in lists[part.name] for e in grammar.words[n] if part.fact.lower() in e]
        others = [e for n in lists[part.plus] for e in grammar.words[n]] if part.plus else [{}]
        heads = {recall(part, {part.name: e, part.plus: o})[:length] for e in entries for o in others}
    return {h + tail for h in heads for tail in openings(grammar, rest, length - len(h))}


def begins_another(beginnings: list[tuple[str, int]]) -> Iterator[tuple[str, str]]:
    """Pairs (a, b) of different alternatives (the numbers) where a begins b. In sorted order all that a text begins
    follow it without a gap, so the texts that begin the present one form a stack."""
    stack: list[tuple[str, int]] = []
    for text, number in sorted(beginnings):
        while stack and not text.startswith(stack[-1][0]):
            stack.pop()
        yield from ((before, text) for before, other in stack if other != number)
        stack.append((text, number))


def clashes(grammar: Grammar, length: int = 6) -> list[tuple[str, str, str]]:
    """Places where what was chosen cannot be told from the text that follows: (rule or list, beginning, beginning)."""
    found = []
    for name, rule in grammar.rules.items():
        begun = [(head, i) for i, p in enumerate(rule.alternatives) for head in openings(grammar, p, length)]
        found += [(name, *pair) for pair in begins_another(begun)]
        for part in (part for parts in rule.alternatives for part in parts if isinstance(part, Draw)):
            shown = [(entry[part.fact], i) for i, entry in enumerate(grammar.words[part.words])]
            found += [(part.words, *pair) for pair in begins_another(shown)]
    return found


def test_no_choice_begins_like_another_so_every_text_has_one_derivation():
    # If at every choice no possible continuation begins another one, a reader always knows which was taken: by
    # induction from left to right the derivation is the only one.
    assert clashes(GRAMMAR) == []


@pytest.mark.parametrize(
    "text",
    [
        "@ document\na{w}\n= w\nb ; bc",  # a word begins another
        "@ document\n{w} x\n{w} y\n= w\nlonger ; words",  # the same words in two alternatives
        "@ document\n[r]\nb\n@ r\nb!\na",
        "@ document\n{x=w}[r]\n= w\na ; b\n@ r\n{$x}\nab",
    ],
)
def test_the_check_of_beginnings_notices_an_ambiguous_grammar(text):
    assert clashes(load_grammar(text), 6)


def test_an_exhaustive_parser_finds_one_derivation_with_the_generators_probability():
    rng = random.Random(11)
    for name in [part.rule for parts in GRAMMAR.rules["document"].alternatives for part in parts if part != ""]:
        start = GRAMMAR.rules["document"]
        index = [parts[0].rule for parts in start.alternatives].index(name)
        for _ in range(8):
            text, nats = GRAMMAR.draw(rng, name)
            assert derivations(GRAMMAR, text) == [pytest.approx(nats + start.nats[index], abs=1e-9)]


def test_the_parser_counts_two_derivations_where_there_are_two():
    grammar = load_grammar("@ document\n{w} x\na {v}\n= w\na ; b\n= v\nx ; y")
    assert derivations(grammar, "a x") == [pytest.approx(math.log(4))] * 2
    assert derivations(grammar, "b x") == [pytest.approx(math.log(4))]
    assert derivations(grammar, "b y") == []


@pytest.mark.parametrize("rule", ["en-spot", "zh-spot", "en-ask", "zh-ask", "en-add"])
def test_the_texts_of_a_small_rule_are_all_different_and_their_probabilities_add_up_to_one(rule):
    def expand(parts, known) -> Iterator[tuple[str, float]]:
        if not parts:
            yield "", 1.0
            return
        part, rest = parts[0], parts[1:]
        if isinstance(part, Draw):
            options = [(e[part.fact], 1 / len(GRAMMAR.words[part.words]), {**known, part.name: e})
                       for e in GRAMMAR.words[part.words]]  # fmt: skip
        elif isinstance(part, Expand):
            r = GRAMMAR.rules[part.rule]
            options = [(t, math.exp(-n) * p, known) for a, n in zip(r.alternatives, r.nats, strict=True)
                       for t, p in expand(a, known)]  # fmt: skip
        else:
            options = [(recall(part, known) if isinstance(part, Again) else part, 1.0, known)]
        for text, p, seen in options:
            for tail, q in expand(rest, seen):
                yield text + tail, p * q

    produced = list(expand((Expand(rule),), {}))
    assert len({text for text, _ in produced}) == len(produced) > 90
    assert math.fsum(p for _, p in produced) == pytest.approx(1.0, abs=1e-9)


def test_the_mean_of_minus_ln_p_agrees_with_the_grammars_entropy_within_three_standard_errors():
    rng = random.Random(5)
    nats = [GRAMMAR.draw(rng)[1] for _ in range(4000)]
    mean = math.fsum(nats) / len(nats)
    error = math.sqrt(sum((x - mean) ** 2 for x in nats) / (len(nats) - 1) / len(nats))
    assert abs(mean - GRAMMAR.entropy()) < 3 * error
    assert error < 1.0


def test_the_entropy_of_a_grammar_small_enough_for_paper_is_right():
    grammar = load_grammar("@ document\n3* a{w}\n[r]!\n= w\n1..4\n@ r\nx\ny")
    expected = 0.75 * (math.log(4 / 3) + math.log(4)) + 0.25 * (math.log(4) + math.log(2))
    assert grammar.entropy() == pytest.approx(expected, abs=1e-12)


def test_the_written_nats_of_the_validation_part_are_those_of_its_texts(folder):
    val = json.loads((folder / "sample.json").read_text())["val"]
    texts = texts_of(folder / "val.jsonl")
    found = [derivations(GRAMMAR, text) for text in texts]
    assert all(len(ways) == 1 for ways in found)
    assert val["nats"] == pytest.approx(math.fsum(ways[0] for ways in found), abs=1e-5)
    assert val["documents"] == len(texts) == 1000
    assert val["bytes"] == sum(len(text.encode()) for text in texts)
    assert val["characters"] == sum(map(len, texts))
    assert val["nats_per_byte"] == pytest.approx(val["nats"] / val["bytes"])


def test_a_token_of_the_sample_carries_at_least_0_8_nats_and_no_document_300_tokens(folder):
    val = json.loads((folder / "sample.json").read_text())["val"]
    texts = texts_of(folder / "val.jsonl") + texts_of(folder / "train.jsonl")[:3000]
    lengths = [len(encoding.ids) + 1 for encoding in TOKENIZER.encode_batch(texts)]  # eos is a target too
    assert val["nats"] / sum(lengths[: val["documents"]]) >= 0.8
    assert max(lengths) + 1 < 300


def test_repeats_are_counted_and_fewer_than_one_in_a_thousand(folder):
    description = json.loads((folder / "sample.json").read_text())
    train, val = texts_of(folder / "train.jsonl"), texts_of(folder / "val.jsonl")
    assert description["train"]["repeats"] == len(train) - len(set(train)) <= len(train) / 1000
    assert description["val"]["repeats"] == len(val) - len(set(val)) <= len(val) / 1000
    assert description["val_documents_in_train"] == len(set(train) & set(val)) <= len(val) / 1000


def test_the_sample_has_3_to_10_megabytes_in_both_languages(folder):
    texts = texts_of(folder / "train.jsonl")
    assert 3e6 < sum((folder / name).stat().st_size for name in ("train.jsonl", "val.jsonl")) < 10e6
    chinese = sum(any("\u4e00" <= c <= "\u9fff" for c in text) for text in texts)
    assert 0.4 < chinese / len(texts) < 0.6


def test_answers_follow_from_their_questions(folder):
    text = "\n".join(texts_of(folder / "train.jsonl"))
    sums = re.findall(r"\b(\d\d) \+ (\d\d)(?: =|\?) (\d\d)", text)
    assert len(sums) > 1000
    assert all(int(a) + int(b) == int(c) for a, b, c in sums)
    days = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
    asked = re.findall(r"Today is (\w+)\. And tomorrow\? (\w+)\.", text)
    assert len(asked) > 100
    assert all(days[(days.index(a) + 1) % 7] == b for a, b in asked)


def test_two_runs_write_the_same_bytes(folder, tmp_path):
    make_sample(tmp_path / "again")
    for name in ("train.jsonl", "val.jsonl", "sample.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_the_described_digests_are_those_of_the_files_and_nothing_else_is_left_behind(folder):
    description = json.loads((folder / "sample.json").read_text())
    assert sorted(p.name for p in folder.iterdir()) == ["sample.json", "train.jsonl", "val.jsonl"]
    for part in ("train", "val"):
        content = (folder / f"{part}.jsonl").read_bytes()
        assert description[part]["sha256"] == hashlib.sha256(content).hexdigest()
        assert description[part]["file_bytes"] == len(content)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(sample, "PARTS", {"train": (30, 1), "val": (10, 2)})


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_complete_sample_is_left_as_it_is(small, tmp_path):
    first = make_sample(tmp_path)
    before = stamps(tmp_path)
    assert make_sample(tmp_path) == first == json.loads((tmp_path / "sample.json").read_text())
    assert stamps(tmp_path) == before


@pytest.mark.parametrize("harm", ["missing", "resized", "other version", "unreadable description"])
def test_a_damaged_or_outdated_sample_is_made_again(small, tmp_path, harm):
    make_sample(tmp_path)
    good = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    if harm == "missing":
        (tmp_path / "val.jsonl").unlink()
    elif harm == "resized":
        (tmp_path / "train.jsonl").write_text("{}\n")
    elif harm == "other version":
        (tmp_path / "sample.json").write_text(json.dumps({**json.loads(good["sample.json"]), "version": "0"}))
        (tmp_path / "train.jsonl").write_text("older\n")
    else:
        (tmp_path / "sample.json").unlink()  # as after a kill between the last two renames
    make_sample(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == good


@pytest.mark.parametrize("name", ["train.jsonl", "val.jsonl", "sample.json"])
def test_files_of_other_people_are_never_overwritten(small, tmp_path, name):
    (tmp_path / name).write_text('{"text": "mine"}\n')
    (tmp_path / "notes.txt").write_text("mine too")
    with pytest.raises(FileExistsError, match=name):
        make_sample(tmp_path)
    with pytest.raises(SystemExit) as stop:
        sample.main(["--out", str(tmp_path)])
    assert stop.value.code == 2
    assert (tmp_path / name).read_text() == '{"text": "mine"}\n'
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "notes.txt"])


def test_a_file_of_another_name_in_the_folder_stays(small, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    make_sample(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_killed_run_leaves_no_description_and_the_next_one_finishes(small, tmp_path, monkeypatch):
    real = sample._replace

    def dies_at_the_description(path, content):
        if path.name == "sample.json":
            raise KeyboardInterrupt
        real(path, content)

    monkeypatch.setattr(sample, "_replace", dies_at_the_description)
    with pytest.raises(KeyboardInterrupt):
        make_sample(tmp_path)
    assert not (tmp_path / "sample.json").exists()
    monkeypatch.setattr(sample, "_replace", real)
    assert make_sample(tmp_path)["val"]["documents"] == 10


def test_the_command_prints_what_it_made(small, tmp_path, capsys):
    assert sample.main(["--out", str(tmp_path / "new")]) == 0
    assert "val.jsonl: 10 documents" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("@ document\n[nowhere]", "nowhere"),
        ("@ document\n{nothing}", "nothing"),
        ("lost line", "line 1"),
        ("= w\na\n@ w\nb", "'w' is there already"),
    ],
)
def test_a_mistake_in_the_grammar_is_named(text, named):
    with pytest.raises(ValueError, match=named):
        load_grammar(text)
