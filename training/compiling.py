"""torch.compile: does this run repay it, can this machine do it, and how the model takes it.

The decoder's blocks are compiled, not the whole model: nearly the same speed (benchmarks/RESULTS.md) for a third of the
compile time, since one block's code serves them all. In place, so that parameter names stay as they are. Its results
are kept in TORCHINDUCTOR_CACHE_DIR (by default torchinductor_<user> in the temporary folder): the next start is fast.
"""

from __future__ import annotations

from typing import Any

import torch

from errors import UserError
from training.distributed import World

# What was measured, or may be expected (CUDA), for `auto`: seconds before the first step, share of a step saved.
COMPILE_SECONDS = {"cpu": 30.0, "cuda": 60.0}
SHARE_SAVED = {"cpu": 0.1, "cuda": 0.2}
MARGIN = 2.0  # compile only where it is repaid this many times


def choose_compile(asked: str, saved: bool | None, seconds_left: float | None, world: World) -> tuple[bool, str]:
    """Whether to compile, and a line about it ("" when there is nothing to say). All ranks must call.

    `asked` is --use_compile: auto, 0 or 1. `saved` is what a resumed run has decided, and auto repeats. Without it,
    auto compiles when the `seconds_left` of training, as estimated for the model as it is, repay the wait. Rank 0
    decides for all. Raises UserError, on all ranks, if 1 is asked for where nothing can be compiled.
    """
    kind = world.device.type
    wanted = asked == "1"
    if asked == "auto":
        gain = (seconds_left or 0.0) * SHARE_SAVED.get(kind, 0.0)
        repaid = gain > MARGIN * COMPILE_SECONDS.get(kind, 0.0)
        wanted = world.broadcast(repaid if saved is None else saved)  # all ranks
    if not wanted:
        return False, ""
    problem = compiler_problem(world.device)
    if world.max([bool(problem)])[0]:  # all ranks
        problem = problem or "another rank cannot compile"
        if asked == "1":
            raise UserError(f"--use_compile 1: {problem}; install what is missing or use --use_compile 0")
        return False, f"Not compiled: {problem}"
    return True, "Compiled: decoder blocks; the first step takes up to a minute longer, later starts find it cached"


def compiler_problem(device: torch.device) -> str:
    """Why nothing can be compiled for `device` on this machine, in words; "" when a small function could be."""
    from torch._inductor import cpp_builder, exc

    try:
        if device.type == "cpu":
            cpp_builder.get_cpp_compiler()  # asked first: a cached result below would hide that it is gone
        torch.compile(_small_function, dynamic=False)(torch.ones(8, device=device))
    except exc.InvalidCxxCompiler:
        return "no C++ compiler (g++, clang++) was found"
    except Exception as error:  # whatever a broken tool chain raises: triton or Python.h missing, no space, ...
        return f"torch.compile does not work here ({str(error).strip().splitlines()[0][:150]})"
    return ""


def _small_function(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def compile_model(model: Any, with_loss: bool) -> None:
    """Compile each block in place for the one shape that training has; a block with other code in it (experts on a CPU)
    is compiled around that. Names of parameters and modules stay.

    `with_loss` fuses the softmax over the vocabulary too. That pays where memory traffic is what it costs (CUDA); on a
    CPU it works through cache-sized blocks as it is.
    """
    # A block's gradients are exchanged as soon as it is through; DDP's own optimizer would cut it into smaller graphs.
    torch._dynamo.config.optimize_ddp = False
    for block in model.model.layers:
        block.compile(dynamic=False)
    if with_loss:
        model.cross_entropy = torch.compile(model.cross_entropy, dynamic=False)


def uncompiled() -> Any:
    """A context in which compiled blocks run as written: for shapes that come once, such as a growing text."""
    return torch.compiler.set_stance("force_eager")
