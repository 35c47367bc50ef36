"""The command line and the YAML file: what was written becomes a `Config`, or a report of all that is wrong with it."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
import time
from collections.abc import Iterable
from typing import Any, NoReturn

from errors import UserError
from training.config import OPTIONS, Config, grouped_options, join_paths, resolve_path
from training.launcher import environment_rank


def nearest(name: str, names: Iterable[str]) -> str:
    """` (did you mean ...?)` for a misspelt name, or nothing when none is near."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def convert(name: str, value: Any) -> Any:
    """`value` from YAML or the command line as the option's type. Raises ValueError with the reason in words."""
    default = OPTIONS[name].default
    if value is None:
        raise ValueError("a value is needed")
    if isinstance(default, str):
        if isinstance(value, (list, tuple)) and OPTIONS[name].metadata.get("path") == "list":
            value = join_paths([str(path) for path in value])
        if isinstance(value, bool):  # YAML reads a bare `no` or `on` as a truth value
            return str(int(value))
        if isinstance(value, (dict, list)):
            raise ValueError("a text is needed")
        return convert_text(str(value), may_be_blank=not default)
    if isinstance(value, bool):
        value = int(value)
    if isinstance(value, (dict, list)):
        raise ValueError("a number is needed")
    if isinstance(default, int):
        if isinstance(value, float) or not re.fullmatch(r"[+-]?\d+", str(value).strip()):
            raise ValueError("a whole number is needed")
        return int(value)
    return float(value)


def convert_text(value: str, may_be_blank: bool) -> str:
    """The text, if it can be stored and shown. An empty path would mean the current folder, which nobody meant."""
    if not may_be_blank and not value.strip():
        raise ValueError("a value is needed")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("not UTF-8; rename the file or folder") from None
    if not value.isprintable():
        raise ValueError("holds characters that cannot be printed; write it without them")
    return value


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping in a YAML file. Raises UserError for a missing file, bad YAML, duplicate or unknown keys."""
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict:
        keys = [str(loader.construct_object(key)) for key, _ in node.value]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        if repeated:
            raise UserError(f"--config {path}: {', '.join(repeated)} is set more than once; keep one line")
        return dict(zip(keys, (loader.construct_object(value, deep=True) for _, value in node.value), strict=True))

    UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        loaded = yaml.load(resolve_path(path).read_text(encoding="utf-8"), Loader=UniqueKeys)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror or error}; give the path of a YAML file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no such date
        where = " ".join(str(error).split())
        raise UserError(f"--config {path}: not valid YAML ({where}); one `name: value` a line") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UserError(f"--config {path}: holds a {type(loaded).__name__}; it needs one `name: value` a line")
    unknown = [str(key) for key in loaded if key not in OPTIONS or key == "config"]
    if unknown:
        raise UserError([f"--config {path}: unknown setting {key!r}{nearest(key, OPTIONS)}" for key in unknown])
    return loaded


class Parser(argparse.ArgumentParser):
    """argparse that reports through UserError, so that mistakes of every kind leave by one door."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


class HelpFormatter(argparse.HelpFormatter):
    """Plain metavars: to argparse every value may be missing, so that we can report it with all else that is wrong."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar)


def build_parser() -> argparse.ArgumentParser:
    """The command line: one flag an option, grouped, with defaults shown. Values stay text until `convert`."""
    parser = Parser(
        prog="train_pretrain.py",
        usage="%(prog)s [--config FILE.yaml] [--name value ...]",
        description="Train a MiniMind language model from raw text.",
        allow_abbrev=False,
        formatter_class=lambda prog: HelpFormatter(prog, max_help_position=34, width=118),
    )
    for title, names in grouped_options().items():
        group = parser.add_argument_group(title)
        for name in names:
            entry = OPTIONS[name]
            choices = entry.metadata.get("choices")
            shown = "|".join(map(str, choices)) if choices else {str: "TEXT", int: "N", float: "X"}[type(entry.default)]
            note = f" (default: {entry.default})" if entry.default != "" else ""
            group.add_argument(
                f"--{name}",
                default=argparse.SUPPRESS,
                metavar=shown,
                help=(entry.metadata["help"] + note).replace("%", "%%"),
                nargs="?",
                const="1" if choices == (0, 1) else None,
            )
    return parser


def load_config(argv: list[str] | None = None) -> Config:
    """Settings from defaults, YAML and `argv` (sys.argv when None). Raises UserError naming every mistake at once."""
    found, unknown = build_parser().parse_known_args(argv)
    spoken = vars(found)
    problems = unknown_words(unknown)
    values: dict[str, Any] = {}
    if spoken.get("config"):
        try:
            values, more = convert_all(read_yaml(spoken["config"]), f"--config {spoken['config']}: ")
            problems += more
        except UserError as error:
            problems += error.problems
    from_flags, more = convert_all(spoken, "--")
    problems += more
    if problems:
        raise UserError(problems)
    values |= from_flags
    return Config(**values, given=frozenset(values), flags=frozenset(spoken))


def load_config_or_exit() -> Config:
    """The settings of sys.argv; leaves at once with the help, or with what is wrong."""
    try:
        return load_config()
    except UserError as error:
        sys.exit(report(error))


def report(error: UserError) -> int:
    """Print what is wrong, a line a problem; returns the exit status of a mistake. Once a machine: where its first rank
    has the same problem, the launcher ends the others while they wait."""
    if environment_rank().local_rank > 0:
        time.sleep(2)
    for problem in error.problems:
        print(f"Error: {problem}", file=sys.stderr)
    return 2


def unknown_words(words: list[str]) -> list[str]:
    """Problems of what the parser did not recognise; the value behind an unknown flag is not a problem of its own."""
    problems = []
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith("-"):
            problems.append(f"{word}: no such option{nearest(word.lstrip('-').split('=')[0], OPTIONS)}; see --help")
        elif not before.startswith("-"):
            problems.append(f"{word!r}: stands alone; options are written --name value")
    return problems


def convert_all(raw: dict[str, Any], source: str) -> tuple[dict[str, Any], list[str]]:
    """(converted values, problems) of settings as they were written; `source` goes before a problem's name."""
    values, problems = {}, []
    for name, value in raw.items():
        try:
            values[name] = convert(name, value)
        except (ValueError, OverflowError) as error:
            reason = "a number is needed" if "could not convert" in str(error) else error
            problems.append(f"{source}{name}{'' if value is None else f' {value!r:.100}'}: {reason}")
            continue
        if problem := broken_limit(name, values[name]):
            problems.append(f"{source}{name} {values[name]}: {problem}")
    return values, problems


def broken_limit(name: str, value: Any) -> str:
    """The problem of one value taken alone: choice, range, finiteness; empty if there is none."""
    about = OPTIONS[name].metadata
    choices = about.get("choices")
    if choices and value != OPTIONS[name].default and value not in choices:
        hint = nearest(str(value), map(str, choices))
        return f"choose one of {', '.join(map(str, choices))}{hint}"
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number is needed"
    if "low" in about and value < about["low"]:
        return f"too small; the least that can work is {about['low']}"
    if "above" in about and value <= about["above"]:
        return f"must be greater than {about['above']}"
    if "high" in about and value > about["high"]:
        return f"too large; the most that can work is {about['high']}"
    return ""
