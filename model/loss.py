"""The cross-entropy of a linear head without ever holding all logits: memory for one chunk of rows, whatever the batch.

Gradients are made in the forward pass, while a chunk's logits are at hand, and kept unnormalised: backward only scales
them by the incoming gradient. So the divisor (valid targets of the whole step) and a GradScaler's factor are applied to
a float32 scalar, never to half-precision logits. `torch.nn.functional.linear_cross_entropy` does not serve here: it has
no autocast rule and returns bfloat16 sums that are wrong by up to a percent.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.dtypes import compute_dtype, wide_dtype

IGNORE_INDEX = -100
CHUNK_BYTES = 128 * 2**20  # float32 logits alive at a time; below ~1,000 rows the products lose speed


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
        chunk_rows: rows whose logits exist at a time; None takes what fits into `CHUNK_BYTES`.
        label_smoothing: as in `torch.nn.functional.cross_entropy`: that share of the target goes to all tokens alike.
        z_loss: coefficient of logsumexp(logits)^2 per row (PaLM, arXiv:2204.02311, section 5).

    Returns:
        (total, cross_entropy): 0-dim, float32 (float64 for float64 inputs), sums over the valid rows. `total` is what
        gradients flow through; `cross_entropy` is the plain part, the same tensor when there are no extra terms and a
        constant to autograd otherwise. Products run in autocast's dtype where it is on; softmax and sums in float32.
    """
    dtype = compute_dtype(hidden)
    rows = chunk_rows or max(1, CHUNK_BYTES // (weight.shape[0] * wide_dtype(dtype).itemsize))
    make_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    total, cross_entropy = _LinearCrossEntropySum.apply(
        hidden, weight, targets, dtype, rows, float(label_smoothing), float(z_loss), make_gradients
    )
    return total, cross_entropy if label_smoothing or z_loss else total


class _LinearCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        rows: int,
        smoothing: float,
        z_loss: float,
        make_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        narrow_hidden, narrow_weight = hidden.to(dtype), weight.to(dtype)
        wide = wide_dtype(dtype)
        cross_entropy = torch.zeros((), dtype=wide, device=hidden.device)
        extra = torch.zeros_like(cross_entropy)
        grad_hidden, grad_weight = [], None
        for start in range(0, hidden.shape[0], rows):
            x = narrow_hidden[start : start + rows]
            logits = (x @ narrow_weight.t()).to(wide)  # [chunk, vocab]
            chunk_loss, chunk_extra, grad_logits = _chunk_loss(
                logits, targets[start : start + rows], smoothing, z_loss, make_gradients
            )
            cross_entropy, extra = cross_entropy + chunk_loss, extra + chunk_extra
            if grad_logits is not None:
                narrow_grad = grad_logits.to(dtype)
                grad_hidden.append((narrow_grad @ narrow_weight).to(hidden.dtype))
                product = (narrow_grad.t() @ x).to(weight.dtype)
                # Summed in the weight's own precision: many chunks would drown small terms in bfloat16.
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
        if make_gradients:
            ctx.save_for_backward(
                torch.cat(grad_hidden) if grad_hidden else torch.zeros_like(hidden),
                torch.zeros_like(weight) if grad_weight is None else grad_weight,
            )
        ctx.mark_non_differentiable(cross_entropy)
        return cross_entropy + extra, cross_entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0]
        return grad_hidden * scale, grad_weight * scale, None, None, None, None, None, None


def _chunk_loss(
    logits: Tensor, targets: Tensor, smoothing: float, z_loss: float, make_gradients: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cross-entropy sum, sum of the extra terms and d(both)/d(logits) of one chunk of logits [rows, vocab]."""
    valid = targets != IGNORE_INDEX
    index = torch.where(valid, targets, 0).unsqueeze(1)  # [rows, 1]
    target_logits = logits.gather(1, index).squeeze(1)
    log_probs = F.log_softmax(logits, dim=1)
    target_log_probs = log_probs.gather(1, index).squeeze(1)
    zero = torch.zeros_like(target_logits)
    cross_entropy = torch.where(valid, -target_log_probs, zero).sum()
    extra_rows = zero
    logsumexp = target_logits - target_log_probs
    if smoothing:
        # (1 - s) ce + s (mean over the vocabulary of -log p) = ce + s (log p_target - mean log p)
        extra_rows = extra_rows + smoothing * (target_log_probs - log_probs.mean(dim=1))
    if z_loss:
        extra_rows = extra_rows + z_loss * logsumexp.square()
    extra = torch.where(valid, extra_rows, zero).sum()
    if not make_gradients:
        return cross_entropy, extra, None
    grad = log_probs.exp_()
    row_scale = valid.to(grad.dtype)
    if z_loss:
        row_scale = row_scale * (1 + 2 * z_loss * logsumexp)
    grad.mul_(row_scale.unsqueeze(1))
    hit = (valid.to(grad.dtype) * (smoothing - 1)).unsqueeze(1)
    grad.scatter_add_(1, index, hit)
    if smoothing:
        grad.sub_((valid.to(grad.dtype) * (smoothing / grad.shape[1])).unsqueeze(1))
    return cross_entropy, extra, grad
