"""Before ranks meet: settings checked, the save to go on from found, the model drawn, data opened, the plan made."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from torch import nn

from dataset.lm_dataset import PretrainDataset, choose_documents
from dataset.make_sample import make_sample
from dataset.text_tokenizer import TextTokenizer
from dataset.token_cache import TokenCache, build_or_open, count_shared
from errors import Findings, UserError, refuse
from training.before.checks import check_length, check_model, check_settings
from training.before.cost import Plan, make_plan
from training.before.folders import check_run_folder
from training.before.machine import check_torchrun
from training.before.start_model import init_model, model_shape
from training.config import SAMPLE_FOLDER, Config, resolve_path, resolve_paths, with_saved
from training.device import prepare_allocator
from training.launcher import environment_rank
from training.saving.checkpoint import Checkpoint, load_newest
from training.saving.state import check_identity
from training.schedule import Progress, Schedule, StepLayout, make_layout, make_schedule


@dataclass
class Prepared:
    """What is known and checked before ranks meet. The dry step may still lower batch_size: it then replaces plan and
    layout and edits config."""

    config: Config  # of a resumed run: the saved settings under what was said this time
    tokenizer: TextTokenizer
    dataset: PretrainDataset
    validation: PretrainDataset | None
    checkpoint: Checkpoint | None
    identity: dict[str, Any]
    progress: Progress
    layout: StepLayout
    schedule: Schedule
    plan: Plan
    model: nn.Module  # on the host, drawn under the seed: the same on every rank


def prepare(config: Config) -> Prepared:
    """Check settings, find the save to go on from, draw the model, open the data, make the plan.

    Raises UserError, DataError or CheckpointError. Ranks do this each for itself, without talking to each other; a file
    lock lets one of them build what is not there yet.
    """
    prepare_allocator()
    refuse(check_torchrun())
    rank, _, world_size = environment_rank()
    problems = Findings(check_run_folder(config))
    checkpoint = None if problems else problems.of(find_save, config)
    if checkpoint:
        # A command line that is repeated names the first weights again; they may be gone by now.
        config = replace(with_saved(config, checkpoint.state["config"]), from_weight="none")
    elif config.eval_only and config.from_weight == "none":
        config = replace(config, from_weight=config.save_weight)
    problems += check_settings(config)
    tokenizer = problems.of(TextTokenizer.load, resolve_path(config.tokenizer_path), bool(config.parse_special))
    if checkpoint and tokenizer:
        problems.of(check_identity, config, checkpoint.state, {"tokenizer_digest": tokenizer.digest})
    refuse(problems)
    refuse(check_model(config, model_shape(config, tokenizer)))
    model = init_model(config, tokenizer)  # before the texts are tokenised: weights that do not fit are found at once
    dataset, validation = open_data(config, tokenizer, show=rank == 0)
    identity = {
        "data_fingerprint": dataset.fingerprint,
        "validation_fingerprint": validation.fingerprint if validation else None,
        "tokenizer_digest": tokenizer.digest,
        "rows": len(dataset),
    }
    progress = Progress()
    if checkpoint:
        check_identity(config, checkpoint.state, identity)
        progress = saved_progress(config, checkpoint, identity)
    saved_batch = checkpoint.state["global_batch_size"] if checkpoint else 0
    layout = make_layout(config, len(dataset), world_size, saved_batch)
    schedule = make_schedule(config, layout, progress)
    plan = make_plan(model, config, dataset, layout, schedule, progress.rows_seen)
    rows_per_step = min(layout.global_batch_size, layout.rows)
    refuse(check_length(config, rows_per_step, world_size, progress.step))
    return Prepared(
        config, tokenizer, dataset, validation, checkpoint, identity, progress, layout, schedule, plan, model
    )


def find_save(config: Config) -> Checkpoint | None:
    """The save to go on from, or None for a fresh start. Raises UserError where that would overwrite a run, and
    CheckpointError where saves exist and none is good."""
    folder, name = config.run_folder, config.run_name
    has_weights = os.path.exists(folder / f"{name}.pth")
    if config.from_resume:
        checkpoint = load_newest(config.resume_folder)
        if checkpoint is None and has_weights and has_completed_save(folder) and not config.overwrite:
            raise UserError(
                f"--from_resume 1: {folder} holds weights but no resume state; start another run from them with "
                f"--from_weight {config.save_weight} --save_weight NEW, or replace it with --overwrite 1"
            )
        return checkpoint
    holds_run = has_weights or any(config.resume_folder.glob("step_*"))
    if holds_run and not config.overwrite and not config.eval_only:
        raise UserError(
            f"--save_weight {config.save_weight}: {folder} holds a run already; go on with it (--from_resume 1), "
            "name another (--save_weight NEW) or replace it (--overwrite 1)"
        )
    return None


def has_completed_save(folder: Path) -> bool:
    """False where a kill came inside the first save, between weights and resume state: the run has nothing yet."""
    try:
        return bool(json.loads((folder / "run.json").read_bytes()).get("saves"))
    except (OSError, ValueError, AttributeError):
        return True


def make_bundled_sample() -> None:
    """The bundled sample, made by one process while others wait. Raises UserError where it cannot be written."""
    try:
        with FileLock(SAMPLE_FOLDER.with_name(".sample.lock")):
            make_sample(SAMPLE_FOLDER)
    except (OSError, NotImplementedError) as error:
        raise UserError(
            f"--data_path: the bundled sample cannot be made in {SAMPLE_FOLDER} ({error}); make it elsewhere with "
            "`python dataset/make_sample.py --out DIR` and give --data_path DIR/train.jsonl --val_path DIR/val.jsonl"
        ) from None


def open_data(config: Config, tokenizer: TextTokenizer, show: bool) -> tuple[PretrainDataset, PretrainDataset | None]:
    """Training rows and, where there are texts for it, validation rows. Raises DataError."""
    if config.uses_sample:
        make_bundled_sample()

    def corpus(path: str, part: str, fraction: float) -> TokenCache:
        return build_or_open(
            resolve_paths(path),
            tokenizer,
            text_key=config.text_key,
            cache_dir=resolve_path(config.cache_dir),
            bad_lines=config.bad_lines,
            val_fraction=fraction,
            part=part,
            verify=bool(config.verify_data),
            progress=show,
        )

    problems, held_out = Findings(), None
    train = problems.of(corpus, config.data_path, "train", config.val_fraction)
    val_path = config.val_path or (str(SAMPLE_FOLDER / "val.jsonl") if config.uses_sample else "")
    if val_path:
        held_out = problems.of(corpus, val_path, "train", 0.0)
    elif config.val_fraction > 0:
        held_out = problems.of(corpus, config.data_path, "val", config.val_fraction)
    refuse(problems)
    dataset = PretrainDataset(train, config.max_seq_len, packing=bool(config.packing))
    if held_out is None:
        return dataset, None
    chosen = None
    if config.eval_rows:
        chosen = choose_documents(held_out, config.eval_rows, config.max_seq_len)
    validation = PretrainDataset(held_out, config.max_seq_len, packing=True, documents=chosen)
    if show:
        validation.ledger["shared_with_train"] = count_shared(train, held_out)
    return dataset, validation


def saved_progress(config: Config, checkpoint: Checkpoint, identity: dict[str, Any]) -> Progress:
    """The counters of a save. `--resume_reset schedule` restarts the schedule here; a best score counts only on the
    same validation texts."""
    progress = Progress(**checkpoint.state["progress"])
    if config.resume_reset == "schedule":
        progress.schedule_start = progress.rows_seen
    if checkpoint.state["identity"]["validation_fingerprint"] != identity["validation_fingerprint"]:
        progress.best_val_loss, progress.best_step = None, 0
    return progress
