"""The cross-entropy of a linear head without ever holding all logits: memory for one chunk of rows, whatever the batch.

Gradients are made in the forward pass, while a chunk's logits are at hand, and kept unnormalised: backward only scales
them by the incoming gradient. So the divisor (valid targets of the whole step) and a GradScaler's factor are applied to
a float32 scalar, never to half-precision logits. `torch.nn.functional.linear_cross_entropy` does not serve here: it has
no autocast rule and returns bfloat16 sums that are wrong by up to a percent.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.dtypes import compute_dtype, wide_dtype

IGNORE_INDEX = -100
CHUNK_BYTES = 128 * 2**20  # logits alive at a time
MIN_ROWS, MAX_CHUNKS = 1024, 16  # not on a CPU: smaller products lose speed, and compiled code holds each chunk's own
CPU_BLOCK_BYTES = 4 * 2**20  # float32 softmax at a time: what stays in a core's cache takes half the time


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_rows: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Sum over rows of the loss of `hidden @ weight.T` against `targets`, without the full logits.

    Args:
        hidden: [rows, hidden_size], weight: [vocab, hidden_size], targets: int64 [rows], -100 where there is none.
        chunk_rows: rows whose logits exist at a time; None: see `fitting_rows`.
        label_smoothing: as in `torch.nn.functional.cross_entropy`: that share of the target goes to all tokens alike.
        z_loss: coefficient of logsumexp(logits)^2 per row (PaLM, arXiv:2204.02311, section 5).

    Returns:
        (total, cross_entropy): 0-dim, float32 (float64 for float64 inputs), sums over the valid rows. `total` is what
        gradients flow through; `cross_entropy` is the plain part, the same tensor when there are no extra terms and a
        constant to autograd otherwise. Products run in autocast's dtype where it is on; softmax and sums in float32.
    """
    dtype = compute_dtype(hidden)
    vocab = weight.shape[0]
    rows = chunk_rows or fitting_rows(len(hidden), vocab, dtype, hidden.device.type)
    # A compiler fuses the softmax by itself and a GPU has few, large kernels to run: both take a chunk as one block.
    in_cache = hidden.device.type == "cpu" and not torch.compiler.is_compiling()
    block_rows = max(1, CPU_BLOCK_BYTES // (vocab * wide_dtype(dtype).itemsize)) if in_cache else rows
    make_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    total, cross_entropy = _LinearCrossEntropySum.apply(
        hidden, weight, targets, dtype, rows, block_rows, float(label_smoothing), float(z_loss), make_gradients
    )
    return total, cross_entropy if label_smoothing or z_loss else total


def fitting_rows(rows: int, vocab: int, dtype: torch.dtype, device_type: str) -> int:
    """Rows a chunk: what fits into `CHUNK_BYTES`; for an accelerator at least MIN_ROWS, in at most MAX_CHUNKS."""
    fitting = max(1, CHUNK_BYTES // (vocab * dtype.itemsize))
    return fitting if device_type == "cpu" else max(fitting, MIN_ROWS, math.ceil(rows / MAX_CHUNKS))


class _LinearCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        rows: int,
        block_rows: int,
        smoothing: float,
        z_loss: float,
        make_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        narrow_weight = weight.to(dtype)
        sums = torch.zeros(2, dtype=wide_dtype(dtype), device=hidden.device)  # cross-entropy, extra terms
        grad_hidden: list[Tensor] = []
        # Summed in float32: many chunks would drown small terms in bfloat16, and overflow float16.
        wide = wide_dtype(weight.dtype)
        grad_weight = torch.zeros_like(weight, dtype=wide) if make_gradients and not len(hidden) else None
        for x, chunk_targets in zip(hidden.to(dtype).split(rows), targets.split(rows), strict=True):
            logits = x @ narrow_weight.t()  # [chunk, vocab]
            for block, block_targets in zip(logits.split(block_rows), chunk_targets.split(block_rows), strict=True):
                sums += _block_loss(block, block_targets, smoothing, z_loss, make_gradients)
            if make_gradients:  # `logits` now holds their gradient
                grad_hidden.append((logits @ narrow_weight).to(hidden.dtype))
                product = _weight_gradient(logits, x).to(wide)
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
        if make_gradients:
            ctx.weight_dtype = weight.dtype
            ctx.save_for_backward(torch.cat(grad_hidden) if grad_hidden else torch.zeros_like(hidden), grad_weight)
        cross_entropy = sums[0].clone()
        ctx.mark_non_differentiable(cross_entropy)
        return sums.sum(), cross_entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0]
        # In float32: CUDA rounds a 0-dim factor to the dtype of what it multiplies.
        scaled = (grad_hidden.to(wide_dtype(grad_hidden.dtype)) * scale).to(grad_hidden.dtype)
        return scaled, (grad_weight * scale).to(ctx.weight_dtype), *[None] * 7


def _weight_gradient(grad_logits: Tensor, x: Tensor) -> Tensor:
    """grad_logits.T @ x for [rows, vocab] and [rows, hidden], at least float32 where x is float16.

    A sum of `rows` products may leave float16 (65,504), and no loss scale applied later brings it back. So x is made
    smaller by a power of two, which rounds nothing, until rows x |x| stays below 2^15; |grad_logits| is about 1.
    """
    if x.dtype != torch.float16:
        return grad_logits.t() @ x
    largest_sum = x.abs().amax().float() * len(x)
    shrink = torch.exp2(-(largest_sum / 2**15).log2().ceil().clamp(min=0))
    return (grad_logits.t() @ (x.float() * shrink).half()).float() / shrink


def _block_loss(logits: Tensor, targets: Tensor, smoothing: float, z_loss: float, make_gradients: bool) -> Tensor:
    """[cross-entropy sum, sum of the extra terms] of logits [rows, vocab], which their gradient then overwrites."""
    vocab = logits.shape[1]
    wide_logits = logits.to(wide_dtype(logits.dtype))
    valid = targets != IGNORE_INDEX
    index = torch.where(valid, targets, 0).unsqueeze(1)  # [rows, 1]
    log_probs = F.log_softmax(wide_logits, dim=1)
    target_log_probs = log_probs.gather(1, index).squeeze(1)
    logsumexp = wide_logits.gather(1, index).squeeze(1) - target_log_probs
    extra = torch.zeros_like(logsumexp)
    if smoothing:
        # (1 - s) ce + s (mean over the vocabulary of -log p) = ce + s (log p_target - mean log p)
        extra = extra + smoothing * (target_log_probs - log_probs.mean(dim=1))
    if z_loss:
        extra = extra + z_loss * logsumexp.square()
    sums = torch.where(valid, torch.stack((-target_log_probs, extra)), 0).sum(dim=1)
    if not make_gradients:
        return sums
    # d/dlogits: p (1 + 2 z logsumexp) - (1 - s) at the target - s / vocab everywhere; nothing for a row without target
    scale = valid.to(log_probs.dtype)
    grad = log_probs.exp_().mul_((scale * (1 + 2 * z_loss * logsumexp)).unsqueeze(1))
    if smoothing:
        grad.sub_((scale * (smoothing / vocab)).unsqueeze(1))
    at_target = (scale * (smoothing - 1)).unsqueeze(1)
    if torch.compiler.is_compiling():  # fuses with the rest
        grad = grad + torch.where(torch.arange(vocab, device=grad.device) == index, at_target, 0)
    else:  # one target a row: no atomic additions, no second [rows, vocab]
        grad.scatter_(1, index, grad.gather(1, index) + at_target)
    logits.copy_(grad)
    return sums
