"""Weights for use: half precision, described, whole or not there, and published under other names."""

import errno
import io
import json
import os
import pickle
import stat
from pathlib import Path

import pytest
import torch
from tied_model import Tied

from errors import CheckpointError, SaveFailed
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from storage import files
from training.saving import weights


def test_weights_are_half_precision_with_every_name_the_tied_head_included_and_a_description(tmp_path):
    model = Tied()
    path = tmp_path / "pretrain_8.pth"
    digest = weights.write_weights(path, torch.compile(model).state_dict(), {"tokenizer": "abc"})
    loaded, description = weights.read_weights(path)
    assert description == {"tokenizer": "abc", "sha256": digest}
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


def test_a_legacy_or_undescribed_weights_file_is_read(tmp_path):
    torch.save({"module._orig_mod.a": torch.ones(2)}, tmp_path / "new.pth")
    (tmp_path / "old.pth").write_bytes(_legacy_pickle({"a": torch.ones(2)}))
    for name in ("new.pth", "old.pth"):
        loaded, description = weights.read_weights(tmp_path / name)
        assert list(loaded) == ["a"] and description is None


@pytest.mark.parametrize("described", [True, False], ids=["described", "not described"])
@pytest.mark.parametrize("harm", ["truncated", "empty", "garbage", "bit"])
def test_damaged_weights_are_refused_in_words(tmp_path, harm, described):
    path = tmp_path / "w.pth"
    weights.write_weights(path, {"a": torch.arange(5000.0)}, {})
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "garbage": b"hello\n" * 99, "bit": data}[harm])
    if not described:
        path.with_suffix(".json").unlink()
    with pytest.raises(CheckpointError, match=r"w\.pth is (damaged|refused)"):
        weights.read_weights(path)


def test_missing_weights_other_contents_and_a_broken_description_are_refused_in_words(tmp_path):
    with pytest.raises(CheckpointError, match="there is no weights file"):
        weights.read_weights(tmp_path / "none.pth")
    torch.save({"model": {"a": torch.ones(1)}, "step": 3}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match="holds no state dict"):
        weights.read_weights(tmp_path / "other.pth")
    weights.write_weights(tmp_path / "w.pth", {"a": torch.ones(1)}, {})
    (tmp_path / "w.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"w\.json, the description of w\.pth, is damaged"):
        weights.read_weights(tmp_path / "w.pth")


def stop_after(monkeypatch, renames: int) -> None:
    """From now on the process ends, as far as files go, once it has done so many renames."""
    replace, calls = os.replace, []

    def stop(source, target):
        calls.append(target)
        if len(calls) > renames:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop)


def write(path: Path, value: int) -> None:
    weights.write_weights(path, {"a": torch.full((1,), float(value))}, {"step": value})


@pytest.mark.parametrize("renames_done", range(4))
def test_a_crash_between_weights_and_description_leaves_weights_with_the_one_that_fits(
    tmp_path, monkeypatch, renames_done
):
    path = tmp_path / "w.pth"
    write(path, 1)
    stop_after(monkeypatch, renames_done)
    if renames_done < 3:
        with pytest.raises(KeyboardInterrupt):
            write(path, 2)
    else:
        write(path, 2)
    loaded, description = weights.read_weights(path)
    assert description is not None and description["step"] == loaded["a"].item() == (2 if renames_done >= 2 else 1)
    assert "previous" not in description


def test_two_crashes_at_the_same_place_still_leave_a_fit(tmp_path, monkeypatch):
    path = tmp_path / "w.pth"
    write(path, 1)
    for value in (2, 3):
        with monkeypatch.context() as patch:
            stop_after(patch, 1)  # the description is new, the weights are not
            with pytest.raises(KeyboardInterrupt):
                write(path, value)
        loaded, description = weights.read_weights(path)
        assert description == {"step": 1, "sha256": files.file_digest(path)} and loaded["a"].item() == 1
    write(path, 4)
    assert json.loads((tmp_path / "w.json").read_text()) == {"step": 4, "sha256": files.file_digest(path)}


# --- other names for a weights file ---


def refuse_links(monkeypatch) -> None:
    def refuse(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "copies"])
def test_a_published_copy_outlives_what_replaces_its_source(tmp_path, monkeypatch, links):
    source, target = tmp_path / "w.pth", tmp_path / "w_best.pth"
    if not links:
        refuse_links(monkeypatch)
    write(target, 0)
    write(source, 1)
    digest = weights.publish_copy(source, target, val_loss=2.5)
    assert os.path.samefile(source, target) is links
    write(source, 2)
    loaded, description = weights.read_weights(target)
    assert loaded["a"].item() == 1 and description == {"step": 1, "val_loss": 2.5, "sha256": digest}
    assert weights.read_weights(source)[0]["a"].item() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.json", "w.pth", "w_best.json", "w_best.pth"]


def test_publishing_twice_changes_nothing_and_leaves_nothing(tmp_path):
    source, target = tmp_path / "w.pth", tmp_path / "w_best.pth"
    write(source, 1)
    for _ in range(2):  # a rename between two names of one file does nothing: the temporary one would stay
        weights.publish_copy(source, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.json", "w.pth", "w_best.json", "w_best.pth"]


@pytest.mark.parametrize("renames_done", range(4))
def test_a_crash_while_publishing_leaves_the_old_or_new(tmp_path, monkeypatch, renames_done):
    source, target = tmp_path / "w.pth", tmp_path / "w_best.pth"
    write(target, 1)
    write(source, 2)
    with monkeypatch.context() as patch:
        stop_after(patch, renames_done)
        if renames_done < 3:
            with pytest.raises(KeyboardInterrupt):
                weights.publish_copy(source, target)
        else:
            weights.publish_copy(source, target)
    loaded, description = weights.read_weights(target)
    assert description is not None and description["step"] == loaded["a"].item() == (2 if renames_done >= 2 else 1)


def test_damaged_or_undescribed_weights_are_not_published(tmp_path):
    source, target = tmp_path / "w.pth", tmp_path / "w_best.pth"
    with pytest.raises(CheckpointError, match="there is no weights file"):
        weights.publish_copy(source, target)
    write(source, 1)
    data = bytearray(source.read_bytes())
    data[len(data) // 2] ^= 1
    source.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged or was exchanged"):
        weights.publish_copy(source, target)
    (tmp_path / "w.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no description w\.json"):
        weights.publish_copy(source, target)
    assert not target.exists()


# --- where MiniMind looks ---


@pytest.fixture
def run_folder(tmp_path) -> Path:
    """A run of MiniMind's name, `tiny_32_moe`, with the weights of its last step."""
    torch.manual_seed(1)
    model = MiniMindForCausalLM(tiny(use_moe=True))
    folder = tmp_path / "out" / "tiny_32_moe"
    weights.write_weights(folder / "tiny_32_moe.pth", model.state_dict(), {"step": 1})
    return folder


def tiny(use_moe: bool) -> MiniMindConfig:
    return MiniMindConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=99,
        use_moe=use_moe,
    )


def flat(folder: Path) -> str:
    return weights.publish_flat(folder, folder.parent, folder.name)


def test_minimind_loads_the_flat_file_by_its_own_rule(run_folder):
    """eval_llm.py loads strictly, trainer_utils.py's init_model with strict=False."""
    line = flat(run_folder)
    save_dir, weight, hidden, moe = run_folder.parent, "tiny", 32, True
    loaded = torch.load(f"{save_dir}/{weight}_{hidden}{'_moe' if moe else ''}.pth", map_location="cpu")
    torch.manual_seed(2)
    for strict in (False, True):
        model = MiniMindForCausalLM(tiny(use_moe=moe))
        found = model.load_state_dict(loaded, strict=strict)
        assert found.missing_keys == [] and found.unexpected_keys == []
    expected = weights.read_weights(run_folder / "tiny_32_moe.pth")[0]
    assert all(torch.equal(value, expected[name].float()) for name, value in model.state_dict().items())
    assert line == f"Published as {save_dir / 'tiny_32_moe.pth'}, where MiniMind's scripts look"


def test_a_run_replaces_its_own_flat_file_wherever_it_moved(run_folder):
    assert flat(run_folder).startswith("Published as")
    moved = run_folder.parent.rename(run_folder.parent.with_name("moved")) / run_folder.name
    for value in (2, 3):
        write(moved / "tiny_32_moe.pth", value)
        assert flat(moved).startswith("Published as")
        assert weights.read_weights(moved.parent / "tiny_32_moe.pth")[0]["a"].item() == value


@pytest.mark.parametrize("renames_done", range(5))
def test_a_crash_while_publishing_keeps_the_flat_file_ours(run_folder, monkeypatch, renames_done):
    flat(run_folder)
    write(run_folder / "tiny_32_moe.pth", 2)
    with monkeypatch.context() as patch:
        stop_after(patch, renames_done)
        if renames_done < 4:
            with pytest.raises(KeyboardInterrupt):
                flat(run_folder)
        else:
            flat(run_folder)
    write(run_folder / "tiny_32_moe.pth", 3)
    assert flat(run_folder).startswith("Published as")
    assert weights.read_weights(run_folder.parent / "tiny_32_moe.pth")[0]["a"].item() == 3


@pytest.mark.parametrize("published_before", [False, True])
def test_a_flat_file_of_another_hand_stays_and_is_named(run_folder, published_before):
    target = run_folder.parent / "tiny_32_moe.pth"
    if published_before:
        flat(run_folder)
        target.unlink()
    torch.save({"a": torch.zeros(1)}, target)
    content = target.read_bytes()
    line = flat(run_folder)
    assert line.startswith(f"Not published as {target}: the file there is not of this run")
    assert (target.read_bytes() == content and not target.with_suffix(".json").exists()) or published_before
    target.unlink()
    assert flat(run_folder).startswith("Published as")


def test_writing_into_the_flat_file_leaves_the_run_s_own_alone(run_folder):
    flat(run_folder)
    own = run_folder / f"{run_folder.name}.pth"
    before = own.read_bytes()
    with open(run_folder.parent / own.name, "r+b") as file:  # as MiniMind's trainers do
        file.write(b"another model")
    assert own.read_bytes() == before


def test_a_flat_file_with_the_same_content_is_taken_over(run_folder):
    target = run_folder.parent / "tiny_32_moe.pth"
    target.write_bytes((run_folder / "tiny_32_moe.pth").read_bytes())  # copied by hand
    assert flat(run_folder).startswith("Published as")
    assert weights.read_weights(target)[1] is not None


def test_a_place_that_takes_no_flat_file_is_a_failed_save(run_folder):
    target = run_folder.parent / "tiny_32_moe.pth"
    target.mkdir()
    with pytest.raises(SaveFailed, match=r"could not publish .*Is a directory"):
        flat(run_folder)
