"""Threads from affinity, cgroup quota and ranks; how OpenMP waits; all told apart from what the user has set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runs import ROOT
from training.cgroup import cpu_quota, memory_limit
from training.cpu import WAITING, choose_threads, set_waiting_policy

V1 = "4:memory:/pod/box\n2:cpu,cpuacct:/pod/box\n0::/\n"
V2 = "0::/pod/box\n"


@pytest.fixture
def system(tmp_path):
    """A root with /proc and /sys of a machine of four cores with two hardware threads each, and files as asked for."""

    def make(groups: str = "0::/\n", **files: str) -> Path:
        for cpu in range(8):
            write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
        write("proc/self/cgroup", groups)
        for path, text in files.items():
            write(f"sys/fs/cgroup/{path}", text)
        return tmp_path

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    return make


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)


# --- the quota ---

QUOTAS = {
    "none": (V2, {"cpu.max": "max 100000\n"}, None),
    "of the box": (V2, {"pod/box/cpu.max": "250000 100000\n", "pod/cpu.max": "max 100000\n"}, 2.5),
    "of the pod around it": (V2, {"pod/box/cpu.max": "400000 100000", "pod/cpu.max": "150000 100000"}, 1.5),
    "seen from inside": ("0::/\n", {"cpu.max": "50000 100000"}, 0.5),
    "a path outside what is seen": ("0::/../../box\n", {"cpu.max": "300000 100000"}, 3.0),
    "version 1": (
        V1,
        {"cpu,cpuacct/pod/box/cpu.cfs_quota_us": "-1", "cpu,cpuacct/pod/box/cpu.cfs_period_us": "100000",
         "cpu,cpuacct/pod/cpu.cfs_quota_us": "200000", "cpu,cpuacct/pod/cpu.cfs_period_us": "50000"},
        4.0,
    ),
    "version 1, the host's path": (V1, {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.0),
    "both versions at once": ("1:cpu:/a\n0::/b\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000",
                                                   "unified/b/cpu.max": "200000 100000"}, 2.0),
    "files that make no sense": (V2, {"pod/box/cpu.max": "many", "pod/cpu.max": "1 0", "cpu.max": ""}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", QUOTAS)
def test_the_least_cpu_quota_along_the_path_counts(case, system):
    groups, files, expected = QUOTAS[case]
    assert cpu_quota(system(groups, **files)) == expected


def test_the_least_memory_limit_along_the_path_counts(system):
    assert memory_limit(system(V2, **{"pod/box/memory.max": "max", "pod/memory.max": "7000"})) == 7000
    assert memory_limit(system(V1, **{"memory/pod/box/memory.limit_in_bytes": "500"})) == 500


def test_without_cgroups_there_is_no_limit(tmp_path):
    assert cpu_quota(tmp_path) is None and memory_limit(tmp_path) == float("inf")


# --- threads ---


def told(system: Path, asked: int = 0, saved: int = 0, **environ: str) -> str:
    threads = choose_threads(asked, saved, 99, environ, system)
    assert threads.count >= 1
    return threads.line(environ)


def test_threads_are_the_physical_cores(system):
    assert told(system()) == "Threads: 4 of 4 cores"


def test_affinity_and_quota_and_ranks_lessen_the_threads(system, monkeypatch):
    root = system("0::/\n", **{"cpu.max": "250000 100000"})
    assert told(root) == "Threads: 2 of 4 cores (cgroup quota 2.5)"
    assert told(root, LOCAL_WORLD_SIZE="2") == "Threads: 1 of 4 cores (cgroup quota 2.5, shared by 2 ranks)"
    assert told(root, LOCAL_WORLD_SIZE="16").startswith("Threads: 1 of 4 cores")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5})
    assert told(root) == "Threads: 1 of 4 cores (affinity to 1, cgroup quota 2.5)"


def test_a_quota_below_one_cpu_leaves_one_thread(system):
    assert told(system("0::/\n", **{"cpu.max": "20000 100000"})) == "Threads: 1 of 4 cores (cgroup quota 0.2)"


def test_without_topology_each_cpu_is_a_core(tmp_path):
    assert told(tmp_path) == "Threads: 8 of 8 cores"


def test_what_was_asked_for_then_saved_then_omp_num_threads_wins(system):
    root = system()
    assert told(root, 3, 2, OMP_NUM_THREADS="5") == "Threads: 3 as --threads says"
    assert told(root, 0, 2) == "Threads: 2 as in the saved run; this start alone would take 4 of 4 cores"
    assert told(root, 0, 4) == "Threads: 4 as in the saved run"
    assert told(root, OMP_NUM_THREADS="5") == "Threads: 5 as OMP_NUM_THREADS says"
    assert told(root, OMP_NUM_THREADS="6,2") == "Threads: 6 as OMP_NUM_THREADS says"
    assert told(root, OMP_NUM_THREADS="many") == told(root, OMP_NUM_THREADS="0") == "Threads: 4 of 4 cores"


def test_the_1_that_torchrun_sets_is_nobody_s_wish(system):
    root, torchrun = system(), {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}
    assert told(root, OMP_NUM_THREADS="1", **torchrun) == "Threads: 2 of 4 cores (shared by 2 ranks)"
    assert told(root, OMP_NUM_THREADS="3", **torchrun) == "Threads: 3 as OMP_NUM_THREADS says"
    assert (
        told(root, OMP_NUM_THREADS="1", **torchrun | {"LOCAL_WORLD_SIZE": "1"}) == "Threads: 1 as OMP_NUM_THREADS says"
    )


def test_where_affinity_cannot_be_told_torch_chooses(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert told(tmp_path) == "Threads: 99 by torch's choice"


# --- waiting ---


def test_openmp_is_told_to_wait_passively_unless_the_user_said_how():
    environ: dict[str, str] = {}
    set_waiting_policy(environ)
    assert environ == WAITING
    for name in WAITING:
        environ = {name: "7"}
        set_waiting_policy(environ)
        assert environ == {name: "7"}


def test_the_start_page_says_how_openmp_waits(system):
    for policy, end in (("passive", "cores, OpenMP waits passively"), ("ACTIVE", "actively"), ("x", "4 of 4 cores")):
        assert told(system(), OMP_WAIT_POLICY=policy).endswith(end)


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "active"}])
def test_the_program_sets_the_policy_before_torch_loads(own):
    script = (
        "import os, sys, runpy\n"
        "class Spy:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': sys.exit(' '.join(map(str, map(os.environ.get, names))))\n"
        "names = ['OMP_WAIT_POLICY', 'GOMP_SPINCOUNT']\n"
        "sys.meta_path.insert(0, Spy()); sys.argv[1:] = []\n"
        "runpy.run_path('train_pretrain.py', run_name='__main__')"
    )
    clean = {name: value for name, value in os.environ.items() if name not in WAITING}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=clean | own)
    assert done.stderr == ("active None\n" if own else "passive 0\n")
