"""Tensors as safetensors files; there is no pickle here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from storage.files import HashedFile

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write tensors on the host as a safetensors file and return its manifest entry; equal tensors give equal files.

    Layout (https://huggingface.co/docs/safetensors): 8 bytes of header length, a JSON header padded to a multiple of 8,
    then the data without gaps; the widest types come first, so every tensor is aligned. Raises OSError.
    """
    header: dict[str, Any] = {}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    offset = 0
    for name, tensor in ordered:
        assert tensor.device.type == "cpu" and tensor.is_contiguous(), f"{name} must be contiguous and on the host"
        span = [offset, offset + tensor.numel() * tensor.element_size()]
        header[name] = {"dtype": SAFETENSORS_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            if tensor.numel():
                file.write(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # the same memory, seen as bytes
    return file.entry


def all_finite(tensor: Tensor) -> bool:
    """True if nothing in a host tensor is NaN or infinite: the extremes tell, at memory speed (isfinite().all() takes
    thirty times as long)."""
    return not tensor.numel() or all(math.isfinite(extreme) for extreme in torch.stack(tensor.aminmax()).tolist())
