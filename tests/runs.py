"""Running the trainer from tests: in this process, as a subprocess, under torchrun; and reading what a run left."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import train_pretrain
from hooks import Hook, run_all, tell
from training.during.run import Listener, unheard
from training.saving.checkpoint import find_checkpoints
from training.saving.metrics_file import read_metrics
from training.saving.weights import read_weights

ROOT = Path(__file__).resolve().parents[1]


def train(arguments: list[str], *more: object, expect: int = 0, listener: Listener = unheard) -> None:
    """`main(argv)` in this process; the exit status must be `expect`."""
    status = train_pretrain.main([*arguments, *map(str, more)], listener)
    assert status == expect, f"exit status {status}, expected {expect}"


# Children fork from a server that has imported the trainer and run nothing: they start in a tenth of a second.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["train_pretrain", "model.sampling"])


def _train_in_child(arguments: list[str], changes: dict[str, str], float64: bool, log: str, hooks: list[Hook]) -> None:
    os.environ.update(changes)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    if float64:
        torch.set_default_dtype(torch.float64)
    train_pretrain.StopSignal.VOTE_SECONDS = 0.0  # tests say at which micro-batch ranks are to agree
    run_all(hooks)
    sys.exit(train_pretrain.main(arguments, tell))


def launch(
    arguments: list[str],
    *more: object,
    ranks: int = 1,
    float64: bool = False,
    log: object = os.devnull,
    hooks: list[Hook] | dict[int, list[Hook]] | None = None,
    **environment: str,
) -> list[Any]:
    """Start one process a rank, as torchrun would; returns them at once. `log` takes what they print; `hooks` (see
    hooks.py) are for all ranks, or by rank."""
    argv = [*arguments, *map(str, more)]
    port = str(free_port())
    processes = []
    for rank in range(ranks):
        changes = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
        changes |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if ranks > 1 else {}
        mine = hooks.get(rank, []) if isinstance(hooks, dict) else hooks or []
        process = CONTEXT.Process(target=_train_in_child, args=(argv, changes | environment, float64, str(log), mine))
        process.start()
        processes.append(process)
    return processes


def finish(processes: list[Any], expect: int = 0, timeout: float = 120) -> None:
    """Wait for all; every exit status must be `expect`."""
    for process in processes:
        process.join(timeout)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.exitcode is None:
            process.kill()
    assert codes == [expect] * len(codes), f"exit statuses {codes}, expected {expect}"


def kill_after(process: Any, log: Path, steps: int, delay: float) -> bool:
    """SIGKILL a process once it has logged `steps` more steps, `delay` seconds later; False if it ended before."""
    before = count_steps(log)
    while process.exitcode is None and count_steps(log) < before + steps:
        time.sleep(0.002)
    time.sleep(delay)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def count_steps(log: Path) -> int:
    return log.read_bytes().count(b"Epoch:[") if log.exists() else 0


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def command(arguments: list[str], *more: object, ranks: int = 0) -> list[str]:
    """The same run as a program of its own; `ranks` > 0 starts it under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks else []
    return [sys.executable, *launcher, str(ROOT / "train_pretrain.py"), *arguments, *map(str, more)]


def environment(**changes: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**clean, "OMP_NUM_THREADS": "1", **changes}


def spawn(words: list[str], expect: int = 0, timeout: float = 240, **changes: str) -> str:
    """Run a command to its end; returns stdout and stderr together."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=environment(**changes), cwd=ROOT)
    assert done.returncode == expect, f"exit status {done.returncode}, expected {expect}:\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def run_folder(arguments: list[str]) -> Path:
    """The folder a run of these arguments writes to."""
    return train_pretrain.load_config(arguments).run_folder


def final_weights(arguments: list[str]) -> dict[str, torch.Tensor]:
    """Float32 parameters of the newest resume state."""
    return load_file(find_checkpoints(run_folder(arguments) / "resume")[-1][1] / "model.safetensors")


def best_weights(arguments: list[str]) -> dict[str, torch.Tensor]:
    folder = run_folder(arguments)
    return read_weights(folder / f"{folder.name}_best.pth")[0]


def final_state(arguments: list[str]) -> dict[str, Any]:
    return json.loads((find_checkpoints(run_folder(arguments) / "resume")[-1][1] / "state.json").read_text())


def logged(arguments: list[str], key: str = "loss") -> dict[int, float]:
    """step -> value of every metrics line that has `key`."""
    records = read_metrics(run_folder(arguments) / "metrics.jsonl")
    return {record["step"]: record[key] for record in records if key in record}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def replaced(arguments: list[str], **changes: object) -> list[str]:
    """The arguments with some values changed or added."""
    pairs = dict(zip(arguments[::2], arguments[1::2], strict=True))
    pairs |= {f"--{name}": str(value) for name, value in changes.items()}
    return [word for pair in pairs.items() for word in pair]


def without(arguments: list[str], *names: str) -> list[str]:
    """The arguments less some flags and their values."""
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    return [word for pair in pairs if pair[0].lstrip("-") not in names for word in pair]
