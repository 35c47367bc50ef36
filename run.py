"""A training run: its parts, and how they are put together from settings. `prepare` finds every mistake before ranks
meet; `begin_run` builds what is left."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from checkpoint import Checkpoint, clean_leftovers, load_newest
from compiling import choose_compile, compile_model
from config import (
    ONE_START_ONLY,
    OPTIONS,
    ROOT,
    SAMPLE_FOLDER,
    Config,
    UserError,
    resolve_path,
    resolve_paths,
    with_saved,
)
from dataset.lm_dataset import PretrainDataset, choose_documents
from dataset.make_sample import make_sample
from dataset.text_tokenizer import TextTokenizer
from dataset.token_cache import TokenCache, build_or_open, count_shared
from dry_step import memory_errors, rehearse
from files import write_file_atomic
from live_state import capture_rng
from metrics import (
    Console,
    DivergenceWatch,
    MetricsFile,
)
from plan import Plan, make_plan
from preflight import Findings, check_model, check_plan, check_run_folder, check_settings, check_torchrun
from receipt import RunRecord, environment_facts, git_state
from resume import (
    Progress,
    Schedule,
    TrainingState,
    Windows,
    check_identity,
    describe_changes,
    make_schedule,
    make_windows,
)
from saver import RunFiles, Saver
from stopping import StopSignal
from tracker import Tracker, start_tracker
from trainer_utils import (
    Throughput,
    World,
    build_optimizers,
    choose_dtype,
    environment_rank,
    is_torchrun_worker,
    prepare_allocator,
    set_deterministic,
    setup_seed,
)
from weights import init_model, model_shape

LOCK_SECONDS = 10.0  # loader processes of a killed run hold its lock until they notice, at most 5 s later


@dataclass
class Prepared:
    """What is known and checked before ranks meet."""

    config: Config  # of a resumed run: the saved settings under what was said this time
    tokenizer: TextTokenizer
    dataset: PretrainDataset
    validation: PretrainDataset | None
    checkpoint: Checkpoint | None
    identity: dict[str, Any]
    progress: Progress
    windows: Windows
    schedule: Schedule
    plan: Plan
    model: nn.Module  # on the host, drawn under the seed: the same on every rank


@dataclass
class Run:
    """Everything a running training holds, so that the functions of the loop can be read one at a time."""

    config: Config
    world: World
    stop: StopSignal
    tokenizer: TextTokenizer
    dataset: PretrainDataset
    validation: PretrainDataset | None
    state: TrainingState
    saver: Saver
    tracker: Tracker
    console: Console
    dtype: torch.dtype
    began: float  # monotonic seconds; earlier for a resumed run, by what it had trained
    val_loss: float | None = None  # of the last evaluation
    throughput: Throughput = field(default_factory=Throughput)
    updates: list[tuple[int, list[int], Tensor]] = field(default_factory=list)  # (step, rows, finite) not yet looked at

    @property
    def model(self) -> nn.Module:
        """With DDP around it where there are several ranks."""
        return self.state.model

    @property
    def ends_epoch(self) -> bool:
        """True when the step just finished was the last of an epoch."""
        return self.state.progress.rows_seen % self.state.windows.rows == 0

    @property
    def last_step(self) -> int:
        """Where this start of the program ends: the run's last step, or an earlier one that the user asked for."""
        total = self.state.schedule.total_steps
        return min(total, self.config.stop_after) if self.config.stop_after else total

    @property
    def is_finished(self) -> bool:
        return self.state.progress.step >= self.last_step


# --- before ranks meet ---


def prepare(config: Config) -> Prepared:
    """Check settings, open the data, find the save to go on from, draw the model, make the plan.

    Raises UserError, DataError or CheckpointError. Ranks do this each for itself, without talking to each other; a file
    lock lets one of them build what is not there yet.
    """
    prepare_allocator()
    refuse(check_torchrun())
    rank, _, world_size = environment_rank()
    problems = Findings(check_run_folder(config))
    checkpoint = None if problems else problems.of(find_save, config)
    if checkpoint:
        config = with_saved(config, checkpoint.state["config"])
        config.from_weight = "none"  # a command line that is repeated names it again; it may be gone by now
    elif config.eval_only and config.from_weight == "none":
        config.from_weight = config.save_weight
    problems += check_settings(config)
    tokenizer = problems.of(TextTokenizer.load, resolve_path(config.tokenizer_path), bool(config.parse_special))
    if checkpoint and tokenizer:
        problems.of(check_identity, config, checkpoint.state, {"tokenizer_digest": tokenizer.digest})
    refuse(problems)
    refuse(check_model(config, model_shape(config, tokenizer)))
    model = init_model(config, tokenizer)  # before the texts are tokenised: weights that do not fit are found at once
    dataset, validation = open_data(config, tokenizer, show=rank == 0)
    identity = {
        "data_fingerprint": dataset.cache.fingerprint,
        "validation_fingerprint": f"{validation.cache.fingerprint}:{config.eval_rows}" if validation else None,
        "tokenizer_digest": tokenizer.digest,
        "rows": len(dataset),
    }
    progress = Progress()
    if checkpoint:
        check_identity(config, checkpoint.state, identity)
        progress = saved_progress(config, checkpoint, identity)
    saved_batch = checkpoint.state["global_batch_size"] if checkpoint else 0
    windows = make_windows(config, len(dataset), world_size, saved_batch)
    schedule = make_schedule(config, windows, progress)
    plan = make_plan(model, config, dataset, windows, schedule, progress.rows_seen)
    refuse(check_plan(config, plan, world_size, progress.step))
    return Prepared(
        config, tokenizer, dataset, validation, checkpoint, identity, progress, windows, schedule, plan, model
    )


def refuse(problems: list[str]) -> None:
    if problems:
        raise UserError(problems)


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
        chosen = choose_documents(held_out, config.eval_rows, config.max_seq_len, config.seed)
    validation = PretrainDataset(held_out, config.max_seq_len, packing=True, documents=chosen)
    if show:
        validation.ledger["shared_with_train"] = count_shared(train, held_out)
    return dataset, validation


def saved_progress(config: Config, checkpoint: Checkpoint, identity: dict[str, Any]) -> Progress:
    """The counters of a save. A best score counts only on the same validation texts."""
    progress = Progress(**checkpoint.state["progress"])
    if config.resume_reset == "schedule":
        progress.schedule_start = progress.rows_seen
    if checkpoint.state["identity"]["validation_fingerprint"] != identity["validation_fingerprint"]:
        progress.best_val_loss, progress.best_step = None, 0
    return progress


# --- when ranks have met ---


def begin_run(prepared: Prepared, world: World, stop: StopSignal) -> Run:
    """Put the parts together: device, precision, optimizers, saved state, DDP, files. All ranks must call."""
    config, checkpoint = prepared.config, prepared.checkpoint
    refuse(differences_between_ranks(prepared, world))  # all ranks
    set_deterministic(bool(config.deterministic))
    choices, kept = resolve_choices(config, world, checkpoint)
    dtype = getattr(torch, choices["dtype"])
    with memory_errors("the model"):
        model = prepared.model.to(world.device)
    measured = rehearse_step(prepared, model, world, dtype)  # all ranks; before the model is wrapped or compiled
    measured += compile_if_worth(prepared, model, choices, world)  # all ranks
    setup_seed(config.seed + world.rank)  # dropout differs between ranks; the weights were drawn before
    state = TrainingState(
        model=model,
        optimizers=build_optimizers(model, config, world.device),
        scaler=torch.amp.GradScaler(world.device.type, enabled=dtype == torch.float16),
        progress=prepared.progress,
        windows=prepared.windows,
        schedule=prepared.schedule,
        watch=DivergenceWatch(),
        identity=prepared.identity,
        choices=choices,
        environment=environment_facts(world.device) | {"git": git_state(ROOT)},
        rng=capture_rng(world.device),
    )
    notes = start_page(prepared, world.size, state) + kept + measured
    if checkpoint:
        notes += state.restore(checkpoint, world.rank, world.device, config.resume_reset == "optimizer")
    state.model = distribute(model, world)  # all ranks
    console = Console(world.is_main)
    with folder_errors(config):
        files = open_run_folder(prepared, state) if world.is_main and not config.eval_only else None
    if files:
        stop.before_leaving = lambda: files.record.update(status="stopped")
    for line in notes:
        console.print(line)
    tracker = start_tracker(
        bool(config.use_wandb) and files is not None, config.wandb_project, config.run_name, config.values(),
        config.run_folder, prepared.progress.tracker_run_id or None, world.is_main, console.print,
    )  # fmt: skip
    prepared.progress.tracker_run_id = tracker.run_id or prepared.progress.tracker_run_id
    return Run(
        config=config,
        world=world,
        stop=stop,
        tokenizer=prepared.tokenizer,
        dataset=prepared.dataset,
        validation=prepared.validation,
        state=state,
        saver=Saver(config, world, state, weights_card(prepared), files),
        tracker=tracker,
        console=console,
        dtype=dtype,
        began=time.monotonic() - prepared.progress.elapsed_seconds,
    )


def rehearse_step(prepared: Prepared, model: nn.Module, world: World, dtype: torch.dtype) -> list[str]:
    """Complete the plan by a dry step; on CUDA also find the batch_size that fits. All ranks must call. Returns what
    was changed, in words."""
    config, windows = prepared.config, prepared.windows
    if config.eval_only or prepared.progress.step >= prepared.schedule.total_steps:
        return []
    fitting, found = rehearse(model, prepared.dataset, windows, config, world, dtype)  # all ranks
    prepared.plan = prepared.plan.measured(fitting, found.seconds_per_row, found.peak_bytes)
    if fitting == windows:
        return []
    prepared.windows = fitting
    # A resume and the saved config.yaml are to find the same micro-batches and the same step.
    config.batch_size, config.accumulation_steps = fitting.batch_size, fitting.accumulation_steps
    config.global_batch_size = fitting.global_batch_size
    return [
        f"batch_size: {windows.batch_size} rows do not fit in memory, {fitting.batch_size} do; accumulation_steps: "
        f"{windows.accumulation_steps} -> {fitting.accumulation_steps}; a step stays {fitting.global_batch_size} rows"
    ]


def compile_if_worth(prepared: Prepared, model: nn.Module, choices: dict[str, Any], world: World) -> list[str]:
    """Compile the model as --use_compile says, note it in `choices`. All ranks must call. Returns what to print."""
    config, checkpoint = prepared.config, prepared.checkpoint
    keep = checkpoint is not None and "use_compile" not in config.given
    saved = checkpoint.state["choices"].get("compile") if checkpoint and keep else None
    seconds = None if config.eval_only else prepared.plan.estimated_seconds
    choices["compile"], line = choose_compile(config.use_compile, saved, seconds, world)  # all ranks
    if choices["compile"]:
        compile_model(model, with_loss=world.device.type == "cuda")
    return [line] if line else []


def distribute(model: nn.Module, world: World) -> nn.Module:
    """DDP where there is more than one rank. Buffers are not exchanged: the rotary tables are the same everywhere."""
    if world.size == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
    )


def differences_between_ranks(prepared: Prepared, world: World) -> list[str]:
    """Problems of ranks that found other data, or another save, than rank 0: a folder that is not shared between the
    machines, or not up to date everywhere. All ranks must call."""
    mine = {
        **prepared.identity,
        "save to go on from": prepared.checkpoint and prepared.checkpoint.manifest["manifest_sha256"],
        "rows in a step": prepared.windows.global_batch_size,
        "steps": prepared.schedule.total_steps,
    }
    first = world.broadcast(mine)
    return [
        f"rank {world.rank}: its {name.replace('_', ' ')} is {mine[name]!s:.16}, rank 0 has {first[name]!s:.16}; every "
        "rank needs the same files and settings"
        for name in mine
        if mine[name] != first[name]
    ]


def resolve_choices(config: Config, world: World, checkpoint: Checkpoint | None) -> tuple[dict[str, Any], list[str]]:
    """(what `auto` comes to, what to print about it). A resume takes the saved run's choices where they were not said
    anew: other kernels or another thread count would give other bits."""
    saved, notes = checkpoint.state["choices"] if checkpoint else {}, []
    dtype = choose_dtype(config.dtype, world.device) if config.dtype != "auto" or not saved else saved["dtype"]
    same_place = saved and (saved["device"], saved["world_size"]) == (world.device.type, world.size)
    offered = torch.get_num_threads()
    if threads := config.threads or (saved["threads"] if same_place else 0):
        torch.set_num_threads(threads)
        if threads != (config.threads or offered):
            notes.append(f"Threads: {threads} as in the saved run; --threads {offered} is what this start was offered")
    choices = {
        "dtype": str(dtype).removeprefix("torch."),
        "device": world.device.type,
        "threads": torch.get_num_threads(),
        "world_size": world.size,
    }
    return choices, notes


@contextmanager
def folder_errors(config: Config) -> Iterator[None]:
    """What the system refuses in a run folder (a folder where a file belongs, say) is a mistake in words."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--save_dir {config.run_folder}: {error}; put that right or give another folder") from None


def open_run_folder(prepared: Prepared, state: TrainingState) -> RunFiles:
    """Lock the run folder against a second run, clear what must not be mixed with this one, write the resolved
    settings. Main process only. Raises UserError when another process trains there."""
    import yaml

    config, checkpoint = prepared.config, prepared.checkpoint
    folder = config.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=LOCK_SECONDS if config.from_resume else 0)
    except Timeout:
        raise UserError(f"--save_weight {config.save_weight}: another process is training in {folder}") from None
    except NotImplementedError:
        print(f"Warning: no file locks on this disk; nothing keeps a second run out of {folder}", file=sys.stderr)
    clean_leftovers(folder)
    clean_leftovers(config.resume_folder)
    if checkpoint:
        for path, problem in zip(checkpoint.set_damaged_aside(), checkpoint.damaged, strict=True):
            print(f"Warning: {problem}; set aside as {path.name}", file=sys.stderr)
    else:
        clear_run(folder, config.run_name)
    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.truncate_after(prepared.progress.step)
    repeatable = {name: value for name, value in config.values().items() if name not in ONE_START_ONLY}
    repeatable["global_batch_size"] = prepared.windows.global_batch_size  # the same steps with any number of ranks
    write_file_atomic(folder / "config.yaml", yaml.safe_dump(repeatable, sort_keys=False, allow_unicode=True))
    record = RunRecord(folder / "run.json")
    record.update(
        status="running",
        seed=config.seed,
        config=config.values(),
        identity=prepared.identity,
        choices=state.choices,
        environment=state.environment,
        ledger={
            part: data.ledger for part, data in (("train", prepared.dataset), ("val", prepared.validation)) if data
        },
        plan=asdict(prepared.plan),
    )
    settings = repeatable | {"resume_reset": config.resume_reset}
    record.add_start(prepared.progress.step, config=settings, choices=state.choices, environment=state.environment)
    if checkpoint:  # a kill may have come between the save and its note
        record.add_save(checkpoint.step, checkpoint.weights_digest, f"resume/step_{checkpoint.step:08d}")
    return RunFiles(metrics, record, lock)


def clear_run(folder: Path, name: str) -> None:
    """Remove what an older run of this name left; the user has agreed to it with --overwrite 1."""
    shutil.rmtree(folder / "resume", ignore_errors=True)
    for leftover in (
        f"{name}.pth",
        f"{name}.json",
        f"{name}_best.pth",
        f"{name}_best.json",
        "metrics.jsonl",
        "run.json",
    ):
        (folder / leftover).unlink(missing_ok=True)


def weights_card(prepared: Prepared) -> dict[str, Any]:
    """What a weights file says of itself: architecture and tokenizer, so that it is never used with another."""
    return {
        "format": 1,
        "kind": "minimind-weights",
        "config": prepared.model.config.to_dict(),  # type: ignore[operator,union-attr]
        "tokenizer_digest": prepared.tokenizer.digest,
        "tokenizer_path": prepared.config.values()["tokenizer_path"],
    }


# --- what is printed ---


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
    counts |= {f"lines rejected: {reason}": count for reason, count in ledger.get("rejected", {}).items()}
    notes = [f"{count:,} {name}" for name, count in counts.items() if count]
    return ", ".join([line, *notes])


def shown(path: Path) -> str:
    """A path as one would type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def resume_command(config: Config) -> str:
    """The command line that goes on with this run from the current folder: the same launcher, ranks and run."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") if is_torchrun_worker() else None
    words = ["torchrun", "--nproc_per_node", ranks] if ranks else ["python"]
    words.append(shown(ROOT / "train_pretrain.py"))
    for name in ("config", "save_dir", "save_weight", "hidden_size", "use_moe"):
        value = getattr(config, name)
        if value != OPTIONS[name].default and (config.save_state or name != "save_weight"):
            words += [f"--{name}", str(value)]
    if not config.save_state:  # no state to resume: its weights can begin another run
        return shlex.join([*words, "--from_weight", config.save_weight, "--save_weight", "NEW"])
    return shlex.join([*words, "--from_resume", "1"])
