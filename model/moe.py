"""Mixture of experts: choose experts per token, run each on its own tokens, keep the load even."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """probabilities [tokens, experts]; weights and experts [tokens, choices] of the chosen ones."""

    probabilities: Tensor
    weights: Tensor
    experts: Tensor


def route(logits: Tensor, choices: int, normalise: bool) -> Routing:
    """logits [tokens, experts], at least float32 -> the `choices` most probable experts of each token."""
    probabilities = logits.softmax(dim=-1)
    weights, experts = probabilities.topk(choices, dim=-1)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routing(probabilities, weights, experts)


def balance_loss_sum(routing: Routing, counted: Tensor) -> Tensor:
    """Sum over rows of n * experts * sum_e f_e P_e (Switch Transformer, arXiv:2101.03961, section 2.2, taken per row).

    `counted` [batch, seq]: positions with a target. n is their number in the row, f_e the share of the row's
    (token, choice) pairs that went to expert e, P_e the mean probability of e. Per row, so that any split of the same
    rows into micro-batches and ranks has the same sum. 0 for a row that counts nothing.
    """
    batch, seq = counted.shape
    count, choices = routing.probabilities.shape[-1], routing.experts.shape[-1]
    weight = counted.to(routing.probabilities.dtype)
    # n * P and n * choices * f, both [batch, experts]
    probability = (routing.probabilities.view(batch, seq, count) * weight.unsqueeze(-1)).sum(dim=1)
    assigned = torch.zeros_like(probability).scatter_add_(
        1, routing.experts.view(batch, seq * choices), weight.repeat_interleave(choices, dim=1)
    )
    n = weight.sum(dim=1).clamp(min=1)
    return (count / choices * (assigned * probability).sum(dim=1) / n).sum()


def run_experts(x: Tensor, routing: Routing, experts: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """Weighted sum of the chosen experts' outputs for x [tokens, hidden].

    Tokens are sorted by expert, so each expert reads one contiguous slice. An expert without tokens runs on zero rows:
    its gradients are zeros rather than missing, and ranks that exchange gradients stay in step.
    """
    tokens, choices = routing.experts.shape
    order = routing.experts.flatten().argsort(stable=True)  # [tokens * choices]
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    repeated = x.unsqueeze(1).expand(tokens, choices, x.shape[1]).flatten(0, 1)
    ordered = _Permute.apply(repeated, order, inverse)
    counts = routing.experts.flatten().bincount(minlength=len(experts)).tolist()  # host sync on CUDA
    outputs = [expert(part) for expert, part in zip(experts, ordered.split(counts), strict=True)]
    gathered = _Permute.apply(torch.cat(outputs), inverse, order).view(tokens, choices, -1)
    return (gathered * routing.weights.unsqueeze(-1).to(gathered.dtype)).sum(dim=1)


class _Permute(torch.autograd.Function):
    """x[order] whose backward is grad[inverse]: a plain gather where indexing would scatter into zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (inverse,) = ctx.saved_tensors
        return grad_outputs[0][inverse], None, None
