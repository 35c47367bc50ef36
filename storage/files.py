"""Files that are whole or not there: written under a temporary name, flushed to the disk, renamed, digested on the way.

Temporary names: `.NAME.tmp-PID`. Tensors are written as safetensors; there is no pickle here.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from errors import SaveFailed
from storage.hashed_file import HashedFile, sync

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


def temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def write_file_atomic(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace a small file as a whole: after a crash it holds the old content or the new one. Raises SaveFailed."""
    path = Path(path)
    temporary = temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with HashedFile(temporary) as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        remove_quietly(temporary)
        raise SaveFailed(
            f"could not write {path}: {error.strerror or error}; what it held before is untouched"
        ) from error


def write_json_atomic(path: str | os.PathLike[str], value: Any) -> None:
    """`write_file_atomic` of indented JSON; floats come back bit-equal, paths become text. Raises SaveFailed."""
    write_file_atomic(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, default=_json_default) + "\n").encode()


def _json_default(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (np.generic, Tensor)):
        return value.item()
    raise TypeError(f"cannot write {value!r} of type {type(value).__name__} as JSON")


def remove_quietly(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def all_finite(tensor: Tensor) -> bool:
    """True if nothing in a host tensor is NaN or infinite: the extremes tell, at memory speed (isfinite().all() takes
    thirty times as long)."""
    return not tensor.numel() or all(math.isfinite(extreme) for extreme in torch.stack(tensor.aminmax()).tolist())


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
