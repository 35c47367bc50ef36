"""Raw arrays on the disk, mapped into memory when read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from storage.files import write_file


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Write each array raw as <name>.bin; returns the files' manifest entries. Raises OSError."""
    return {f"{name}.bin": write_file(folder / f"{name}.bin", array) for name, array in arrays.items()}


def read_array(path: Path, dtype: Any) -> np.ndarray:
    """A raw file as a read-only array backed by the file, as a plain ndarray (cheaper to index than np.memmap)."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
