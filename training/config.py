"""Settings of a training run: one table of options, from which the parser, the YAML keys and the help all follow.

Precedence: defaults <- saved run (on resume) <- `--config` YAML <- command line. What is given explicitly (YAML or
command line) is remembered in `Config.given`, because a resume treats a repeated setting differently from a default.
"""

from __future__ import annotations

import glob
import os
import re
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from dataset.text_formats import known_suffixes
from training.learning_rate import SCHEDULES
from training.optimizers import OPTIMIZERS
from training.trackers import TRACKERS

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_FOLDER = ROOT / "dataset" / "sample"

# How a resume treats an option whose value differs from the saved run's.
FREE = "free"  # taken silently: it cannot change the numbers
SHOWN = "shown"  # taken, and the effect is printed
FIXED = "fixed"  # refused: it would be another run


def option(default: Any, group: str, text: str, on_resume: str = FREE, **more: Any) -> Any:
    """A dataclass field that also carries its help text, its limits (`choices`: values or a table of parts; `low`,
    `high`, `above`) and whether it is a path ("one", "list")."""
    if type(default) is int:  # beyond 10^12 nothing counted here makes sense, and int64 would overflow
        more = {"high": 10**12, **more}
    return field(default=default, metadata={"group": group, "help": text, "on_resume": on_resume, **more})


SWITCH: dict[str, Any] = {"choices": (0, 1)}


@dataclass(frozen=True)
class Config:
    """Every setting of `train_pretrain.py`. Types follow the defaults; a limit that is broken is a `UserError`."""

    # --- run ---
    config: str = option("", "run", "YAML file that sets any of these; the command line wins")
    save_dir: str = option("checkpoints", "run", "parent of the run folders", path="one")
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
        path="list",
    )  # fmt: skip
    val_path: str = option("", "data", "validation documents; with the bundled sample: its own", path="list")
    val_fraction: float = option(
        0.0, "data", "share of documents held out by hash, when val_path is empty", FIXED, low=0, high=0.5
    )
    text_key: str = option("text", "data", "key of the text in a JSON line")
    parse_special: int = option(0, "data", "1: special-token strings inside texts become special tokens", **SWITCH)
    bad_lines: str = option("stop", "data", "what a line that cannot be read does", choices=("stop", "skip"))
    tokenizer_path: str = option("model", "data", "folder of a Hugging Face tokenizer", path="one")
    max_seq_len: int = option(512, "data", "positions in a row", FIXED, low=2, high=1_048_576)
    packing: int = option(1, "data", "1: whole documents packed into rows; 0: one document a row", FIXED, **SWITCH)
    shuffle: int = option(1, "data", "1: a new row order each epoch; 0: the files' order", FIXED, **SWITCH)
    cache_dir: str = option("dataset/cache", "data", "where tokenised corpora are kept", path="one")
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
    max_steps: int = option(
        0, "optimization", "total steps, data cycling, in place of epochs; with --epochs: the first of both", SHOWN,
        low=0,
    )  # fmt: skip
    batch_size: int = option(32, "optimization", "rows in a micro-batch on one rank", low=1, high=1_048_576)
    accumulation_steps: int = option(8, "optimization", "micro-batches a rank adds up in a step", low=1, high=1_048_576)
    global_batch_size: int = option(
        0, "optimization", "rows in a step over all ranks; 0: batch_size x accumulation_steps x ranks", SHOWN, low=0
    )
    optimizer: str = option("adamw", "optimization", "muon: hidden matrices by Muon, the rest by AdamW", FIXED,
                            choices=OPTIMIZERS)  # fmt: skip
    learning_rate: float = option(5e-4, "optimization", "peak learning rate", SHOWN, above=0, high=10.0)
    lr_schedule: str = option("cosine", "optimization", "shape after the warm-up", SHOWN, choices=SCHEDULES)
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
        0, "speed", "CPU threads of a rank; 0: its share of the cores, on resume the saved run's", SHOWN, low=0,
        high=1024,
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
    tracker: str = option("", "saving and logging", "send the figures there too", choices=TRACKERS)
    use_wandb: int = option(
        0, "saving and logging", "1: SwanLab as the tracker (the flag's name is MiniMind's)", **SWITCH
    )
    wandb_project: str = option("MiniMind-Pretrain", "saving and logging", "the tracker's project")

    given: frozenset[str] = field(default=frozenset(), metadata={"internal": True})  # in YAML or on the command line
    flags: frozenset[str] = field(default=frozenset(), metadata={"internal": True})  # on the command line

    def values(self) -> dict[str, Any]:
        """The settings alone, in table order, as plain values for YAML and JSON. Paths but the default ones are made
        absolute: they must mean the same from another folder."""
        return {name: absolute(name, getattr(self, name)) for name in OPTIONS}

    @property
    def run_name(self) -> str:
        return run_name(self.save_weight, self.hidden_size, self.use_moe)

    @property
    def run_folder(self) -> Path:
        return resolve_path(self.save_dir) / self.run_name

    @property
    def resume_folder(self) -> Path:
        return self.run_folder / "resume"

    @property
    def tracker_name(self) -> str:
        """The row of TRACKERS to use, or nothing."""
        return self.tracker or ("swanlab" if self.use_wandb else "")

    @property
    def uses_sample(self) -> bool:
        return resolve_paths(self.data_path) == [str(SAMPLE_FOLDER / "train.jsonl")]


OPTIONS: dict[str, Field] = {f.name: f for f in fields(Config) if "internal" not in f.metadata}


# The options that --help shows first; the rest is for those who know what they look for.
EVERYDAY = (
    "config", "data_path", "val_path", "save_dir", "save_weight", "from_resume", "from_weight",
    "hidden_size", "num_hidden_layers", "use_moe", "max_seq_len",
    "epochs", "max_steps", "batch_size", "accumulation_steps", "learning_rate",
    "device", "dtype", "log_interval", "save_interval", "use_wandb",
)  # fmt: skip


def grouped_options() -> dict[str, list[str]]:
    """Names of the options under the headings of the help: the everyday ones, then the advanced ones by group."""
    groups = {"everyday options": list(EVERYDAY)}
    for name, entry in OPTIONS.items():
        if name not in EVERYDAY:
            groups.setdefault(f"advanced: {entry.metadata['group']}", []).append(name)
    return groups


# --- paths ---


def run_name(save_weight: str, hidden_size: int, use_moe: int) -> str:
    """Of a run's folder and, with a suffix, of its weights; MiniMind's rule."""
    return f"{save_weight}_{hidden_size}{'_moe' if use_moe else ''}"


def resolve_path(text: str | Path) -> Path:
    """A user's path: `~` and `$VAR` expand, a relative one starts at the current folder. The default paths (`model`,
    `dataset/sample/...`) start at the repository, wherever the program is started; say `./model` for the other one.
    A `$` in the name of something that exists is a letter like others."""
    return _expand(text)[0]


def unset_variables(text: str | Path) -> list[str]:
    """The variables in a path that are not set, as they are written there."""
    return _expand(text)[1]


def _expand(text: str | Path) -> tuple[Path, list[str]]:
    path, unset = ROOT if is_default_path(text) else Path.cwd(), []
    for part in Path(os.path.expanduser(str(text))).parts:
        if "$" in part and not os.path.lexists(path / part):
            part = os.path.expandvars(part)
            unset += re.findall(r"\$\{?\w+\}?", part)
        path /= part
    return path, unset


def split_paths(text: str) -> list[str]:
    """The paths in a comma-separated list, as written. A comma in a name is written `\\,`, or as it is where the whole
    text is the path of something."""
    if text and os.path.lexists(resolve_path(text)):
        return [text]
    pieces = (piece.strip().replace("\\,", ",") for piece in re.split(r"(?<!\\),", text))
    return [piece for piece in pieces if piece]


def join_paths(paths: list[str]) -> str:
    """The text that `split_paths` takes apart into these."""
    return ",".join(path.replace(",", "\\,") for path in paths)


def resolve_paths(text: str) -> list[str]:
    """The paths and globs in a comma-separated list, resolved."""
    return [resolve_pattern(path) for path in split_paths(text)]


def resolve_pattern(text: str) -> str:
    """`resolve_path` of what may be a glob: brackets in the current folder's own name are not part of the pattern."""
    path, here = resolve_path(text), Path.cwd()
    if os.path.lexists(path) or not path.is_relative_to(here):
        return str(path)
    return os.path.join(glob.escape(str(here)), path.relative_to(here))


def is_default_path(text: str | Path) -> bool:
    """True for the paths this table gives by default (and anything inside the bundled sample's folder)."""
    defaults = {entry.default for entry in OPTIONS.values() if "path" in entry.metadata and entry.default}
    return str(text) in defaults or str(text).startswith("dataset/sample/")


def absolute(name: str, value: Any) -> Any:
    """The value of an option, its paths made absolute but for the default ones."""
    kind = OPTIONS[name].metadata.get("path")
    if kind == "list":
        return join_paths([path if is_default_path(path) else resolve_pattern(path) for path in split_paths(value)])
    return str(resolve_path(value)) if kind and not is_default_path(value) else value


# --- resumes ---


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
