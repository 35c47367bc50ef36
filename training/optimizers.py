"""The optimizers, one row each: what builds it, which parameters it takes, what state it keeps of them.

A row is all it takes to add one: the choices of --optimizer, the memory figures and what a resume expects follow from
it. Torch is imported only once something is built; --help does not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from training.config import Config

Shape = tuple[int, ...]


def like_parameter(shape: Shape) -> Shape:
    """A state tensor of the parameter's shape and dtype."""
    return shape


def counter(shape: Shape) -> Shape:
    """A 0-dim float32 state tensor, on the host unless the optimizer is fused."""
    return ()


def any_parameter(name: str, parameter: nn.Parameter) -> bool:
    return True


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """True for what Muon is made for: square-ish linear maps inside the decoder. Embeddings and MoE routers are not."""
    return parameter.ndim == 2 and ".layers." in name and not name.endswith("mlp.gate.weight")


@dataclass(frozen=True)
class OptimizerRow:
    """One optimizer. `rest` names the row that gets the parameters which this one does not take."""

    kind: Callable[[], Callable[..., Optimizer]]  # gives the class; each class belongs to one row
    options: Callable[[Config, torch.device], dict[str, object]]  # its arguments besides parameters, lr and decay
    state: Mapping[str, Callable[[Shape], Shape]]  # name of a state tensor -> its shape from the parameter's
    takes: Callable[[str, nn.Parameter], bool] = any_parameter
    rest: str = ""

    def state_of(self, parameter: torch.Tensor) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shape and dtype of each state tensor that an update leaves for `parameter`."""
        import torch

        shapes = {key: shape(tuple(parameter.shape)) for key, shape in self.state.items()}
        return {key: (shape, parameter.dtype if shape else torch.float32) for key, shape in shapes.items()}


def adamw_class() -> Callable[..., Optimizer]:
    from torch.optim import AdamW

    return AdamW


def muon_class() -> Callable[..., Optimizer]:
    from torch.optim import Muon

    return Muon


def adamw_options(config: Config, device: torch.device) -> dict[str, object]:
    """`fused` is one kernel for the whole update: 4-6 x the loop on CPU."""
    return {"betas": (config.beta1, config.beta2), "fused": device.type in ("cuda", "cpu")}


def muon_options(config: Config, device: torch.device) -> dict[str, object]:
    """Updates are scaled to AdamW's root mean square (Liu et al. 2025, "Muon is scalable"), so that both follow one
    learning rate."""
    return {"adjust_lr_fn": "match_rms_adamw"}


OPTIMIZERS: dict[str, OptimizerRow] = {
    "adamw": OptimizerRow(
        adamw_class, adamw_options, {"step": counter, "exp_avg": like_parameter, "exp_avg_sq": like_parameter}
    ),
    "muon": OptimizerRow(
        muon_class, muon_options, {"momentum_buffer": like_parameter}, takes=is_hidden_matrix, rest="adamw"
    ),
}


def parameters_by_row(model: nn.Module, name: str) -> list[tuple[OptimizerRow, list[nn.Parameter]]]:
    """Who updates what when --optimizer is `name`; rows that get nothing are left out."""
    left = [(full_name, p) for full_name, p in model.named_parameters() if p.requires_grad]
    found = []
    while name:
        row = OPTIMIZERS[name]
        taken = [p for full_name, p in left if row.takes(full_name, p)]
        left = [(full_name, p) for full_name, p in left if not row.takes(full_name, p)]
        found.append((row, taken))
        name = row.rest
    assert not left, f"no optimizer takes {left[0][0]}: the last row must take any parameter"
    return [(row, taken) for row, taken in found if taken]


def build_optimizers(model: nn.Module, config: Config, device: torch.device) -> list[Optimizer]:
    """What --optimizer names, one optimizer a row that gets parameters. Weight decay falls on matrices only."""
    optimizers = []
    for row, parameters in parameters_by_row(model, config.optimizer):
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        optimizers.append(row.kind()(groups, lr=config.learning_rate, **row.options(config, device)))
    return optimizers


def row_of(optimizer: Optimizer) -> OptimizerRow:
    """The row that an optimizer was built from. Raises LookupError for one that no row builds."""
    for row in OPTIMIZERS.values():
        if row.kind() is type(optimizer):
            return row
    raise LookupError(f"{type(optimizer).__name__} has no row in OPTIMIZERS")


def state_bytes(model: nn.Module, name: str) -> int:
    """Bytes of the optimizer's state for float32 parameters. Counters are left out: four bytes a parameter tensor."""
    return sum(
        4 * math.prod(shape)
        for row, parameters in parameters_by_row(model, name)
        for parameter in parameters
        for shape, _ in row.state_of(parameter).values()
        if shape
    )
