"""What a rank computes on: device, precision, allocator, determinism, memory."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable

import torch

from errors import UserError
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
    return torch.bfloat16 if device.type == "cpu" and cpu_multiplies_bfloat16() else torch.float32


def cpu_multiplies_bfloat16() -> bool:
    able = torch.cpu.get_capabilities()
    return bool(able.get("amx_bf16") or able.get("avx512_bf16"))


def dtype_note(
    dtype: torch.dtype, device: torch.device, seconds: Callable[[torch.dtype, torch.device], float] | None = None
) -> str:
    """A line for the start page where this type is slower than float32, with the factor as measured; "" where it is
    not. A processor without instructions for a type emulates it. Raises UserError where the device has no such type."""
    quick = device.type == "cuda" or (device.type == "cpu" and dtype == torch.bfloat16 and cpu_multiplies_bfloat16())
    if dtype == torch.float32 or quick:
        return ""
    name, seconds = str(dtype).removeprefix("torch."), seconds or product_seconds
    try:
        factor = seconds(dtype, device) / seconds(torch.float32, device)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"--dtype {name}: {device.type} cannot multiply it ({error}); use float32 or auto") from None
    if factor < NOTABLY_SLOWER:
        return ""
    return (
        f"Slow: a matrix product in {name} takes {factor:.1f} x its time in float32 on this {device.type}; "
        "--dtype float32 trains faster"
    )


NOTABLY_SLOWER = 1.2  # less may be chance


def product_seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Of a small matrix product, the best of a few within a tenth of a second. On one thread: several wait for each
    other on a busy machine, and the factor is about instructions."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = torch.ones(128, 256, dtype=dtype, device=device), torch.ones(256, 512, dtype=dtype, device=device)
        began, best = time.perf_counter(), math.inf
        while best == math.inf or time.perf_counter() - began < 0.03:
            (a @ b).sum().item()  # untimed: the first one sets things up
            since = time.perf_counter()
            (a @ b).sum().item()  # the host waits for the device
            best = min(best, time.perf_counter() - since)
        return best
    finally:
        torch.set_num_threads(threads)


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
