"""Make the bundled sample: short Chinese and English texts whose entropy is known exactly.

    python dataset/make_sample.py --out dataset/sample        # train.jsonl, val.jsonl, sample.json; a few seconds

The texts are drawn independently from the probabilistic grammar in sample_grammar.txt. A text can come about in one way
only, so -ln p(text) is the sum of ln(number of alternatives) over the choices that made it. Added up over the
validation part this is, in expectation, the lowest loss any model can reach there: the floor of the learning curve.
"""

import argparse
import bisect
import hashlib
import json
import math
import os
import random
import re
import sys
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

GRAMMAR_FILE = Path(__file__).with_name("sample_grammar.txt")
GENERATOR = "minimind-sample"
VERSION = 1
# Two streams: the validation texts do not depend on how many training texts there are.
PARTS = {"train": (20_000, 1), "val": (1_000, 2)}  # name: (documents, seed)

_PART = re.compile(
    r"\{\$(?P<first>\w+)\+\$(?P<second>\w+)\}"
    r"|\{\$(?P<again>\w+)(?:\.(?P<fact>\w+))?\}"
    r"|\{(?:(?P<name>\w+)=)?(?P<words>[\w-]+)(?:\.(?P<shown>\w+))?\}"
    r"|\[(?P<rule>[\w-]+)\]"
)


@dataclass(frozen=True)
class Draw:
    """A word drawn from a list; `name` remembers it, `fact` is the attribute to write ("" = the word)."""

    words: str
    name: str
    fact: str


@dataclass(frozen=True)
class Again:
    """A remembered word (or a fact about it), or the sum of two remembered numbers: nothing is chosen."""

    name: str
    fact: str = ""
    plus: str = ""


@dataclass(frozen=True)
class Expand:
    """The text of a rule."""

    rule: str


Part = str | Draw | Again | Expand
Entry = dict[str, str]  # "" -> the word itself, attribute -> fact


@dataclass(frozen=True)
class Rule:
    """Alternatives with their probabilities; `nats[i]` = -ln probability, `upto[i]` = sum of the first i + 1."""

    alternatives: tuple[tuple[Part, ...], ...]
    nats: tuple[float, ...]
    upto: tuple[float, ...]


@dataclass(frozen=True)
class Grammar:
    words: dict[str, list[Entry]]
    rules: dict[str, Rule]
    digest: str  # of the grammar's text

    def draw(self, rng: random.Random, start: str = "document") -> tuple[str, float]:
        """Draw a text; return it with -ln p(text) in nats."""
        pieces: list[str] = []
        nats: list[float] = []
        self._expand(start, rng, {}, pieces, nats)
        return "".join(pieces), math.fsum(nats)

    def _expand(
        self, name: str, rng: random.Random, known: dict[str, Entry], pieces: list[str], nats: list[float]
    ) -> None:
        rule = self.rules[name]
        # rng.random() alone is promised to give the same numbers in every Python version.
        chosen = min(bisect.bisect_right(rule.upto, rng.random()), len(rule.upto) - 1)
        nats.append(rule.nats[chosen])
        for part in rule.alternatives[chosen]:
            if isinstance(part, str):
                pieces.append(part)
            elif isinstance(part, Draw):
                entries = self.words[part.words]
                entry = entries[int(rng.random() * len(entries))]
                nats.append(math.log(len(entries)))
                if part.name:
                    known[part.name] = entry
                pieces.append(entry[part.fact])
            elif isinstance(part, Again):
                pieces.append(recall(part, known))
            else:
                self._expand(part.rule, rng, known, pieces, nats)

    def entropy(self, name: str = "document") -> float:
        """Expected -ln p of a rule's text in nats: H(rule) = H(alternatives) + sum of p x H(parts of the alternative).

        Exact because every choice has the same number of alternatives whatever was chosen before.
        """
        rule = self.rules[name]
        total = 0.0
        for nats, parts in zip(rule.nats, rule.alternatives, strict=True):
            inside = sum(self.entropy(part.rule) for part in parts if isinstance(part, Expand))
            inside += sum(math.log(len(self.words[part.words])) for part in parts if isinstance(part, Draw))
            total += math.exp(-nats) * (nats + inside)
        return total


def recall(part: Again, known: dict[str, Entry]) -> str:
    """The text of an Again: a remembered word, a fact about it (capitalised where its name is), or a sum."""
    if part.plus:
        return str(int(known[part.name][""]) + int(known[part.plus][""]))
    if part.fact[:1].isupper():
        fact = known[part.name][part.fact.lower()]
        return fact[:1].upper() + fact[1:]
    return known[part.name][part.fact]


def parse_alternative(text: str) -> tuple[Part, ...]:
    """Cut one alternative into its parts; the notation is explained at the top of sample_grammar.txt."""
    parts: list[Part] = []
    end = 0
    for match in _PART.finditer(text):
        parts.append(text[end : match.start()].replace("\\n", "\n"))
        end = match.end()
        if match["rule"]:
            parts.append(Expand(match["rule"]))
        elif match["words"]:
            parts.append(Draw(match["words"], match["name"] or "", match["shown"] or ""))
        elif match["again"]:
            parts.append(Again(match["again"], match["fact"] or ""))
        else:
            parts.append(Again(match["first"], plus=match["second"]))
    parts.append(text[end:].replace("\\n", "\n"))
    return tuple(part for part in parts if part != "")


def parse_entries(line: str, facts: list[str]) -> list[Entry]:
    """The entries of one line of a word list."""
    entries = []
    for item in line.split(";"):
        numbers = re.fullmatch(r"\s*(\d+)\.\.(\d+)\s*", item)
        if numbers:
            entries += [{"": str(n)} for n in range(int(numbers[1]), int(numbers[2]) + 1)]
        else:
            entries.append(dict(zip(["", *facts], (field.strip() for field in item.split("|")), strict=True)))
    return entries


def build_rule(lines: list[str]) -> Rule:
    weights, alternatives = [], []
    for line in lines:
        weighted = re.match(r"(\d+)\* ", line)
        weights.append(int(weighted[1]) if weighted else 1)
        alternatives.append(parse_alternative(line[weighted.end() :] if weighted else line))
    total = sum(weights)
    upto = tuple(sum_ / total for sum_ in accumulate(weights))
    return Rule(tuple(alternatives), tuple(math.log(total / weight) for weight in weights), upto)


def load_grammar(text: str | None = None) -> Grammar:
    """Read a grammar (default: sample_grammar.txt). Raises ValueError or KeyError naming what is not understood."""
    text = GRAMMAR_FILE.read_text(encoding="utf-8") if text is None else text
    words: dict[str, list[Entry]] = {}
    rules: dict[str, list[str]] = {}
    facts: list[str] = []
    kind = name = ""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith(("= ", "@ ")):
            kind, (name, _, rest) = line[0], line[2:].partition(" : ")
            facts = rest.split()
            if name in words or name in rules:
                raise ValueError(f"grammar line {number}: {name!r} is there already")
            if kind == "=":
                words[name] = []
            else:
                rules[name] = []
        elif kind == "=":
            words[name] += parse_entries(line, facts)
        elif kind == "@":
            rules[name].append(line)
        else:
            raise ValueError(f"grammar line {number}: no list or rule begun yet: {line!r}")
    grammar = Grammar(words, {key: build_rule(lines) for key, lines in rules.items()}, _sha256(text.encode()))
    _check_names(grammar)
    return grammar


def _check_names(grammar: Grammar) -> None:
    for name, rule in grammar.rules.items():
        for part in (part for parts in rule.alternatives for part in parts):
            missing = (isinstance(part, Draw) and part.words not in grammar.words) or (
                isinstance(part, Expand) and part.rule not in grammar.rules
            )
            if missing:
                raise ValueError(f"grammar rule {name!r}: unknown name in {part}")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _render(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def _draw_part(grammar: Grammar, part: str) -> tuple[list[str], float]:
    """The texts of a part in order and the sum of their -ln p in nats."""
    documents, seed = PARTS[part]
    rng = random.Random(seed)
    drawn = [grammar.draw(rng) for _ in range(documents)]
    return [text for text, _ in drawn], math.fsum(nats for _, nats in drawn)


def _describe(texts: list[str], nats: float, content: bytes) -> dict:
    size = sum(len(text.encode()) for text in texts)
    return {
        "documents": len(texts),
        "characters": sum(map(len, texts)),
        "bytes": size,  # UTF-8, of the texts alone: without eos, line ends and JSON
        "nats": round(nats, 6),  # sum of -ln p(document), the end of each document included
        "nats_per_byte": round(nats / size, 9),
        "repeats": len(texts) - len(set(texts)),
        "file_bytes": len(content),
        "sha256": _sha256(content),
    }


def _version(grammar: Grammar) -> str:
    return f"{VERSION}-{_sha256(repr((grammar.digest, PARTS)).encode())[:12]}"


def read_description(folder: Path) -> dict | None:
    """The sample.json of a folder; None where there is none or another program wrote it."""
    try:
        description = json.loads((folder / "sample.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return description if isinstance(description, dict) and description.get("generator") == GENERATOR else None


def _is_complete(folder: Path, description: dict) -> bool:
    files = [(folder / f"{part}.jsonl", description[part]["file_bytes"]) for part in PARTS]
    return all(path.is_file() and path.stat().st_size == size for path, size in files)


def _replace(path: Path, content: bytes) -> None:
    """Write under a temporary name, flush to disk, rename: a reader never meets half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def make_sample(folder: Path) -> dict:
    """Write train.jsonl, val.jsonl and, last, sample.json into `folder` unless they are there; return sample.json.

    A sample of another version, or one with a missing or resized file, is made again. Processes may do this at the same
    time: all write the same bytes. Raises FileExistsError when a file of one of these names is not this program's.

    `result["val"]["nats"]` divided by the number of validation targets (the tokens of each document and its eos) is the
    floor of val_loss in nats per token, for any tokenizer. `result["expected_nats_per_document"]` is the grammar's
    entropy, which the mean over many documents approaches.
    """
    folder = Path(folder)
    grammar = load_grammar()
    version = _version(grammar)
    found = read_description(folder)
    if found and found.get("version") == version and _is_complete(folder, found):
        return found
    drawn = {part: _draw_part(grammar, part) for part in PARTS}
    contents = {part: _render(texts) for part, (texts, _) in drawn.items()}
    _refuse_foreign_files(folder, found, contents)
    description = {
        "generator": GENERATOR,
        "version": version,
        "expected_nats_per_document": round(grammar.entropy(), 9),
        "val_documents_in_train": len(set(drawn["train"][0]) & set(drawn["val"][0])),
        **{part: _describe(texts, nats, contents[part]) for part, (texts, nats) in drawn.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for part, content in contents.items():
        _replace(folder / f"{part}.jsonl", content)
    _replace(folder / "sample.json", (json.dumps(description, indent=2) + "\n").encode())
    return description


def _refuse_foreign_files(folder: Path, found: dict | None, contents: dict[str, bytes]) -> None:
    """Raise FileExistsError rather than overwrite what was not made here; what an interrupted run left is ours."""
    if found:
        return
    foreign = [f"{part}.jsonl" for part, content in contents.items() if not _same(folder / f"{part}.jsonl", content)]
    foreign += ["sample.json"] if (folder / "sample.json").exists() else []
    if foreign:
        raise FileExistsError(
            f"{folder}: {', '.join(foreign)} there was not made by this program and would be overwritten; "
            "choose an empty folder (--out) or move the files away"
        )


def _same(path: Path, content: bytes) -> bool:
    return not path.exists() or path.read_bytes() == content


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the bundled sample (a few seconds, nothing is downloaded).")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("sample"), help="folder to write to")
    args = parser.parse_args(argv)
    try:
        description = make_sample(args.out)
    except OSError as error:
        parser.error(str(error))
    for part in PARTS:
        row = description[part]
        print(
            f"{args.out / part}.jsonl: {row['documents']:,} documents, {row['bytes']:,} bytes, {row['nats']:.1f} nats"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
