"""A mode under which whatever would make the host wait for an accelerator fails, shown on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Sizes or values that the host must know before it can go on.
WAITING = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive, aten.bincount,
    aten.equal, aten.is_nonzero,
}  # fmt: skip


class NoHostWaits(TorchDispatchMode):
    """Raises AssertionError on .item(), .tolist(), bool(tensor), nonzero and indexing by a mask."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        assert packet not in WAITING, f"{packet} makes the host wait"
        if packet in (aten.index, aten.index_put, aten.index_put_):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{packet} with a mask makes the host wait"
        return func(*args, **(kwargs or {}))
