"""What the container or service around this process allows it, by Linux control groups of version 1 or 2."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath

SYSTEM = Path("/")  # where /proc and /sys are


def cpu_quota(system: Path = SYSTEM) -> float | None:
    """CPUs that may be used on average: the least along the cgroup's path; None without a limit."""
    found = []
    for folder in cgroup_folders("cpu", system):
        quota, period = (read(folder / "cpu.max") or "").partition(" ")[::2]
        if not quota:
            quota, period = read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1 are no limit
            found.append(int(quota) / int(period))
    return min(found, default=None)


def memory_limit(system: Path = SYSTEM) -> float:
    """Bytes of memory that may be held: the least along the cgroup's path; infinite without a limit."""
    texts = [
        read(folder / name)
        for folder in cgroup_folders("memory", system)
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    return min((int(text) for text in texts if text.isdecimal()), default=math.inf)


def cgroup_folders(controller: str, system: Path = SYSTEM) -> list[Path]:
    """The folders of this process's cgroup and of those around it, where `controller` keeps its files."""
    mount, found = system / "sys/fs/cgroup", []
    for line in read(system / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        roots = [mount / controller, mount / names] if names else [mount, mount / "unified"]
        # In a container the path may be the host's, of which only the root is seen; then folders are missing.
        inside = PurePosixPath("/") if ".." in path.split("/") else PurePosixPath(path)
        found += [root / part.relative_to("/") for root in roots for part in (inside, *inside.parents)]
    return [folder for folder in found if folder.is_dir()]


def read(path: Path) -> str:
    """What the file says, without white space around it; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
