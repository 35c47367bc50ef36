"""Live state to named tensors and back: parameters, optimizers, random generators. Strict: what does not fit is named
and refused before anything is changed.
"""

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from errors import CheckpointError
from training.optimizers import row_of

# --- parameters and optimizers ---


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel. (Blocks are compiled in place, which wraps nothing.)"""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into other programs' files: `module.` (DDP) and `_orig_mod.`
    (torch.compile)."""
    return name.removeprefix("module.").replace("_orig_mod.", "").removeprefix("module.")


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Plain name -> parameter; a tied one occurs once, under its first name (`model.embed_tokens.weight`)."""
    return dict(unwrap(model).named_parameters())


def flatten_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Plain name -> the parameter's own storage (no copy; see `BackgroundWriter.snapshot`)."""
    return {name: parameter.detach() for name, parameter in named_parameters(model).items()}


def refuse_differences(title: str, problems: list[str], remedy: str) -> None:
    """Raise one CheckpointError that names the first problems and counts the rest."""
    if problems:
        shown = "".join(f"\n  - {problem}" for problem in problems[:6])
        more = f"\n  - and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise CheckpointError(f"{title}:{shown}{more}\n{remedy}")


@torch.no_grad()
def restore_parameters(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy saved parameters into a model, plain, compiled or DDP.

    Raises CheckpointError, before anything is changed, unless every name, shape and type agrees.
    """
    parameters = named_parameters(model)
    problems = [f"{name} is missing" for name in parameters.keys() - tensors.keys()]
    problems += [f"{name} is not known to this model" for name in tensors.keys() - parameters.keys()]
    for name in parameters.keys() & tensors.keys():
        want, have = parameters[name], tensors[name]
        if want.shape != have.shape:
            problems.append(f"{name} has shape {list(have.shape)}, this model needs {list(want.shape)}")
        elif want.dtype != have.dtype:
            problems.append(f"{name} is {have.dtype}, this model holds {want.dtype}")
    refuse_differences(
        "the saved parameters are those of another architecture",
        sorted(problems),
        "Start with the model options the checkpoint was made with (they are in its state.json).",
    )
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def flatten_optimizer(optimizers: list[Optimizer], model: nn.Module) -> dict[str, Tensor]:
    """`<parameter name>/<state key>` -> the optimizer's own tensor (no copy), over one or several optimizers.

    Hyperparameters are not included: a resume takes them from its configuration.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters(model).items()}
    flat: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items():
                assert isinstance(value, Tensor), f"optimizer state {key} is a {type(value).__name__}, not a tensor"
                flat[f"{names[parameter]}/{key}"] = value.detach()
    return flat


def restore_optimizer(optimizers: list[Optimizer], model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put saved state back into fresh optimizers; lr, weight decay, fused ... stay as the optimizers were built.

    `Optimizer.load_state_dict` would overwrite those and takes wrong shapes without a word; here a missing or
    unexpected key, a wrong shape or type raises CheckpointError naming it, before anything is changed.
    No tensors of an optimizer is its state before its first update.
    """
    names = {parameter: name for name, parameter in named_parameters(model).items()}
    saved: dict[str, dict[str, Tensor]] = {}
    for path, value in tensors.items():
        name, _, key = path.rpartition("/")
        saved.setdefault(name, {})[key] = value
    problems: list[str] = []
    plan: list[tuple[Optimizer, nn.Parameter, dict[str, Tensor]]] = []
    for optimizer in optimizers:
        began = any(names[p] in saved for group in optimizer.param_groups for p in group["params"])
        row = row_of(optimizer)
        for group in optimizer.param_groups:
            on_device = bool(group.get("fused"))  # whose counters live beside the parameters
            for parameter in group["params"]:
                entries = saved.pop(names[parameter], {})
                wanted = row.state_of(parameter) if began else {}
                problems += _state_problems(names[parameter], entries, wanted)
                plan.append((optimizer, parameter, _placed(entries, parameter, on_device)))
    problems += [f"{name} is not a parameter of this optimizer" for name in saved]
    refuse_differences(
        "the saved optimizer state does not fit this optimizer",
        sorted(problems),
        "Use the model and optimizer it was made with, or `--resume_reset optimizer` to begin with a fresh one.",
    )
    for optimizer, parameter, entries in plan:
        if entries:
            optimizer.state[parameter] = entries


def _state_problems(
    name: str, entries: Mapping[str, Tensor], wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> list[str]:
    problems = [f"{name}/{key} is missing" for key in wanted.keys() - entries.keys()]
    problems += [f"{name}/{key} is not known to this optimizer" for key in entries.keys() - wanted.keys()]
    for key in wanted.keys() & entries.keys():
        (shape, dtype), value = wanted[key], entries[key]
        if value.shape != shape or value.dtype != dtype:
            problems.append(
                f"{name}/{key} is {value.dtype} {list(value.shape)}, this optimizer needs {dtype} {list(shape)}"
            )
    return problems


def _placed(entries: Mapping[str, Tensor], parameter: Tensor, on_device: bool) -> dict[str, Tensor]:
    """Own copies (files are memory-mapped) on the device where this optimizer expects them."""
    host = torch.device("cpu")
    return {
        key: value.to(parameter.device if on_device or value.ndim else host, copy=True)
        for key, value in entries.items()
    }


# --- random generators ---


def capture_rng(device: torch.device | str) -> dict[str, Tensor]:
    """State of Python's, NumPy's global, torch's and the device's generators as tensors (15 KB).

    Cheap (tens of microseconds, no device synchronisation): it may be called at the end of each step.
    """
    device = torch.device(device)
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict) and legacy["bit_generator"] == "MT19937", "NumPy's global generator was replaced"
    state: dict[str, Tensor] = {
        "python": torch.from_numpy(np.array([version, *words], dtype=np.int64)),  # [626]: version, 624 words, position
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.append(legacy["state"]["key"], legacy["state"]["pos"]).astype(np.int64)),  # [625]
        "numpy_gauss": torch.tensor([legacy["gauss"]] if legacy["has_gauss"] else [], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Tensor], device: torch.device | str) -> list[str]:
    """Set all generators from `capture_rng`'s tensors.

    Returns the device generators that could not be carried over (a run saved on another kind of device); a missing host
    generator raises CheckpointError.
    """
    device = torch.device(device)
    missing = {"python", "python_gauss", "numpy", "numpy_gauss", "torch"} - state.keys()
    if missing:
        raise CheckpointError(f"the saved random state has no {', '.join(sorted(missing))}")
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *key, position = state["numpy"].tolist()
    gauss = state["numpy_gauss"].tolist()
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, len(gauss), gauss[0] if gauss else 0.0))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])
    return sorted(({device.type} - {"cpu"}) ^ ({"cuda", "mps"} & state.keys()))
