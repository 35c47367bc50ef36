"""Settings of a training run: one table of options, from which the parser, the YAML keys and the help all follow.

Precedence: defaults <- saved run (on resume) <- `--config` YAML <- command line. What is given explicitly (YAML or
command line) is remembered in `Config.given`, because a resume treats a repeated setting differently from a default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import glob
import math
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataset.text_formats import known_suffixes
from errors import UserError

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_FOLDER = ROOT / "dataset" / "sample"

# How a resume treats an option whose value differs from the saved run's.
FREE = "free"  # taken silently: it cannot change the numbers
SHOWN = "shown"  # taken, and the effect is printed
FIXED = "fixed"  # refused: it would be another run


def option(default: Any, group: str, text: str, on_resume: str = FREE, **limits: Any) -> Any:
    """A dataclass field that also carries its help text and its limits (`choices`, `low`, `high`, `above`)."""
    if type(default) is int:  # beyond 10^12 nothing counted here makes sense, and int64 would overflow
        limits = {"high": 10**12, **limits}
    return field(default=default, metadata={"group": group, "help": text, "on_resume": on_resume, **limits})


SWITCH: dict[str, Any] = {"choices": (0, 1)}


@dataclass
class Config:
    """Every setting of `train_pretrain.py`. Types follow the defaults; a limit that is broken is a `UserError`."""

    # --- run ---
    config: str = option("", "run", "YAML file that sets any of these; the command line wins")
    save_dir: str = option("checkpoints", "run", "parent of the run folders")
    save_weight: str = option("pretrain", "run", "name of the run: its folder is <save_weight>_<hidden_size>[_moe]")
    from_resume: int = option(0, "run", "1: continue the newest good save of the run folder", **SWITCH)
    resume_reset: str = option(
        "none", "run", "on resume: forget the optimizer's state, or restart the schedule over the steps that are left",
        choices=("none", "optimizer", "schedule"),
    )  # fmt: skip
    from_weight: str = option("none", "run", "start from these: a run's name, a .pth or a Hugging Face folder")
    overwrite: int = option(0, "run", "1: a new run may replace an existing one of the same name", **SWITCH)
    eval_only: int = option(0, "run", "1: evaluate on val_path, train nothing", **SWITCH)
    stop_after: int = option(0, "run", "save and leave at this step; the schedule still spans the full run", low=0)
    seed: int = option(42, "run", "seed of weights, row order and dropout", FIXED, low=0, high=2**31 - 1)
    device: str = option("auto", "run", "cuda, cuda:1, mps or cpu; auto takes the best there is")
    deterministic: int = option(0, "run", "1: deterministic kernels (CUDA resumes become bit-exact)", SHOWN, **SWITCH)

    # --- data ---
    data_path: str = option(
        "dataset/sample/train.jsonl", "data",
        f"files, folders or globs, comma-separated: {known_suffixes()}; the sample is made on first use",
    )  # fmt: skip
    val_path: str = option("", "data", "validation documents; with the bundled sample: its own")
    val_fraction: float = option(
        0.0, "data", "share of documents held out by hash, when val_path is empty", FIXED, low=0, high=0.5
    )
    text_key: str = option("text", "data", "key of the text in a JSON line")
    parse_special: int = option(0, "data", "1: special-token strings inside texts become special tokens", **SWITCH)
    bad_lines: str = option("stop", "data", "what a line that cannot be read does", choices=("stop", "skip"))
    tokenizer_path: str = option("model", "data", "folder of a Hugging Face tokenizer")
    max_seq_len: int = option(512, "data", "positions in a row", FIXED, low=2, high=1_048_576)
    packing: int = option(1, "data", "1: whole documents packed into rows; 0: one document a row", FIXED, **SWITCH)
    shuffle: int = option(1, "data", "1: a new row order each epoch; 0: the files' order", FIXED, **SWITCH)
    cache_dir: str = option("dataset/cache", "data", "where tokenised corpora are kept")
    verify_data: int = option(0, "data", "1: hash corpus and cache again before training", **SWITCH)
    num_workers: int = option(0, "data", "loader processes; 0 is fastest: rows come from a memory map", low=0, high=256)

    # --- model ---
    hidden_size: int = option(768, "model", "width of the model", FIXED, low=2, high=65_536)
    num_hidden_layers: int = option(8, "model", "decoder blocks", FIXED, low=1, high=1024)
    num_attention_heads: int = option(8, "model", "query heads", FIXED, low=1, high=1024)
    num_key_value_heads: int = option(4, "model", "key/value heads (grouped-query attention)", FIXED, low=1, high=1024)
    intermediate_size: int = option(0, "model", "feed-forward width; 0: ceil(hidden x pi / 64) x 64", FIXED, low=0,
                                    high=1_048_576)  # fmt: skip
    use_moe: int = option(0, "model", "1: four experts, one a token, instead of one feed-forward", FIXED, **SWITCH)
    rope_theta: float = option(1e6, "model", "base of the rotary embedding", FIXED, above=1, high=1e12)
    dropout: float = option(0.0, "model", "dropout probability", SHOWN, low=0, high=0.95)

    # --- optimization ---
    epochs: int = option(2, "optimization", "passes over the data", SHOWN, low=1, high=1_000_000)
    max_steps: int = option(0, "optimization", "total steps, data cycling; replaces epochs when > 0", SHOWN, low=0)
    batch_size: int = option(32, "optimization", "rows in a micro-batch on one rank", low=1, high=1_048_576)
    accumulation_steps: int = option(8, "optimization", "micro-batches a rank adds up in a step", low=1, high=1_048_576)
    global_batch_size: int = option(
        0, "optimization", "rows in a step over all ranks; 0: batch_size x accumulation_steps x ranks", SHOWN, low=0
    )
    optimizer: str = option("adamw", "optimization", "muon: hidden matrices by Muon, the rest by AdamW", FIXED,
                            choices=("adamw", "muon"))  # fmt: skip
    learning_rate: float = option(5e-4, "optimization", "peak learning rate", SHOWN, above=0, high=10.0)
    lr_schedule: str = option(
        "cosine", "optimization", "shape after the warm-up", SHOWN, choices=("cosine", "wsd", "linear", "constant")
    )
    warmup_steps: int = option(0, "optimization", "steps of linear warm-up from a tenth of the peak", SHOWN, low=0)
    min_lr_ratio: float = option(0.1, "optimization", "final learning rate / peak", SHOWN, low=0, high=1)
    weight_decay: float = option(0.1, "optimization", "decay of matrices (norms: none)", SHOWN, low=0, high=10.0)
    beta1: float = option(0.9, "optimization", "AdamW's first-moment decay", SHOWN, low=0, high=0.9999999)
    beta2: float = option(0.95, "optimization", "AdamW's second-moment decay", SHOWN, low=0, high=0.9999999)
    grad_clip: float = option(1.0, "optimization", "largest global gradient norm; 0: no clipping", SHOWN, low=0)
    label_smoothing: float = option(0.0, "optimization", "share of target mass spread evenly", SHOWN, low=0, high=0.99)
    z_loss: float = option(0.0, "optimization", "weight of logsumexp(logits)^2", SHOWN, low=0, high=1.0)

    # --- speed ---
    dtype: str = option(
        "auto", "speed", "autocast type; auto: bfloat16 where the device does it well, else float16 (CUDA) or float32",
        SHOWN, choices=("auto", "bfloat16", "float16", "float32"),
    )  # fmt: skip
    use_compile: str = option("auto", "speed", "torch.compile; auto: when the run is long enough to repay it", SHOWN,
                              choices=("auto", "0", "1"))  # fmt: skip
    threads: int = option(
        0, "speed", "CPU threads of a rank; 0: torch's choice, on resume the saved run's", SHOWN, low=0, high=1024
    )  # fmt: skip
    activation_checkpointing: int = option(0, "speed", "1: recompute blocks in backward to save memory", **SWITCH)
    auto_batch: int = option(1, "speed", "1: on CUDA, halve batch_size until a dry step fits in memory", **SWITCH)

    # --- evaluation ---
    eval_interval: int = option(0, "evaluation", "steps between evaluations; 0: at the end of each epoch", low=0)
    eval_rows: int = option(0, "evaluation", "about this many rows of whole documents; 0: all of them", low=0)
    samples: int = option(0, "evaluation", "texts the finished model writes on the screen", low=0, high=100)

    # --- saving and logging ---
    log_interval: int = option(10, "saving and logging", "steps between log lines", low=1)
    save_interval: int = option(100, "saving and logging", "steps between saves; 0: at each epoch's end", low=0)
    save_minutes: float = option(0.0, "saving and logging", "save after this many minutes too; 0: off", low=0)
    keep_checkpoints: int = option(2, "saving and logging", "newest resume states kept, besides the best", low=1)
    save_state: int = option(1, "saving and logging", "0: keep weights only; such a run cannot be resumed", **SWITCH)
    use_wandb: int = option(0, "saving and logging", "1: log to SwanLab (the flag's name is MiniMind's)", **SWITCH)
    wandb_project: str = option("MiniMind-Pretrain", "saving and logging", "SwanLab project")

    given: frozenset[str] = field(default=frozenset(), metadata={"internal": True})  # in YAML or on the command line
    flags: frozenset[str] = field(default=frozenset(), metadata={"internal": True})  # on the command line

    def values(self) -> dict[str, Any]:
        """The settings alone, in table order, as plain values for YAML and JSON. Paths but the default ones are made
        absolute: they must mean the same from another folder."""
        values = {name: getattr(self, name) for name in OPTIONS}
        for name in ("save_dir", "data_path", "val_path", "tokenizer_path", "cache_dir"):
            if values[name] and not is_default_path(values[name]):
                values[name] = ",".join(resolve_paths(values[name]))
        return values

    @property
    def run_name(self) -> str:
        return f"{self.save_weight}_{self.hidden_size}{'_moe' if self.use_moe else ''}"

    @property
    def run_folder(self) -> Path:
        return resolve_path(self.save_dir) / self.run_name

    @property
    def resume_folder(self) -> Path:
        return self.run_folder / "resume"

    @property
    def uses_sample(self) -> bool:
        return resolve_paths(self.data_path) == [str(SAMPLE_FOLDER / "train.jsonl")]


OPTIONS: dict[str, dataclasses.Field] = {f.name: f for f in dataclasses.fields(Config) if "internal" not in f.metadata}


def resolve_path(text: str | Path) -> Path:
    """A user's path: `~` and `$VAR` expand, a relative one starts at the current folder. The default paths (`model`,
    `dataset/sample/...`) start at the repository, wherever the program is started; say `./model` for the other one."""
    path = Path(os.path.expandvars(os.path.expanduser(str(text))))
    return (ROOT if is_default_path(text) else Path.cwd()) / path


def resolve_paths(text: str) -> list[str]:
    """The paths in a comma-separated list, resolved; a name that holds a comma is taken whole where it exists."""
    if os.path.exists(whole := resolve_path(text)):
        return [str(whole)]
    return [resolve_pattern(piece.strip()) for piece in text.split(",") if piece.strip()]


def resolve_pattern(text: str) -> str:
    """`resolve_path` of what may be a glob: brackets in the current folder's own name are not part of the pattern."""
    path, here = resolve_path(text), Path.cwd()
    if os.path.lexists(path) or not path.is_relative_to(here):
        return str(path)
    return os.path.join(glob.escape(str(here)), path.relative_to(here))


def is_default_path(text: str | Path) -> bool:
    """True for the paths this table gives by default (and anything inside the bundled sample's folder)."""
    defaults = {OPTIONS[name].default for name in ("save_dir", "data_path", "tokenizer_path", "cache_dir")}
    return str(text) in defaults or str(text).startswith("dataset/sample/")


def nearest(name: str, names: Any) -> str:
    """` (did you mean ...?)` for a misspelt name, or nothing when none is near."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def convert(name: str, value: Any) -> Any:
    """`value` from YAML or the command line as the option's type. Raises ValueError with the reason in words."""
    default = OPTIONS[name].default
    if value is None:
        raise ValueError("a value is needed")
    if isinstance(default, str):
        if isinstance(value, (list, tuple)) and name in ("data_path", "val_path"):
            value = ",".join(map(str, value))
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


def read_yaml(path: Path) -> dict[str, Any]:
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
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeys)
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

    def error(self, message: str) -> Any:
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
    groups: dict[str, Any] = {}
    for name, entry in OPTIONS.items():
        about = entry.metadata
        group = groups.setdefault(about["group"], None) or parser.add_argument_group(about["group"])
        groups[about["group"]] = group
        choices = about.get("choices")
        is_switch = choices == (0, 1)
        shown = "|".join(map(str, choices)) if choices else {str: "TEXT", int: "N", float: "X"}[type(entry.default)]
        note = f" (default: {entry.default})" if entry.default != "" else ""
        group.add_argument(
            f"--{name}",
            default=argparse.SUPPRESS,
            metavar=shown,
            help=(about["help"] + note).replace("%", "%%"),
            nargs="?",
            const="1" if is_switch else None,
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
            path = Path(os.path.expandvars(os.path.expanduser(spoken["config"])))
            values, more = convert_all(read_yaml(path), f"--config {path}: ")
            problems += more
        except UserError as error:
            problems += error.problems
    from_flags, more = convert_all(spoken, "--")
    problems += more
    if problems:
        raise UserError(problems)
    values |= from_flags
    return Config(**values, given=frozenset(values), flags=frozenset(spoken))


def report(error: UserError) -> int:
    """Print what is wrong, a line a problem; returns the exit status of a mistake."""
    for problem in error.problems:
        print(f"Error: {problem}", file=sys.stderr)
    return 2


def check_command_line() -> None:
    """Leave at once with help, or with what is wrong with sys.argv. Ranks of torchrun leave that to `main`, which
    reports once a machine."""
    if "RANK" not in os.environ:
        try:
            load_config()
        except UserError as error:
            sys.exit(report(error))


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
    if choices and value not in choices:
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


def with_saved(config: Config, saved: dict[str, Any]) -> Config:
    """The settings of a resumed run: the saved ones under whatever the user said this time."""
    kept = {name: value for name, value in saved.items() if name in OPTIONS and name not in NOT_CARRIED_OVER}
    spoken = {name: getattr(config, name) for name in config.given}
    return Config(**{**kept, **spoken}, given=config.given, flags=config.flags)


# Options that speak about one start of the program: neither a resume nor the saved config.yaml repeats them.
ONE_START_ONLY = frozenset(("config", "from_resume", "resume_reset", "overwrite", "eval_only", "stop_after"))
# Besides those, what a resume takes from this start alone; a run folder may have been moved.
NOT_CARRIED_OVER = ONE_START_ONLY | {"from_weight", "device", "save_dir", "save_weight"}


def changed_settings(config: Config, saved: dict[str, Any]) -> list[tuple[str, Any, Any, str]]:
    """(name, saved value, new value, class) of every setting that differs from the saved run's."""
    return [
        (name, saved[name], getattr(config, name), entry.metadata["on_resume"])
        for name, entry in OPTIONS.items()
        if name in saved and name not in NOT_CARRIED_OVER and saved[name] != getattr(config, name)
    ]
