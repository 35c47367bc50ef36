"""The lines a run prints before its first step."""

from __future__ import annotations

from typing import Any

from dataset.lm_dataset import PretrainDataset
from training.before.checks import notes_on
from training.before.cost import cost_lines
from training.before.prepare import Prepared
from training.before.resume import describe_changes
from training.config import OPTIONS
from training.saving.state import RunFacts


def start_page(prepared: Prepared, facts: RunFacts, predicted: dict[str, Any]) -> list[str]:
    """The lines before the first step: settings, data ledger, cost, and what a resume changes."""
    config, data, checkpoint, choices = prepared.config, prepared.data, prepared.checkpoint, facts.choices
    changed = [f"{name}={getattr(config, name)}" for name in OPTIONS if getattr(config, name) != OPTIONS[name].default]
    lines = [
        f"Settings: {', '.join(changed) or 'all defaults'}",
        f"Device: {choices.device}, {choices.dtype}, ranks: {choices.world_size}",
        f"Data: {ledger_line(data.train)}",
    ]
    if data.validation:
        lines.append(f"Validation: {ledger_line(data.validation)}")
    lines += cost_lines(predicted, choices.world_size)
    lines += [f"Note: {note}" for note in notes_on(config, prepared.clock.total_steps, choices.device)]
    if checkpoint:
        lines.append(f"Resuming {checkpoint.folder}")
        changes = describe_changes(config, checkpoint.state, facts, prepared.clock, prepared.progress.rows_seen)
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
