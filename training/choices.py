"""What a run's open settings came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Choices:
    """What `auto`, the device and the dry step decided. A resume in the same place repeats them: other kernels, another
    thread count or micro-batch would round otherwise."""

    device: str  # cpu, cuda, mps
    dtype: str  # of autocast; float32: none
    threads: int  # of each rank's CPU work
    world_size: int
    batch_size: int  # rows in a micro-batch on one rank
    compile: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def saved_choices(record: dict[str, Any]) -> dict[str, Any]:
    """The choices in a checkpoint's state.json or a receipt; the first releases kept batch_size beside them."""
    beside = {"batch_size": record["batch_size"]} if "batch_size" in record else {}
    return {**beside, **record["choices"]}
