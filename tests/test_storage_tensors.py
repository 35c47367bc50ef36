"""Tensor files are safetensors, and what is no number is told at once."""

import math

import torch
from safetensors.torch import load_file

from storage import tensors


def test_our_safetensors_files_are_read_by_the_safetensors_library_for_every_dtype_and_shape(tmp_path):
    given = {
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
    entry = tensors.write_tensors(tmp_path / "x.safetensors", given)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == given.keys()
    for name, tensor in given.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
    again = dict(reversed(given.items()))
    assert tensors.write_tensors(tmp_path / "y.safetensors", again) == entry


def test_finite_means_no_nan_and_no_infinity_in_tensors_of_any_kind():
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for value in (math.nan, math.inf, -math.inf):
            tensor = torch.zeros(5, 7, dtype=dtype)
            assert tensors.all_finite(tensor)
            tensor[3, 2] = value
            assert not tensors.all_finite(tensor)
    assert tensors.all_finite(torch.full((3,), torch.finfo(torch.float32).max))
    assert all(map(tensors.all_finite, (torch.zeros(0), torch.tensor(2.0), torch.arange(3))))
