"""What a rank computes on: device, precision, allocator, determinism, memory."""

from __future__ import annotations

import os
import sys

import torch

from training.launcher import environment_rank


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device for this rank. `auto` is CUDA, then MPS (one process only: gloo cannot reach it), then CPU; `cuda`
    means the GPU of the local rank."""
    if name == "auto":
        has_mps = torch.backends.mps.is_available() and environment_rank().world_size == 1
        name = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    device = torch.device(name)
    return torch.device("cuda", local_rank) if device.type == "cuda" and device.index is None else device


def prepare_allocator() -> None:
    """CUDA memory in segments that grow, instead of blocks of fixed size with holes between. Call before the first CUDA
    work; what the user has set wins."""
    if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def set_deterministic(on: bool) -> None:
    """Deterministic kernels for the whole process. Call before the first CUDA work: cuBLAS reads its workspace then."""
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # memory that is written before it is read
    torch.backends.cudnn.deterministic = on
    torch.backends.cudnn.benchmark = False


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
