"""The lines a run prints before its first step, and the command that goes on with it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from dataset.lm_dataset import PretrainDataset
from training.before.prepare import Prepared
from training.config import OPTIONS, ROOT, Config
from training.launcher import is_torchrun_worker
from training.saving.state import TrainingState, describe_changes


def start_page(prepared: Prepared, world_size: int, state: TrainingState) -> list[str]:
    """The lines before the first step: settings, data ledger, plan, and what a resume changes."""
    config, checkpoint, choices = prepared.config, prepared.checkpoint, state.choices
    changed = [f"{name}={getattr(config, name)}" for name in OPTIONS if getattr(config, name) != OPTIONS[name].default]
    lines = [
        f"Settings: {', '.join(changed) or 'all defaults'}",
        f"Device: {choices['device']}, {choices['dtype']}, threads: {choices['threads']}, ranks: {world_size}",
        f"Data: {ledger_line(prepared.dataset)}",
    ]
    if prepared.validation:
        lines.append(f"Validation: {ledger_line(prepared.validation)}")
    lines += prepared.plan.lines(world_size)[: 1 if config.eval_only else None]
    if checkpoint:
        lines.append(f"Resuming {checkpoint.folder}")
        changes = describe_changes(config, checkpoint.state, state)
        lines += ["Changed on resume:", *changes] if changes else []
    elif config.from_resume:
        lines.append("*** No completed save found: this is a FRESH START, not a resume ***")
    return lines


def ledger_line(dataset: PretrainDataset) -> str:
    """Documents, tokens, rows and padding of a data set, and what was left out, on one line."""
    ledger = dataset.ledger
    line = (
        f"{ledger['documents']:,} documents, {ledger['bytes']:,} bytes, {ledger['tokens']:,} tokens "
        f"({ledger['bytes_per_token']:.2f} bytes a token), {ledger['rows']:,} rows, "
        f"{100 * ledger['padding_share']:.2f} % padding, {ledger['documents_split']:,} documents split"
    )
    names = "documents_cut tokens_cut exact_duplicates empty_texts blank_lines duplicate_keys shared_with_train".split()
    counts = {name.replace("_", " "): ledger.get(name, 0) for name in names}
    counts["files given twice, read once"] = ledger.get("given_twice", 0)
    counts |= {f"lines rejected: {reason}": count for reason, count in ledger.get("rejected", {}).items()}
    notes = [f"{count:,} {name}" for name, count in counts.items() if count]
    return ", ".join([line, *notes])


def shown(path: Path) -> str:
    """A path as one would type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def program(name: str) -> str:
    """`python` or `torchrun` as one types it from here: with its path where the shell would find another one."""
    ours = Path(sys.executable).with_name(name)
    return shown(ours) if ours.exists() and shutil.which(name) != str(ours) else name


def resume_command(config: Config) -> str:
    """The command line that goes on with this run from the current folder: the same launcher, ranks and run."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") if is_torchrun_worker() else None
    words = [program("torchrun"), "--nproc_per_node", ranks] if ranks else [program("python")]
    words.append(shown(ROOT / "train_pretrain.py"))
    for name in ("config", "save_dir", "save_weight", "hidden_size", "use_moe"):
        value = getattr(config, name)
        if value != OPTIONS[name].default and (config.save_state or name != "save_weight"):
            words += [f"--{name}", str(value)]
    if not config.save_state:  # no state to resume: its weights can begin another run
        return shlex.join([*words, "--from_weight", config.save_weight, "--save_weight", "NEW"])
    return shlex.join([*words, "--from_resume", "1"])
