"""What settings may not be together, and what is worth a word: one row a rule.

A refusal is for what cannot work, would lose data or would mislead. Where it is clear what the user wants and nothing
is lost, a note on the start page is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from training.config import Config
from training.learning_rate import SCHEDULES


class Known(NamedTuple):
    """What is known beside the settings; the defaults stand for "not yet"."""

    total_steps: int = 0  # of the whole run
    step: int = 0  # where a resumed run stands
    device: str = ""  # cpu, cuda, mps


class Rule(NamedTuple):
    option: str
    applies: Callable[[Config, Known], bool]
    reason: str  # a format of `c`, the settings, and `known`


def has_validation(c: Config) -> bool:
    return bool(c.val_path) or c.val_fraction > 0 or c.uses_sample


def beyond_the_end(name: str, c: Config, known: Known) -> bool:
    """An interval of the command line longer than the run. A YAML file serves runs of every length."""
    return name in c.flags and getattr(c, name) > known.total_steps > 0


def idle_in_evaluation(name: str, c: Config, known: Known) -> bool:
    return c.eval_only == 1 and name in c.flags and bool(getattr(c, name))


NO_VALIDATION = "there are no validation texts; give --val_path or --val_fraction"

REFUSED = (
    Rule(
        "hidden_size",
        lambda c, known: c.hidden_size % c.num_attention_heads != 0,
        "not divisible by --num_attention_heads {c.num_attention_heads}; choose a multiple of it",
    ),
    Rule(
        "num_key_value_heads",
        lambda c, known: c.num_attention_heads % c.num_key_value_heads != 0,
        "--num_attention_heads {c.num_attention_heads} is not a multiple of it; each key/value head serves the same "
        "number of query heads",
    ),
    Rule(
        "hidden_size",
        lambda c, known: c.hidden_size % c.num_attention_heads == 0 and c.hidden_size // c.num_attention_heads % 2 == 1,
        "its {c.num_attention_heads} heads have an odd size; rotary positions need an even one",
    ),
    Rule(
        "max_seq_len",
        lambda c, known: c.packing == 0 and c.max_seq_len < 3,
        "without packing a row holds bos, a token and eos; give 3 or more",
    ),
    Rule(
        "val_fraction",
        lambda c, known: bool(c.val_path) and c.val_fraction > 0,
        "--val_path is given already, and the share held out would be used for nothing; give one",
    ),
    Rule(
        "val_fraction",
        lambda c, known: c.uses_sample and c.val_fraction > 0,
        "the bundled sample has validation texts of its own; drop it",
    ),
    Rule("eval_only", lambda c, known: c.eval_only == 1 and not has_validation(c), NO_VALIDATION),
    Rule(
        "eval_interval",
        lambda c, known: "eval_interval" in c.flags and c.eval_interval > 0 and not has_validation(c),
        NO_VALIDATION,
    ),
    Rule(
        "resume_reset",
        lambda c, known: c.resume_reset != "none" and not c.from_resume,
        "it needs --from_resume 1",
    ),
    Rule(
        "save_state",
        lambda c, known: c.from_resume == 1 and c.save_state == 0,
        "a run without states cannot be resumed",
    ),
    Rule(
        "max_steps",
        lambda c, known: 0 < c.max_steps < known.step,
        "the saved run is at step {known.step}, past the end this gives; raise it",
    ),
    Rule(
        "stop_after",
        lambda c, known: 0 < c.stop_after < known.step,
        "the saved run is at step {known.step}; stop later or drop it",
    ),
)

NOTED = (
    Rule(
        "epochs",
        lambda c, known: "epochs" in c.flags and 0 < c.max_steps == known.total_steps and not c.eval_only,
        "--max_steps {c.max_steps} comes first; --max_steps 0 goes by epochs",
    ),
    Rule(
        "accumulation_steps",
        lambda c, known: {"accumulation_steps", "global_batch_size"} <= c.flags and c.global_batch_size > 0,
        "--global_batch_size {c.global_batch_size} sets the rows of a step; this follows from it",
    ),
    Rule(
        "batch_size",
        lambda c, known: {"batch_size", "global_batch_size"} <= c.flags and c.batch_size > c.global_batch_size > 0,
        "a step has --global_batch_size {c.global_batch_size} rows; its micro-batches have no more",
    ),
    Rule(
        "eval_rows",
        lambda c, known: "eval_rows" in c.flags and c.eval_rows > 0 and not has_validation(c),
        "not used: there are no validation texts",
    ),
    Rule(
        "min_lr_ratio",
        lambda c, known: "min_lr_ratio" in c.flags and SCHEDULES[c.lr_schedule](1.0) == 0,
        "not used: --lr_schedule {c.lr_schedule} never falls",
    ),
    Rule(
        "warmup_steps",
        lambda c, known: c.warmup_steps >= known.total_steps > 0,
        "the run has {known.total_steps} steps; it ends while the learning rate still rises",
    ),
    Rule(
        "stop_after",
        lambda c, known: c.stop_after > known.total_steps > 0,
        "the run has {known.total_steps} steps and ends before",
    ),
    *(
        Rule(
            name,
            partial(beyond_the_end, name),
            "longer than the run, which has {known.total_steps} steps; its end counts all the same",
        )
        for name in ("save_interval", "eval_interval", "log_interval")
    ),
    Rule(
        "keep_checkpoints",
        lambda c, known: "keep_checkpoints" in c.flags and c.save_state == 0,
        "not used: --save_state 0 keeps no states",
    ),
    Rule(
        "wandb_project",
        lambda c, known: "wandb_project" in c.flags and not c.tracker_name,
        "not used: nothing is sent without --tracker or --use_wandb 1",
    ),
    Rule(
        "use_wandb",
        lambda c, known: c.use_wandb == 1 and c.tracker not in ("", "swanlab"),
        "not used: --tracker {c.tracker} is",
    ),
    Rule(
        "auto_batch",
        lambda c, known: "auto_batch" in c.flags and c.auto_batch == 1 and known.device not in ("", "cuda"),
        "not used on {known.device}: only CUDA has a dry step that finds out",
    ),
    *(
        Rule(
            name,
            partial(idle_in_evaluation, name),
            "not used: --eval_only 1 trains nothing",
        )
        for name in ("overwrite", "stop_after", "samples", "tracker", "use_wandb")
    ),
)


def those_that_apply(rules: tuple[Rule, ...], config: Config, known: Known) -> list[str]:
    """`--option value: reason` of each rule that applies, in the table's order."""
    return [
        f"--{rule.option} {getattr(config, rule.option)}: {rule.reason.format(c=config, known=known)}"
        for rule in rules
        if rule.applies(config, known)
    ]
