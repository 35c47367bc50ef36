"""Mixture of experts: choose experts per token, run each on its own tokens, keep the load even."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.dtypes import compute_dtype


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
    chosen = routing.experts.view(batch, seq * choices, 1) == torch.arange(count, device=counted.device)
    assigned = (chosen * weight.repeat_interleave(choices, dim=1).unsqueeze(-1)).sum(dim=1)
    n = weight.sum(dim=1).clamp(min=1)
    return (count / choices * (assigned * probability).sum(dim=1) / n).sum()


def run_experts(x: Tensor, routing: Routing, experts: Sequence[Any]) -> Tensor:
    """Weighted sum of the chosen experts' outputs for x [tokens, hidden]; experts are SwiGLU modules of one shape.

    Tokens are sorted by expert, so each expert reads one contiguous slice. An expert without tokens runs on zero rows:
    its gradients are zeros rather than missing, and ranks that exchange gradients stay in step.
    """
    tokens, choices = routing.experts.shape
    sorted_experts, order = routing.experts.flatten().sort(stable=True)  # [tokens * choices]
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends = torch.searchsorted(sorted_experts, torch.arange(len(experts), device=order.device), right=True)
    repeated = x.unsqueeze(1).expand(tokens, choices, x.shape[1]).flatten(0, 1)
    ordered = _Permute.apply(repeated, order, inverse)
    compute = grouped_products if grouped_products_run_on(ordered, experts) else contiguous_slices
    gathered = _Permute.apply(compute(ordered, ends, experts), inverse, order).view(tokens, choices, -1)
    return (gathered * routing.weights.unsqueeze(-1).to(gathered.dtype)).sum(dim=1)


@torch.compiler.disable  # sizes that change with every batch: compiled code would be compiled again and again
def contiguous_slices(ordered: Tensor, ends: Tensor, experts: Sequence[Any]) -> Tensor:
    """Each expert on its own rows of `ordered`; the host must know the counts, which on CUDA makes it wait."""
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([expert(part) for expert, part in zip(experts, ordered.split(counts), strict=True)])


def grouped_products_run_on(ordered: Tensor, experts: Sequence[Any]) -> bool:
    """The grouped kernels take bfloat16, with rows of whole 16 bytes, and are used on Hopper: on Ampere they are a loop
    that waits for the host, on Blackwell an expert without tokens gets a wrong gradient (pytorch issue 172439)."""
    if ordered.device.type != "cuda" or compute_dtype(ordered) != torch.bfloat16:
        return False
    sizes_fit = all(size % 8 == 0 for size in experts[0].gate_proj.weight.shape)
    # Not get_device_capability: a compiler cannot look through that.
    return sizes_fit and torch.cuda.get_device_properties(ordered.device).major == 9


def grouped_products(ordered: Tensor, ends: Tensor, experts: Sequence[Any]) -> Tensor:
    """All experts in two grouped products, without the host knowing the counts; the weights are stacked on the fly."""
    dtype, offsets = compute_dtype(ordered), ends.to(torch.int32)
    gates_ups = [torch.cat((e.gate_proj.weight.to(dtype), e.up_proj.weight.to(dtype))) for e in experts]
    downs = [e.down_proj.weight.to(dtype) for e in experts]
    both = F.grouped_mm(ordered.to(dtype), torch.stack(gates_ups).transpose(1, 2), offs=offsets)
    gate, up = both.chunk(2, dim=-1)
    out = F.grouped_mm(experts[0].activation(gate) * up, torch.stack(downs).transpose(1, 2), offs=offsets)
    return F.dropout(out, experts[0].dropout, experts[0].training)


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
