"""Commands as one types them: what goes on with a run, what writes text with it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from training.config import OPTIONS, ROOT, Config
from training.launcher import is_torchrun_worker


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
    words = launcher_words() if is_torchrun_worker() else [program("python")]
    words.append(shown(ROOT / "train_pretrain.py"))
    for name in ("config", "save_dir", "save_weight", "hidden_size", "use_moe"):
        value = getattr(config, name)
        if value != OPTIONS[name].default and (config.save_state or name != "save_weight"):
            words += [f"--{name}", str(value)]
    if not config.save_state:  # no state to resume: its weights can begin another run
        return shlex.join([*words, "--from_weight", config.save_weight, "--save_weight", "NEW"])
    return shlex.join([*words, "--from_resume", "1"])


def launcher_words() -> list[str]:
    """torchrun as it started this worker, as far as the worker is told: ranks, and nodes with where they meet."""
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    words = [program("torchrun"), "--nproc_per_node", os.environ.get("LOCAL_WORLD_SIZE", "1")]
    if nodes == "1":
        return words
    address = f"{os.environ.get('MASTER_ADDR', 'HOST')}:29400"
    return [*words, "--nnodes", nodes, "--rdzv_backend", "c10d", "--rdzv_endpoint", address]


def generate_command(config: Config) -> str:
    """The command line that writes text with a run's model."""
    return shlex.join([program("python"), shown(ROOT / "scripts" / "generate.py"), "--load", shown(config.run_folder)])
