"""Before ranks meet: settings checked, the checkpoint to go on from found, the model drawn, the data opened."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dataset.text_tokenizer import TextTokenizer
from errors import Findings, refuse
from model.model_minimind import MiniMindForCausalLM
from training.before.checks import check_length, check_model, check_settings
from training.before.cost import Cost, estimate_cost
from training.before.data import open_data
from training.before.folders import check_run_folder
from training.before.machine import check_torchrun
from training.before.resume import check_identity, find_checkpoint, saved_progress
from training.before.start_model import init_model, model_shape
from training.config import Config, resolve_path, with_saved
from training.data import Data
from training.device import prepare_allocator
from training.launcher import environment_rank
from training.saving.checkpoint import Checkpoint
from training.saving.run_folder import contents
from training.schedule import Clock, Epochs, Progress, choose_global_batch, make_clock


@dataclass(frozen=True)
class Prepared:
    """What is known and checked before ranks meet."""

    config: Config  # as resolved: of a resumed run, the saved settings under what was said this time
    data: Data
    clock: Clock
    cost: Cost
    checkpoint: Checkpoint | None
    progress: Progress
    model: MiniMindForCausalLM  # on the host, drawn under the seed: the same on every rank
    run_folder: list[tuple[str, int]]  # its contents when it was looked into, before it was locked


def prepare(config: Config) -> Prepared:
    """Check settings, find the checkpoint to go on from, draw the model, open the data, set the clock.

    Raises UserError, DataError or CheckpointError. Ranks do this each for itself, without talking to each other; a file
    lock lets one of them build what is not there yet.
    """
    prepare_allocator()
    refuse(check_torchrun())
    rank, _, world_size = environment_rank()
    problems = Findings(check_run_folder(config))
    checkpoint, seen = None, []
    if not problems:
        seen = contents(config)
        checkpoint = problems.of(find_checkpoint, config)
    if checkpoint:  # a command line that is repeated names the first weights again; they may be gone by now
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
    data = open_data(config, tokenizer, show=rank == 0)
    progress = Progress()
    if checkpoint:
        check_identity(config, checkpoint.state, data.identity)
        progress = saved_progress(config, checkpoint, data.identity)
    saved_batch = checkpoint.state["global_batch_size"] if checkpoint else 0
    epochs = Epochs(len(data.train), choose_global_batch(config, world_size, saved_batch))
    config = with_earlier_end(config, epochs, progress)
    clock = make_clock(config, epochs, progress)
    refuse(check_length(config, clock.rows_per_step, world_size, progress.step))
    cost = estimate_cost(model, config, data.train)
    return Prepared(config, data, clock, cost, checkpoint, progress, model, seen)


def with_earlier_end(config: Config, epochs: Epochs, progress: Progress) -> Config:
    """`--epochs` beside `max_steps` ends the run at whichever comes first; the other one is dropped."""
    if "epochs" not in config.flags or not config.max_steps:
        return config
    at_epochs_end = progress.step + epochs.steps_until(progress.rows_seen, config.epochs)
    return replace(config, max_steps=0) if at_epochs_end <= config.max_steps else config
