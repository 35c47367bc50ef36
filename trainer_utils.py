"""What a training loop stands on: ranks and devices, seeds, precision, optimizers, learning rate, time, memory."""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.optim import Optimizer

from dataset.lm_dataset import Batch
from model.attention import document_boundaries

# --- ranks and devices ---

GROUP_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """The processes that train together. A plain `python train_pretrain.py` is a world of one."""

    device: torch.device
    rank: int = 0
    size: int = 1
    side_group: Any = None  # gloo on CPU, whatever the gradients travel by: for small facts, never stalls the device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

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


class RankOfEnvironment(NamedTuple):
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


def environment_rank() -> RankOfEnvironment:
    """As torchrun left it in the environment. Whether it makes sense is for `preflight.check_torchrun` to say."""

    def number(name: str, default: int) -> int:
        text = os.environ.get(name, "")
        return int(text) if text.isdecimal() else default

    if "RANK" not in os.environ:
        return RankOfEnvironment()
    return RankOfEnvironment(number("RANK", 0), number("LOCAL_RANK", 0), number("WORLD_SIZE", 1))


def is_torchrun_worker() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device for this rank. `auto` is CUDA, then MPS (one process only: gloo cannot reach it), then CPU; `cuda`
    means the GPU of the local rank."""
    if name == "auto":
        has_mps = torch.backends.mps.is_available() and environment_rank().world_size == 1
        name = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    device = torch.device(name)
    return torch.device("cuda", local_rank) if device.type == "cuda" and device.index is None else device


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


def to_device(batch: Batch, device: torch.device, most_documents: int) -> Batch:
    """The batch where the model is. For CUDA its documents are counted before the copy: afterwards the host would have
    to wait. Their list is filled up to `most_documents`, so that a compiled model always meets the same shapes."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        batch.boundaries = document_boundaries(batch.document_ids, most_documents).pin_memory()
    return batch.to(device, non_blocking=on_cuda)


def losses_of(
    model: nn.Module, batch: Batch, target_count: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Any:
    """The model's output on one micro-batch: loss, logits_loss and aux_loss, each a sum over its targets divided by
    `target_count`, the targets of the whole step."""
    return model(
        batch.input_ids,
        position_ids=batch.position_ids,
        document_ids=batch.document_ids,
        boundaries=batch.boundaries,
        targets=batch.targets,
        target_count=target_count,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )


def prepare_allocator() -> None:
    """CUDA memory in segments that grow, instead of blocks of fixed size with holes between. Call before the first CUDA
    work; what the user has set wins."""
    if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def leave_group(world: World) -> None:
    """All ranks must call: none may tear down what another still reads."""
    if world.size > 1:
        dist.barrier(group=world.side_group)
        dist.destroy_process_group()


def is_echo(error: BaseException) -> bool:
    """True for what a collective raises when another rank has gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "onnection" in str(error))


# --- seeds ---


def setup_seed(seed: int) -> None:
    """Seed Python, NumPy and torch (every device). Use the plain seed for weights, seed + rank for dropout."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_deterministic(on: bool) -> None:
    """Deterministic kernels for the whole process. Call before the first CUDA work: cuBLAS reads its workspace then."""
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # memory that is written before it is read
    torch.backends.cudnn.deterministic = on
    torch.backends.cudnn.benchmark = False


# --- precision ---


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The autocast type. `auto`: bfloat16 where the device multiplies it in hardware, else float16 on CUDA (with a
    GradScaler), else float32. Float32 means no autocast at all."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    if device.type == "cpu":
        able = torch.cpu.get_capabilities()
        return torch.bfloat16 if able.get("amx_bf16") or able.get("avx512_bf16") else torch.float32
    return torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """The forward's precision; master weights stay float32."""
    enabled = dtype != torch.float32
    return torch.autocast(device.type, dtype=dtype if enabled else None, enabled=enabled)


# --- optimizers ---


def build_optimizers(model: nn.Module, config: Any, device: torch.device) -> list[Optimizer]:
    """AdamW, or Muon for the decoder's matrices with AdamW for the rest. Weight decay falls on matrices only.

    Muon's updates are scaled to AdamW's root mean square (Liu et al. 2025, "Muon is scalable"), so that both follow one
    learning rate. `config` holds optimizer, learning_rate, beta1, beta2 and weight_decay.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    by_muon = [p for name, p in named if config.optimizer == "muon" and is_hidden_matrix(name, p)]
    taken = set(map(id, by_muon))
    rest = [p for _, p in named if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = device.type in ("cuda", "cpu")  # one kernel for the whole update: 4-6 x the loop on CPU
    adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=fused)
    if not by_muon:
        return [adamw]
    muon = torch.optim.Muon(
        by_muon, lr=config.learning_rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, adamw]


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """True for what Muon is made for: square-ish linear maps inside the decoder. Embeddings and MoE routers are not."""
    return parameter.ndim == 2 and ".layers." in name and not name.endswith("mlp.gate.weight")


def set_learning_rate(optimizers: list[Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def step_if_finite(optimizers: list[Optimizer], finite: Tensor) -> None:
    """Update the parameters unless `finite` (0-dim bool on the device) is false. Fused optimizers decide on the device;
    the others cost one host sync."""
    for optimizer in optimizers:
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
            optimizer.step()
        elif bool(finite):
            optimizer.step()


def update_parameters(
    parameters: list[nn.Parameter], optimizers: list[Optimizer], scaler: torch.amp.GradScaler, grad_clip: float
) -> tuple[Tensor, Tensor]:
    """Unscale, clip, step, update the scale, drop the gradients. Returns (gradient norm before clipping, finite), both
    0-dim on the device. The gradients are equal on all ranks, so all ranks skip a non-finite update alike."""
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(parameters, grad_clip if grad_clip > 0 else math.inf)
    finite = torch.isfinite(norm)
    step_if_finite(optimizers, finite)
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    return norm, finite


# --- learning rate ---

WSD_DECAY_SHARE = 0.2  # of the whole run; Hägele et al. 2024 find 10-20 % enough


def get_lr(
    current: float,
    total: float,
    lr: float,
    *,
    warmup: float = 0.0,
    min_lr_ratio: float = 0.1,
    schedule: str = "cosine",
) -> float:
    """Learning rate at `current` of `total` (any one unit: the trainer counts rows).

    Linear warm-up from lr/10 over the first `warmup`, then from lr to lr x min_lr_ratio over what is left. With the
    defaults the cosine is MiniMind's lr x (0.1 + 0.45 x (1 + cos(pi x progress))). `wsd` stays at lr and falls linearly
    over the last fifth of the run.
    """
    if warmup > 0 and current < warmup:
        return lr * (0.1 + 0.9 * current / warmup)
    progress = min(max((current - warmup) / max(total - warmup, 1e-12), 0.0), 1.0)
    if schedule == "cosine":
        fall = 0.5 * (1 - math.cos(math.pi * progress))
    elif schedule == "linear":
        fall = progress
    elif schedule == "wsd":
        fall = max(0.0, (progress - (1 - WSD_DECAY_SHARE)) / WSD_DECAY_SHARE)
    elif schedule == "constant":
        fall = 0.0
    else:
        raise ValueError(f"lr_schedule {schedule!r}: choose cosine, wsd, linear or constant")
    return lr * (1 - (1 - min_lr_ratio) * fall)


# --- time ---


class Throughput:
    """Tokens and steps a second of wall time since the last reading, pauses for evaluating and saving left out."""

    def __init__(self) -> None:
        self._tokens = self._steps = 0
        self._paused = 0.0
        self._since = time.monotonic()

    def count(self, tokens: int) -> None:
        """One step of `tokens` valid targets is done."""
        self._tokens += tokens
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._paused += time.monotonic() - began

    def read(self) -> tuple[float, float]:
        """(tokens per second, seconds per step) since the last reading; counting begins anew. Read it after a host
        sync: before one, a device may still be working on the steps counted."""
        seconds = max(time.monotonic() - self._since - self._paused, 1e-9)
        rates = self._tokens / seconds, seconds / max(1, self._steps)
        self._tokens = self._steps = 0
        self._paused, self._since = 0.0, time.monotonic()
        return rates


def peak_memory_gib(device: torch.device) -> float:
    """Most memory held so far: allocated on the CUDA device, or resident in this process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
