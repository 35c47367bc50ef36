"""The receipt of a run, run.json: what ran, on what, from which data, with which saves."""

import importlib.metadata
import json
import os
import platform
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch

from storage.files import write_json_atomic


class Receipt:
    """The file run.json. Main process only.

    `status` is running, finished, stopped, failed or invalid. A change replaces the file as a whole; raises SaveFailed.
    """

    STATUSES = ("running", "finished", "stopped", "failed", "invalid")

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._lock = threading.RLock()  # saves are noted by the checkpoint writer's thread
        self.data: dict[str, Any] = {}
        if self.path.exists():
            try:
                self.data = dict(json.loads(self.path.read_bytes()))
            except (OSError, ValueError, TypeError):
                self.data = {"notes": ["an unreadable run.json was replaced"]}

    def update(self, **fields: Any) -> None:
        assert fields.get("status", "running") in self.STATUSES, f"unknown status {fields['status']!r}"
        with self._lock:
            self.data.update(fields, updated=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
            write_json_atomic(self.path, self.data)

    def add_start(self, step: int, **facts: Any) -> None:
        """Note a start of the program that goes on from `step`, for whoever wants to do it again: settings (`config`),
        choices, environment. One that repeats the last one's is not noted; those of later steps belong to a branch that
        was left and go."""
        start = {"step": step, **facts}
        with self._lock:
            starts = [old for old in self.data.get("starts", []) if old["step"] < step]
            if not starts or {**starts[-1], "step": step} != start or facts["config"]["resume_reset"] != "none":
                starts.append(start)
            self.update(starts=starts)

    def add_save(self, step: int, weights_digest: str, folder: str | os.PathLike[str]) -> None:
        """Note a save; those of the same or later steps belong to a branch that was left and go."""
        with self._lock:
            saves = [save for save in self.data.get("saves", []) if save["step"] < step]
            self.update(saves=[*saves, {"step": step, "weights_digest": weights_digest, "folder": os.fspath(folder)}])


def environment_facts(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions, platform, processor and its matrix instructions, threads; GPUs if `device` is one. Imports nothing."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "numpy", "transformers", "tokenizers", "safetensors", "swanlab"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    facts: dict[str, Any] = {"versions": versions, "platform": platform.platform(), "device": str(device)}
    facts["cpu"], facts["cpu_flags"] = _processor()
    facts |= {"cpu_count": os.cpu_count(), "threads": torch.get_num_threads(), "cuda": torch.version.cuda}
    if torch.device(device).type == "cuda":
        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return facts


def _processor() -> tuple[str, list[str]]:
    """Name of the processor and those of its flags that matter to speed and rounding."""
    relevant = {"avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve", "i8mm"}
    try:
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    except OSError:  # no Linux
        return platform.processor() or platform.machine(), []
    values = {key.strip().lower(): value.strip() for key, _, value in reversed(lines)}
    flags = relevant & set((values.get("flags") or values.get("features") or "").split())
    return values.get("model name") or platform.machine(), sorted(flags)


def git_state(root: str | os.PathLike[str]) -> dict[str, Any] | None:
    """{"commit", "dirty"} of the working tree (tracked files); None without git or repository, or after 2 s."""

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", os.fspath(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=2, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None
