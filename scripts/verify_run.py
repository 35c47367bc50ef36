"""Train a run's beginning again and say whether the numbers are those that were recorded.

    python scripts/verify_run.py checkpoints/pretrain_768 --steps 100

The receipt run.json tells how the run was started, and where it was resumed with other settings; the same is done again
in a temporary folder, changes included. A run that began from other weights (--from_weight) is taken up at its earliest
save. Compared bit for bit: the loss and gradient norm of every logged step, and the digest of the parameters at every
save that falls on the same step. Exit status: 0 they agree, 1 they do not, 2 there is nothing to compare with.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

FIGURES = ("loss", "logits_loss", "aux_loss", "lr", "grad_norm", "rows_seen", "tokens_seen", "skipped_steps")
NOT_REPEATED = {
    "save_dir", "save_weight", "tracker", "use_wandb", "samples", "threads", "dtype", "use_compile", "resume_reset",
}  # fmt: skip


class NothingToCompare(Exception):
    """The run cannot be verified, and why."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a run's beginning again and compare with what it recorded.")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--steps", type=int, default=100, help="how many steps to train again (default: 100)")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: must be at least 1")
    return arguments


def read_receipt(run: Path) -> dict[str, Any]:
    try:
        record = json.loads((run / "run.json").read_bytes())
        if record["starts"] and (run / "metrics.jsonl").is_file():
            return record
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise NothingToCompare(f"{run}: no run.json with a start and a metrics.jsonl; give the folder of a run")


def segments(record: dict[str, Any], first: int, last: int) -> list[tuple[dict[str, Any], int, int]]:
    """(start, from step, to step) of each stretch between `first` and `last` that was trained under one set of
    settings."""
    starts = record["starts"]
    ends = [*(start["step"] for start in starts[1:]), last]
    found = []
    for start, end in zip(starts, ends, strict=True):
        begin, stop = max(start["step"], first), min(end, last)
        if begin < stop:
            found.append((start, begin, stop))
    return found


def earliest_save(run: Path) -> tuple[int, Path]:
    from training.saving.checkpoint import find_checkpoints, verify_checkpoint

    for step, folder in find_checkpoints(run / "resume"):
        if not verify_checkpoint(folder):
            return step, folder
    raise NothingToCompare(f"{run}: it began from other weights, and none of its saves is left to begin from")


def train_again(start: dict[str, Any], folder: Path, begin: int, end: int) -> None:
    """Train from step `begin` (0: afresh) to `end` as `start` says, into `folder`/again_*."""
    import yaml

    config, choices = start["config"], start["choices"]
    settings = {name: value for name, value in config.items() if name not in NOT_REPEATED}
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings, allow_unicode=True), encoding="utf-8")
    flags: dict[str, Any] = {
        "config": folder / "settings.yaml",
        "save_dir": folder,
        "save_weight": "again",
        "stop_after": end,
        "dtype": choices["dtype"],
        "device": choices["device"],
        "use_compile": int(bool(choices.get("compile"))),
    }
    if choices["device"] == "cpu":
        flags["threads"] = choices["threads"]
    if begin:
        flags |= {"from_resume": 1, "resume_reset": config.get("resume_reset", "none")}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    run_trainer(words, choices["world_size"])


def run_trainer(words: list[str], ranks: int) -> None:
    """The trainer as a program of its own."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "train_pretrain.py"), *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise NothingToCompare(f"training again failed (exit status {done.returncode}):\n{done.stderr.strip()}")


def figures(run: Path, first: int, last: int) -> dict[int, dict[str, float]]:
    """step -> what a step's line in metrics.jsonl says, for first < step <= last."""
    from training.saving.metrics_file import read_metrics

    lines = read_metrics(run / "metrics.jsonl")
    return {line["step"]: line for line in lines if "loss" in line and first < line["step"] <= last}


def compare_figures(old: dict[int, dict[str, float]], new: dict[int, dict[str, float]]) -> tuple[bool, str]:
    """(equal, sentence) about the logged steps that both have."""
    steps = sorted(old.keys() & new.keys())
    if not steps:
        raise NothingToCompare("no step was logged both times; verify more steps")
    apart = [step for step in steps if any(repr(old[step].get(k)) != repr(new[step].get(k)) for k in FIGURES)]
    if not apart:
        return True, f"losses: {len(steps)} of {len(steps)} logged steps bit-equal"
    step = apart[0]
    name = next(k for k in FIGURES if repr(old[step].get(k)) != repr(new[step].get(k)))
    largest = max(abs(old[s]["loss"] - new[s]["loss"]) / abs(old[s]["loss"]) for s in steps)
    return False, (
        f"losses: part at step {step} ({name} {old[step].get(name)!r} recorded, {new[step].get(name)!r} now), "
        f"{steps.index(step)} logged steps bit-equal before it; largest difference of a loss {100 * largest:.2g} %"
    )


def compare_digests(old: list[dict[str, Any]], new: list[dict[str, Any]], last: int) -> tuple[bool, str]:
    """(equal, sentence) about the parameters at the saves that both have."""
    recorded = {save["step"]: save["weights_digest"] for save in old}
    again = {save["step"]: save["weights_digest"] for save in new if save["step"] <= last}
    steps = sorted(recorded.keys() & again.keys())
    apart = [step for step in steps if recorded[step] != again[step]]
    if apart:
        equal = steps.index(apart[0])
        return False, f"weights: part at the save of step {apart[0]}, {equal} digests equal before it"
    if not steps:
        return (
            True,
            "weights: not compared, no save of both; take a multiple of the run's save_interval as --steps",
        )
    return True, f"weights: {len(steps)} of {len(steps)} digests equal"


def differing_circumstances(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What is otherwise now than it was: versions, processor, threads, code."""
    from training.saving.state import circumstances

    was, now = circumstances(old), circumstances(new)
    was["code"], now["code"] = old["environment"]["git"], new["environment"]["git"]
    return [f"{name} {was.get(name)} -> {now[name]}" for name in now if was.get(name) != now[name]]


def verify(run: Path, steps: int) -> bool:
    """Train again, print what was found. Raises NothingToCompare."""
    record = read_receipt(run)
    first, source = 0, None
    if record["starts"][0]["config"].get("from_weight", "none") != "none" or record["starts"][0]["step"]:
        first, source = earliest_save(run)
    last = min(first + steps, max(figures(run, first, sys.maxsize), default=0))
    with tempfile.TemporaryDirectory(prefix="verify_run_") as name:
        folder = Path(name)
        config = record["starts"][-1]["config"]
        again = folder / f"again_{config['hidden_size']}{'_moe' * bool(config['use_moe'])}"
        if source:
            shutil.copytree(source, again / "resume" / source.name)
        for start, begin, end in segments(record, first, last):
            print(f"Training steps {begin + 1} to {end} again ...", flush=True)
            train_again(start, folder, begin, end)
        if not (again / "run.json").exists():
            raise NothingToCompare(f"{run}: no logged step after step {first}")
        repeated = json.loads((again / "run.json").read_bytes())
        results = [
            compare_figures(figures(run, first, last), figures(again, first, last)),
            compare_digests(record["saves"], repeated["saves"], last),
        ]
    if record["identity"] != repeated["identity"]:
        results.append((False, "data: not the texts, validation texts or tokenizer that were recorded"))
    for _, sentence in results:
        print(sentence)
    if others := differing_circumstances(segments(record, first, last)[-1][0], repeated):
        print(f"circumstances: {'; '.join(others)}; other sums round otherwise, so bits need not agree")
    agree = all(equal for equal, _ in results)
    print(f"{'AGREE' if agree else 'DIFFER'}: steps {first + 1} to {last} of {run}")
    return agree


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        return 0 if verify(arguments.run, arguments.steps) else 1
    except NothingToCompare as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
