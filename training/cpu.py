"""The share of this machine's cores that a rank computes on, and how OpenMP's threads wait for each other.

Imports no torch: the waiting policy only counts if it is set before torch loads OpenMP.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from training.cgroup import SYSTEM, cpu_quota, read

WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


def set_waiting_policy(environ: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads sleep while they wait, instead of spinning: on a busy machine those that spin take the core
    from those that are waited for. For the program's start, before torch is imported; what the user has set stays."""
    if not any(name in environ for name in WAITING):
        environ.update(WAITING)


@dataclass(frozen=True)
class Threads:
    """How many CPU threads a rank takes, and why."""

    count: int
    reason: str

    def line(self, environ: Mapping[str, str] = os.environ) -> str:
        """For the start page."""
        policy = environ.get("OMP_WAIT_POLICY", "").lower()
        waiting = {"passive": ", OpenMP waits passively", "active": ", OpenMP waits actively"}.get(policy, "")
        return f"Threads: {self.count} {self.reason}{waiting}"


def choose_threads(
    asked: int, saved: int, offered: int, environ: Mapping[str, str] = os.environ, system: Path = SYSTEM
) -> Threads:
    """The number of threads for this rank. `asked` is --threads, `saved` the count of the run that is resumed (its bits
    depend on it); 0 for neither. Then the user's OMP_NUM_THREADS counts, then this rank's share of the cores. Where
    these cannot be told (macOS, Windows) it is `offered`, what torch would take."""
    if asked:
        return Threads(asked, "as --threads says")
    share = share_of_cores(offered, environ, system)
    if saved:
        other = "" if share.count == saved else f"; this start alone would take {share.count} {share.reason}"
        return Threads(saved, f"as in the saved run{other}")
    return share


def share_of_cores(offered: int, environ: Mapping[str, str], system: Path = SYSTEM) -> Threads:
    """What this start would take if nothing else were said."""
    if told := user_omp_threads(environ):
        return Threads(told, "as OMP_NUM_THREADS says")
    if not hasattr(os, "sched_getaffinity"):
        return Threads(offered, "by torch's choice")
    usable, all_cores = (
        physical_cores(os.sched_getaffinity(0), system),
        physical_cores(range(os.cpu_count() or 1), system),
    )
    quota, ranks = cpu_quota(system), ranks_here(environ)
    cores = usable if quota is None else min(usable, int(quota))
    limits = [
        *([f"affinity to {usable}"] if usable < all_cores else []),
        *([f"cgroup quota {quota:.1f}"] if quota is not None else []),
        *([f"shared by {ranks} ranks"] if ranks > 1 else []),
    ]
    reason = f"of {all_cores} core{'s' if all_cores > 1 else ''}"
    return Threads(max(1, cores // ranks), f"{reason} ({', '.join(limits)})" if limits else reason)


def ranks_here(environ: Mapping[str, str]) -> int:
    """Ranks that the launcher started on this machine; 1 where it does not say."""
    told = environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdecimal() else 1


def user_omp_threads(environ: Mapping[str, str]) -> int:
    """The user's OMP_NUM_THREADS, 0 if there is none. Torchrun sets 1 itself where it starts several workers: from 1
    one cannot tell whose it is, so that there --threads 1 is the way to ask for it."""
    told = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list is by level of nesting
    count = int(told) if told.isdecimal() else 0
    by_torchrun = "TORCHELASTIC_RUN_ID" in environ and ranks_here(environ) > 1
    return 0 if by_torchrun and count == 1 else count


def physical_cores(cpus: range | set[int], system: Path = SYSTEM) -> int:
    """Physical cores behind these logical ones: two threads of one core share its arithmetic units."""
    siblings = set()
    for cpu in cpus:
        folder = system / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings.add(read(folder / "thread_siblings_list") or f"{cpu}")
    return len(siblings)
