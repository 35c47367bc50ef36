"""Optimizers: what each is built from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


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
