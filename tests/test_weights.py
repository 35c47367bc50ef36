"""Weights for use: half precision, described, whole or not there, and published under other names."""

import io
import json
import os
import pickle
import stat
from pathlib import Path

import pytest
import torch
from tied_model import Tied

from errors import CheckpointError
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
