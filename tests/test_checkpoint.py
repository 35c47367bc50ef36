"""Checkpoints: whole or not there, strict when restored, plain words when something is wrong."""

import errno
import io
import json
import math
import os
import pickle
import random
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from errors import CheckpointError, SaveFailed
from storage import files
from training.saving import checkpoint, live_state, saver, weights

ROOT = Path(__file__).parent.parent
FILES = ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "manifest.json"]


class Tied(nn.Module):
    """Embedding, matrix, norm and a tied head: what a language model's parameters look like, in small."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):  # [batch, seq] -> [batch, seq, 11]
        hidden = self.embed(ids)
        return self.head(self.norm(hidden + self.down(torch.relu(self.up(hidden)))))


def train(model, optimizers, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, 11, (4, 6), generator=generator)
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def adamw(model, **options):
    return [torch.optim.AdamW(model.parameters(), lr=1e-2, **options)]


def muon_and_adamw(model):
    matrices = [model.up.weight, model.down.weight]
    others = [model.embed.weight, model.norm.weight]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


def save(folder: Path, step: int, value: float = 0.0, **state) -> Path:
    tensors = {
        "model": {"a": torch.full((5, 3), float(step) + value), "b": torch.arange(4)},
        "optimizer": {"a/exp_avg": torch.full((300,), float(step))},
        "rng": {"rank0/torch": torch.zeros(16, dtype=torch.uint8)},
    }
    return checkpoint.write_checkpoint(folder, step, tensors, {"step": step, **state})


def flip_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


# --- files ---
def test_our_safetensors_files_are_read_by_the_safetensors_library_for_every_dtype_and_shape(tmp_path):
    tensors = {
        "f64": torch.randn(3, 2, dtype=torch.float64),
        "f32": torch.randn(5),
        "f16": torch.randn(3).half(),
        "bf16": torch.randn(1, 3).bfloat16(),
        "i64": torch.tensor([-1, 2**62]),
        "i32": torch.tensor([[7]], dtype=torch.int32),
        "u8": torch.arange(7, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "非": torch.ones(2),
    }
    entry = files.write_tensors(tmp_path / "x.safetensors", tensors)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
    again = dict(reversed(tensors.items()))
    assert files.write_tensors(tmp_path / "y.safetensors", again) == entry


def test_a_checkpoint_comes_back_bit_equal_with_its_state(tmp_path):
    best = float(np.nextafter(1.1, 2))
    save(tmp_path, 7, best=best, worst=float("inf"), path=Path("x"))
    found = checkpoint.load_newest(tmp_path)
    assert found is not None and (found.step, found.folder.name, found.damaged) == (7, "step_00000007", [])
    assert found.state == {"step": 7, "best": best, "worst": float("inf"), "path": "x"}
    assert torch.equal(found.load("model")["a"], torch.full((5, 3), 7.0))
    with pytest.raises(CheckpointError, match="nothing"):
        found.load("nothing")


def test_the_resume_folder_holds_no_pickle_and_obeys_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        folder = save(tmp_path / "resume", 1)
    finally:
        os.umask(old)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o640, path
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            load_file(path)


def test_no_folder_and_leftovers_alone_are_no_saves(tmp_path):
    assert checkpoint.load_newest(tmp_path / "absent") is None
    (tmp_path / ".tmp-step_00000003-99").mkdir()
    (tmp_path / ".del-step_00000002-99").mkdir()
    (tmp_path / ".run.json.tmp-99").write_text("{")
    (tmp_path / "notes").mkdir()
    assert checkpoint.load_newest(tmp_path) is None
    checkpoint.clean_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


# --- damage ---
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_wherever_it_is_and_the_save_before_is_taken(tmp_path, name):
    save(tmp_path, 10)
    whole = save(tmp_path, 20)
    path = whole / name
    original = path.read_bytes()
    for position in {0, len(original) // 3, len(original) // 2, len(original) - 2}:
        flip_bit(path, position)
        found = checkpoint.load_newest(tmp_path)
        assert found is not None and found.step == 10, f"byte {position}"
        assert len(found.damaged) == 1 and "step_00000020" in found.damaged[0] and name in found.damaged[0]
        path.write_bytes(original)
    newest = checkpoint.load_newest(tmp_path)
    assert newest is not None and newest.step == 20


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["truncated", "empty", "missing", "longer"])
def test_harm_to_any_file_is_named_and_no_good_save_left_is_an_error_naming_each(tmp_path, name, harm):
    for step in (1, 2):
        path = save(tmp_path, step) / name
        data = path.read_bytes()
        if harm == "missing":
            path.unlink()
        else:
            path.write_bytes({"truncated": data[:-3], "empty": b"", "longer": data + b"x"}[harm])
    with pytest.raises(CheckpointError) as error:
        checkpoint.load_newest(tmp_path)
    assert f"step_00000001/{name}" in str(error.value).replace(" has no manifest.json", "/manifest.json")
    assert f"step_00000002/{name}" in str(error.value).replace(" has no manifest.json", "/manifest.json")


def test_a_renamed_save_or_one_of_another_format_is_not_trusted(tmp_path):
    save(tmp_path, 5).rename(tmp_path / "step_00000006")
    assert "holds step 5" in checkpoint.verify_checkpoint(tmp_path / "step_00000006")[0]
    manifest = {"format_version": 99, "step": 7, "files": {}}
    (tmp_path / "step_00000007").mkdir()
    manifest["manifest_sha256"] = checkpoint._manifest_digest(manifest)
    (tmp_path / "step_00000007" / "manifest.json").write_text(json.dumps(manifest))
    assert "format version 99" in checkpoint.verify_checkpoint(tmp_path / "step_00000007")[0]


def test_damaged_saves_set_aside_are_neither_counted_by_prune_nor_forgotten(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    flip_bit(tmp_path / "step_00000003" / "model.safetensors", 200)
    found = checkpoint.load_newest(tmp_path)
    assert found is not None and found.step == 2
    assert [path.name for path in found.set_damaged_aside()] == ["damaged-step_00000003"]
    checkpoint.prune(tmp_path, 1)
    assert [step for step, _ in checkpoint.find_checkpoints(tmp_path)] == [2]
    (tmp_path / "step_00000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="damaged-step_00000003"):
        checkpoint.load_newest(tmp_path)


# --- replacing, pruning, crashes ---
def test_a_second_save_of_the_same_step_replaces_the_first(tmp_path):
    save(tmp_path, 4, note="first")
    save(tmp_path, 4, note="second")
    found = checkpoint.load_newest(tmp_path)
    assert found is not None and found.state["note"] == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


@pytest.mark.parametrize("killed_at", [1, 2])
def test_a_crash_between_the_renames_of_a_replacement_leaves_a_save_of_that_step(tmp_path, monkeypatch, killed_at):
    save(tmp_path, 4, note="first")
    renames, calls = os.rename, []

    def rename(source, target):
        calls.append(source)
        if len(calls) > killed_at:
            raise KeyboardInterrupt  # no clean-up runs for it, as after kill -9
        renames(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        patch.setattr(checkpoint, "remove_quietly", lambda path: None)
        if killed_at == 1:
            with pytest.raises(KeyboardInterrupt):
                save(tmp_path, 4, note="second")
        else:
            save(tmp_path, 4, note="second")
    expected = {1: "first", 2: "second"}[killed_at]
    for _ in range(2):  # before and after the leftovers are cleaned
        found = checkpoint.load_newest(tmp_path)
        assert found is not None and (found.step, found.state["note"]) == (4, expected)
        checkpoint.clean_leftovers(tmp_path)
        assert found.load("model")["b"].tolist() == [0, 1, 2, 3]  # under its name from before the clean-up
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


def test_prune_keeps_the_newest_and_the_named_ones(tmp_path):
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, 2, also_keep={20})
    assert [step for step, _ in checkpoint.find_checkpoints(tmp_path)] == [20, 40, 50]
    assert len(list(tmp_path.iterdir())) == 3


KILLED_WRITER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from training.saving import checkpoint
from storage import files
from training.saving import live_state
from training.saving import saver
from training.saving import weights
folder, rounds = Path(sys.argv[1]), int(sys.argv[2])

def write_for_ever(first, report):
    for step in range(first, 10_000_000):
        value = float(step)
        tensors = {"model": {"w": torch.full((200_000,), value)}, "optimizer": {"w/m": torch.full((50_000,), value)}}
        for repeat in range(2):  # the second replaces the first
            checkpoint.write_checkpoint(folder, step, tensors, {"step": step})
        checkpoint.prune(folder, 1, {step})
        os.write(report, f"{step}\\n".encode())

chance = random.Random(5)
reported = 0
for number in range(rounds):
    out, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        write_for_ever(reported + 1, report)
    os.close(report)
    with os.fdopen(out) as lines:
        if number % 5 == 4:  # on a busy machine too some rounds must get as far as a whole save
            reported = int(lines.readline())
        time.sleep(chance.uniform(0.002, 0.12))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reported = max([reported, *map(int, lines)])
    found = checkpoint.load_newest(folder)
    step = found.step if found else 0
    assert step >= reported, (step, reported)
    if found:
        assert found.damaged == [] and found.state["step"] == step
        assert bool((found.load("model")["w"] == step).all()) and bool((found.load("optimizer")["w/m"] == step).all())
    if number % 3 == 0:
        checkpoint.clean_leftovers(folder)
        again = checkpoint.load_newest(folder)
        assert (again.step if again else 0) == step
print("survived", rounds, "kills, last step", reported)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_writer_killed_at_random_instants_always_leaves_its_newest_save_whole(tmp_path):
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", KILLED_WRITER, str(tmp_path / "resume"), "25"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "survived 25 kills" in result.stdout and not result.stdout.rstrip().endswith("step 0")


# --- failing to save ---
FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from errors import SaveFailed
from training.saving import checkpoint
from storage import files
from training.saving import live_state
from training.saving import saver
from training.saving import weights
folder = Path(sys.argv[1])
small = {"model": {"w": torch.ones(100)}}
large = {"model": {"w": torch.ones(1_000_000)}}
checkpoint.write_checkpoint(folder / "resume", 1, small, {})
weights.write_weights(folder / "w.pth", small["model"], {"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # Python ignores SIGXFSZ: write raises EFBIG
for what in (lambda: checkpoint.write_checkpoint(folder / "resume", 1, large, {}),
             lambda: checkpoint.write_checkpoint(folder / "resume", 2, large, {}),
             lambda: weights.write_weights(folder / "w.pth", large["model"], {"step": 2}),
             lambda: files.write_file_atomic(folder / "w.json", "x" * (2 << 20))):
    try:
        what()
    except SaveFailed as error:
        print(error)
    else:
        sys.exit("no failure")
"""


def test_a_write_that_the_system_refuses_leaves_everything_saved_before_and_says_so_plainly(tmp_path):
    pytest.importorskip("resource", reason="needs RLIMIT_FSIZE")
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 4 and result.stdout.count("File too large") == 4
    assert "Traceback" not in result.stderr
    found = checkpoint.load_newest(tmp_path / "resume")
    assert found is not None and found.step == 1 and found.load("model")["w"].shape == (100,)
    loaded, card = weights.read_weights(tmp_path / "w.pth")
    assert loaded["w"].shape == (100,) and card is not None and card["step"] == 1
    assert not [path.name for path in tmp_path.rglob(".*")]


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_full_disk_at_any_stage_is_a_save_that_failed_with_the_last_good_one_intact(tmp_path, monkeypatch, call):
    save(tmp_path, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if call == "write":
            patch.setattr(files.HashedFile, "write", full)
        else:
            patch.setattr(os, call, full)
        for step in (1, 2):
            with pytest.raises(SaveFailed, match=f"step {step}.*No space left on device.*earlier saves are untouched"):
                save(tmp_path, step)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert checkpoint.verify_checkpoint(tmp_path / "step_00000001") == []


def test_a_file_where_the_folder_should_be_is_a_save_that_failed(tmp_path):
    (tmp_path / "resume").write_text("")
    with pytest.raises(SaveFailed, match="step 3"):
        save(tmp_path / "resume", 3)
    with pytest.raises(SaveFailed):
        files.write_file_atomic(tmp_path / "resume" / "x.json", "{}")


# --- parameters and optimizers ---
@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda model: adamw(model, fused=True),
        lambda model: adamw(model, foreach=True),
        muon_and_adamw,
    ],
    ids=["loop", "fused", "foreach", "muon+adamw"],
)
def test_training_goes_on_bit_equal_after_parameters_and_optimizer_are_restored(tmp_path, make):
    torch.manual_seed(0)
    model = Tied()
    optimizers = make(model)
    train(model, optimizers, 3)
    tensors = {
        "model": live_state.flatten_parameters(model),
        "optimizer": live_state.flatten_optimizer(optimizers, model),
    }
    checkpoint.write_checkpoint(tmp_path, 3, tensors, {})
    train(model, optimizers, 3, seed=2)

    torch.manual_seed(99)
    fresh = Tied()
    fresh_optimizers = make(fresh)
    found = checkpoint.load_newest(tmp_path)
    assert found is not None
    live_state.restore_parameters(fresh, found.load("model"))
    live_state.restore_optimizer(fresh_optimizers, fresh, found.load("optimizer"))
    assert fresh.head.weight is fresh.embed.weight
    train(fresh, fresh_optimizers, 3, seed=2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(fresh.named_parameters())[name]), name
    expected, got = (
        live_state.flatten_optimizer(optimizers, model),
        live_state.flatten_optimizer(fresh_optimizers, fresh),
    )
    assert expected.keys() == got.keys() and all(torch.equal(expected[key], got[key]) for key in expected)


def test_a_tied_head_is_stored_once():
    assert set(live_state.flatten_parameters(Tied())) == {"embed.weight", "up.weight", "down.weight", "norm.weight"}


def test_the_restored_optimizer_keeps_the_hyperparameters_it_was_built_with():
    model = Tied()
    old = adamw(model, weight_decay=0.3)
    train(model, old, 1)
    new = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.01, fused=True)
    live_state.restore_optimizer([new], model, live_state.flatten_optimizer(old, model))
    assert (new.param_groups[0]["lr"], new.param_groups[0]["weight_decay"]) == (0.5, 0.01)
    train(model, [new], 1)
    assert new.state[model.up.weight]["step"].item() == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"up.weight/exp_avg": torch.zeros(3, 3)}), r"up.weight/exp_avg is torch.float32 \[3, 3\]"),
        (
            lambda t: t.update({"up.weight/exp_avg": t["up.weight/exp_avg"].half()}),
            r"up.weight/exp_avg is torch.float16",
        ),
        (lambda t: t.pop("down.weight/exp_avg_sq"), "down.weight/exp_avg_sq is missing"),
        (lambda t: t.update({"down.weight/momentum_buffer": torch.zeros(8, 16)}), "momentum_buffer is not known"),
        (lambda t: t.update({"other.weight/step": torch.tensor(1.0)}), "other.weight is not a parameter"),
        (lambda t: t.update({"up.weight/step": torch.ones(2)}), "up.weight/step"),
    ],
)
def test_an_optimizer_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(change, message):
    model = Tied()
    optimizers = adamw(model)
    train(model, optimizers, 1)
    tensors = {key: value.clone() for key, value in live_state.flatten_optimizer(optimizers, model).items()}
    change(tensors)
    fresh = adamw(model)
    with pytest.raises(CheckpointError, match=message):
        live_state.restore_optimizer(fresh, model, tensors)
    assert not fresh[0].state


def test_the_state_of_another_optimizer_is_refused_and_an_empty_one_is_the_state_before_step_1():
    model = Tied()
    mixed = muon_and_adamw(model)
    assert live_state.flatten_optimizer(mixed, model) == {}
    live_state.restore_optimizer(mixed, model, {})
    train(model, mixed, 1)
    with pytest.raises(CheckpointError, match=r"down\.weight/momentum_buffer is not known"):
        live_state.restore_optimizer(adamw(model), model, live_state.flatten_optimizer(mixed, model))


def test_an_optimizer_all_of_whose_updates_were_skipped_is_restored_as_it_was():
    """Fused AdamW makes its state all the same; Muon, which decides on the host, does not."""
    model = Tied()
    muon, adam = muon_and_adamw(model)
    train(model, [adam], 1)
    saved = live_state.flatten_optimizer([muon, adam], model)
    fresh = muon_and_adamw(model)
    live_state.restore_optimizer(fresh, model, saved)
    assert not fresh[0].state and len(fresh[1].state) == 2


def test_parameters_of_another_architecture_are_refused_by_name_and_change_nothing():
    model, before = Tied(8), live_state.flatten_parameters(Tied(12))
    kept = model.up.weight.clone()
    with pytest.raises(CheckpointError, match=r"another architecture:(.|\n)*up.weight has shape \[24, 12\].*\[16, 8\]"):
        live_state.restore_parameters(model, before)
    tensors = dict(live_state.flatten_parameters(Tied(8)), extra=torch.zeros(1))
    del tensors["norm.weight"]
    with pytest.raises(CheckpointError, match=r"extra is not known(.|\n)*norm.weight is missing"):
        live_state.restore_parameters(model, tensors)
    halves = {name: value.half() for name, value in live_state.flatten_parameters(Tied(8)).items()}
    with pytest.raises(CheckpointError, match=r"float16, this model holds torch\.float32"):
        live_state.restore_parameters(model, halves)
    assert torch.equal(model.up.weight, kept)


def test_names_are_the_same_plain_compiled_or_inside_ddp(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain = Tied()
        names = list(live_state.flatten_parameters(plain))
        plain.up.compile()  # in place, as the trainer compiles its blocks
        for wrapped in (plain, nn.parallel.DistributedDataParallel(plain)):
            assert live_state.unwrap(wrapped) is plain
            assert list(live_state.flatten_parameters(wrapped)) == names
            live_state.restore_parameters(wrapped, live_state.flatten_parameters(Tied()))
    finally:
        torch.distributed.destroy_process_group()


# --- random numbers ---
def draw() -> list:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()]


@pytest.mark.parametrize("odd", [False, True], ids=["no half-used pair", "a normal number waiting in each"])
def test_every_host_generator_goes_on_as_if_nothing_had_happened(tmp_path, odd):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    if odd:  # both draw normal numbers in pairs and keep the second
        random.gauss(0, 1)
        np.random.randn()
    state = live_state.capture_rng("cpu")
    expected = [draw() for _ in range(3)]
    files.write_tensors(tmp_path / "rng.safetensors", state)
    assert live_state.restore_rng(load_file(tmp_path / "rng.safetensors"), "cpu") == []
    assert [draw() for _ in range(3)] == expected


def test_the_device_generator_that_cannot_be_carried_over_is_named():
    state = live_state.capture_rng("cpu")
    assert live_state.restore_rng({**state, "cuda": torch.zeros(16, dtype=torch.uint8)}, "cpu") == ["cuda"]
    del state["numpy"]
    with pytest.raises(CheckpointError, match="no numpy"):
        live_state.restore_rng(state, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_cuda_generator_and_snapshots_from_cuda_are_exact():
    state = live_state.capture_rng("cuda")
    expected = torch.rand(5, device="cuda")
    live_state.restore_rng(state, "cuda")
    assert torch.equal(torch.rand(5, device="cuda"), expected)
    copy = saver.BackgroundWriter().snapshot({"x": {"y": expected}})["x"]["y"]
    assert copy.is_pinned() and torch.equal(copy, expected.cpu())


# --- loaded ---
def test_weights_are_half_precision_with_every_name_the_tied_head_included_and_a_card(tmp_path):
    model = Tied()
    path = tmp_path / "pretrain_8.pth"
    digest = weights.write_weights(path, torch.compile(model).state_dict(), {"tokenizer": "abc"})
    loaded, card = weights.read_weights(path)
    assert card == {"tokenizer": "abc", "sha256": digest}
    assert loaded.keys() == model.state_dict().keys() and "head.weight" in loaded
    assert all(torch.equal(loaded[name], value.half()) for name, value in model.state_dict().items())
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    assert torch.load(path, weights_only=True).keys() == loaded.keys()
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_view_of_a_large_tensor_makes_a_small_file(tmp_path):
    large = torch.randn(1000, 1000)
    weights.write_weights(tmp_path / "w.pth", {"row": large[3], "column": large[:, 3]}, {})
    assert (tmp_path / "w.pth").stat().st_size < 10_000
    assert torch.equal(weights.read_weights(tmp_path / "w.pth")[0]["column"], large[:, 3].half())


def test_finite_means_no_nan_and_no_infinity_in_tensors_of_any_kind():
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for value in (math.nan, math.inf, -math.inf):
            tensor = torch.zeros(5, 7, dtype=dtype)
            assert files.all_finite(tensor)
            tensor[3, 2] = value
            assert not files.all_finite(tensor)
    assert files.all_finite(torch.full((3,), torch.finfo(torch.float32).max))
    assert (
        files.all_finite(torch.zeros(0)) and files.all_finite(torch.tensor(2.0)) and files.all_finite(torch.arange(3))
    )


@pytest.mark.parametrize("value", [70000.0, float("nan"), float("-inf")])
def test_numbers_float16_cannot_hold_are_an_error_and_the_old_file_stays(tmp_path, value):
    weights.write_weights(tmp_path / "w.pth", {"a": torch.ones(3)}, {})
    with pytest.raises(CheckpointError, match=r"b holds .*float16"):
        weights.write_weights(tmp_path / "w.pth", {"a": torch.zeros(3), "b": torch.tensor([1.0, value])}, {})
    assert weights.read_weights(tmp_path / "w.pth")[0]["a"].tolist() == [1, 1, 1]


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def _legacy_pickle(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_that_would_run_code_is_refused_unread(tmp_path, legacy):
    trace, path = tmp_path / "trace", tmp_path / "w.pth"
    value = {"a": torch.ones(2), "evil": Evil(trace)}
    path.write_bytes(_legacy_pickle(value)) if legacy else torch.save(value, path)
    with pytest.raises(CheckpointError, match="more than tensors"):
        weights.read_weights(path)
    path.write_bytes(pickle.dumps(Evil(trace)))
    with pytest.raises(CheckpointError, match=r"w\.pth is refused"):
        weights.read_weights(path)
    assert not trace.exists()


def test_a_legacy_or_cardless_weights_file_is_read(tmp_path):
    torch.save({"module._orig_mod.a": torch.ones(2)}, tmp_path / "new.pth")
    (tmp_path / "old.pth").write_bytes(_legacy_pickle({"a": torch.ones(2)}))
    for name in ("new.pth", "old.pth"):
        loaded, card = weights.read_weights(tmp_path / name)
        assert list(loaded) == ["a"] and card is None


@pytest.mark.parametrize("card", [True, False], ids=["with card", "without card"])
@pytest.mark.parametrize("harm", ["truncated", "empty", "garbage", "bit"])
def test_damaged_weights_are_refused_in_words(tmp_path, harm, card):
    path = tmp_path / "w.pth"
    weights.write_weights(path, {"a": torch.arange(5000.0)}, {})
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "garbage": b"hello\n" * 99, "bit": data}[harm])
    if not card:
        path.with_suffix(".json").unlink()
    with pytest.raises(CheckpointError, match=r"w\.pth is (damaged|refused)"):
        weights.read_weights(path)


def test_missing_weights_other_contents_and_a_broken_card_are_refused_in_words(tmp_path):
    with pytest.raises(CheckpointError, match="there is no weights file"):
        weights.read_weights(tmp_path / "none.pth")
    torch.save({"model": {"a": torch.ones(1)}, "step": 3}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match="holds no state dict"):
        weights.read_weights(tmp_path / "other.pth")
    weights.write_weights(tmp_path / "w.pth", {"a": torch.ones(1)}, {})
    (tmp_path / "w.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"w\.json, the card of w\.pth, is damaged"):
        weights.read_weights(tmp_path / "w.pth")


@pytest.mark.parametrize("renames_done", range(4))
def test_a_crash_between_weights_and_card_leaves_weights_with_the_card_that_describes_them(
    tmp_path, monkeypatch, renames_done
):
    path = tmp_path / "w.pth"
    weights.write_weights(path, {"a": torch.ones(1)}, {"step": 1})
    replace, calls = os.replace, []

    def stop(source, target):
        calls.append(target)
        if len(calls) > renames_done:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop)
    if renames_done < 3:
        with pytest.raises(KeyboardInterrupt):
            weights.write_weights(path, {"a": torch.full((1,), 2.0)}, {"step": 2})
    else:
        weights.write_weights(path, {"a": torch.full((1,), 2.0)}, {"step": 2})
    loaded, card = weights.read_weights(path)
    assert card is not None and card["step"] == loaded["a"].item() == (2 if renames_done >= 2 else 1)
    assert "previous" not in card


# --- in background ---
def test_saves_run_beside_the_loop_one_at_a_time():
    running, order, gate = [], [], threading.Event()

    def slow(name):
        running.append(name)
        assert len(running) == 1
        gate.wait(5)
        running.remove(name)
        order.append(name)

    writer = saver.BackgroundWriter()
    writer.submit(lambda: slow("a"))
    assert not order  # it did not wait for the save
    threading.Timer(0.05, gate.set).start()
    writer.submit(lambda: slow("b"))
    assert order[0] == "a"
    writer.wait()
    assert order == ["a", "b"]


@pytest.mark.parametrize("surface", ["wait", "submit", "snapshot"])
def test_a_failure_in_the_background_surfaces_once_with_its_cause(surface):
    cause = ValueError("boom")

    def fail():
        raise cause

    writer = saver.BackgroundWriter()
    writer.submit(fail)
    actions = {
        "wait": writer.wait,
        "submit": lambda: writer.submit(lambda: None),
        "snapshot": lambda: writer.snapshot({}),
    }
    with pytest.raises(SaveFailed, match="boom") as error:
        actions[surface]()
    assert error.value.__cause__ is cause
    writer.wait()


def test_a_snapshot_is_a_copy_in_buffers_used_again_but_never_during_a_save(tmp_path):
    weight = torch.ones(4, 3).t()  # not contiguous
    writer = saver.BackgroundWriter()
    first = writer.snapshot({"model": {"w": weight}})
    weight.fill_(2)
    assert torch.equal(first["model"]["w"], torch.ones(3, 4)) and first["model"]["w"].is_contiguous()

    def slow_save():
        time.sleep(0.1)
        checkpoint.write_checkpoint(tmp_path, 1, first, {})

    writer.submit(slow_save)
    second = writer.snapshot({"model": {"w": weight}})
    assert second["model"]["w"].data_ptr() == first["model"]["w"].data_ptr()
    third = writer.snapshot({"model": {"w": torch.zeros(2)}})  # another shape: another buffer
    assert third["model"]["w"].shape == (2,)
    writer.wait()
    found = checkpoint.load_newest(tmp_path)
    assert found is not None and torch.equal(found.load("model")["w"], torch.ones(3, 4))


def test_the_interpreter_does_not_exit_before_a_save_in_flight_has_ended(tmp_path):
    code = (
        "import sys, time, torch\nfrom pathlib import Path\nfrom training.saving import checkpoint, saver\n"
        "w = saver.BackgroundWriter()\n"
        "def save():\n    time.sleep(0.3)\n"
        "    checkpoint.write_checkpoint(Path(sys.argv[1]), 1, {'model': {'a': torch.ones(3)}}, {})\n"
        "w.submit(save)\nsys.exit(3)\n"
    )
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, timeout=60)
    assert result.returncode == 3
    assert [step for step, _ in checkpoint.find_checkpoints(tmp_path)] == [1]
