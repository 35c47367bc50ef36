"""The seam between a model and the ranks that train it.

A model is built, then made parallel, then its optimizers are built, then a checkpoint is restored: engines that shard
parameters replace them, and an optimizer built before would go on updating the old ones.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from training.distributed import World


def parallelize(model: nn.Module, world: World) -> nn.Module:
    """The model as it trains on many ranks; itself on one. All ranks must call.

    Its gradients are then means over ranks: `World.gradient_scale` turns sums of a step's losses into that.
    """
    if world.size == 1:
        return model
    device_ids = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


def gradient_sync(model: nn.Module, on: bool) -> AbstractContextManager:
    """A context in which backward exchanges gradients between ranks, or (`on` False) only adds them up here."""
    return nullcontext() if on or not isinstance(model, DistributedDataParallel) else model.no_sync()


def bare(model: nn.Module) -> nn.Module:
    """The model inside what `parallelize` put around it. (Blocks are compiled in place, which wraps nothing.)"""
    return model.module if isinstance(model, DistributedDataParallel) else model


def full_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Plain name -> the whole parameter, its own storage where nothing is sharded; a tied one occurs once, under its
    first name (`model.embed_tokens.weight`). All ranks must call."""
    return {name: parameter.detach() for name, parameter in bare(model).named_parameters()}
