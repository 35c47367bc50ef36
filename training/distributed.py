"""The processes that train together: how they meet, agree and part."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from training.device import choose_device
from training.launcher import environment_rank

GROUP_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """The processes that train together. A plain `python train_pretrain.py` is a world of one."""

    device: torch.device
    rank: int = 0
    size: int = 1
    side_group: dist.ProcessGroup | None = (
        None  # gloo on CPU, whatever the gradients travel by: for small facts, never stalls the device
    )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def gradient_scale(self) -> int:
        """What a rank's share of a step's loss is multiplied with: the exchange of gradients takes means over ranks,
        and the losses of a step are sums over its targets."""
        return self.size

    def sum(self, values: Iterable[float]) -> list[float]:
        """Element-wise sum over ranks in float64, exact for counts below 2^53. All ranks must call."""
        total = torch.tensor(list(values), dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(total, group=self.side_group)
        return total.tolist()

    def max(self, values: Iterable[int]) -> list[int]:
        """Element-wise maximum over ranks. All ranks must call."""
        most = torch.tensor(list(values), dtype=torch.int64)
        if self.size > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.side_group)
        return most.tolist()

    def gather(self, item: Any) -> list[Any]:
        """Every rank's `item`, in rank order, on the main process; an empty list elsewhere. All ranks must call."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.gather_object(item, items if self.is_main else None, group=self.side_group)
        return items if self.is_main else []

    def broadcast(self, item: Any) -> Any:
        """The main process's `item` on every rank. All ranks must call."""
        if self.size == 1:
            return item
        box = [item]
        dist.broadcast_object_list(box, src=0, group=self.side_group)
        return box[0]

    def barrier(self) -> None:
        """Return when every rank has come here. All ranks must call."""
        if self.size > 1:
            dist.barrier(group=self.side_group)


def init_distributed_mode(device_name: str = "auto") -> World:
    """Join the other ranks: NCCL between GPUs, gloo elsewhere. A world of one opens no process group."""
    rank, local_rank, size = environment_rank()
    device = choose_device(device_name, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        return World(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = meet(next(rendezvous("env://", timeout=GROUP_TIMEOUT))[0], rank, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
    side_group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
    return World(device, rank, size, side_group)


def meet(store: dist.Store, rank: int, size: int) -> dist.Store:
    """The part of the launcher's store that belongs to this start of the ranks alone.

    torchrun keeps one store over its restarts (pytorch issue 135712), where new ranks would find the addresses of
    killed ones and wait for them. So rank 0 draws a name and tells it to each rank that says hello, until all use it.
    """
    token = os.urandom(8).hex()
    until = time.monotonic() + GROUP_TIMEOUT.total_seconds()

    def wait(key: str) -> None:  # in Python, so that stop signals are served
        while not store.check([key]):
            if time.monotonic() > until:
                raise TimeoutError(f"rank {rank}: the {size} ranks did not meet within {GROUP_TIMEOUT}")
            time.sleep(0.02)

    if rank > 0:
        store.set(f"hello/{rank}", token)
        wait(f"welcome/{token}")
        name = store.get(f"welcome/{token}").decode()
        store.set(f"here/{name}/{rank}", "")
        return dist.PrefixStore(name, store)
    for other in range(1, size):
        while not store.check([f"here/{token}/{other}"]):
            wait(f"hello/{other}")
            store.set(f"welcome/{store.get(f'hello/{other}').decode()}", token)  # perhaps a killed one's: ask again
            time.sleep(0.02)
    return dist.PrefixStore(token, store)


def leave_group(world: World) -> None:
    """All ranks must call: none may tear down what another still reads."""
    if world.size > 1:
        world.barrier()
        dist.destroy_process_group()


def is_echo(error: BaseException) -> bool:
    """True for what a collective raises when another rank has gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "onnection" in str(error))
