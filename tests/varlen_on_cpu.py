"""A stand-in for the flash kernels of packed rows, for a CPU: opaque to compilers and dispatch modes as they are, right
in value and gradient, and like them it leaves what lies beyond `longest` in a segment uninitialised (here: NaN)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

CALLS: list[tuple[int, int]] = []  # (segments, longest) of each forward


def _segments(boundaries: Tensor, longest: int) -> Iterator[slice]:
    bounds = boundaries.tolist()
    yield from (slice(start, min(end, start + longest)) for start, end in pairwise(bounds))


def _by_head(x: Tensor, part: slice, heads: int) -> Tensor:
    """[heads, length, head_dim] in float32; each key head once for every query head that uses it."""
    return x[part].transpose(0, 1).repeat_interleave(heads // x.shape[1], dim=0).float()


def _probabilities(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)


@torch.library.custom_op("tests::varlen", mutates_args=())
def _varlen(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int) -> Tensor:
    CALLS.append((len(boundaries) - 1, longest))
    out, heads = torch.full_like(q, float("nan")), q.shape[1]
    for part in _segments(boundaries, longest):
        query, key, value = (_by_head(x, part, heads) for x in (q, k, v))
        out[part] = (_probabilities(query, key) @ value).transpose(0, 1).to(q.dtype)
    return out


@torch.library.custom_op("tests::varlen_backward", mutates_args=())
def _varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    grads, heads, scale = [torch.full_like(x, float("nan")) for x in (q, k, v)], q.shape[1], q.shape[2] ** -0.5
    for part in _segments(boundaries, longest):
        g, query, key, value = (_by_head(x, part, heads) for x in (grad, q, k, v))
        p = _probabilities(query, key)
        d = g @ value.mT
        d = p * (d - (d * p).sum(-1, keepdim=True)) * scale
        for whole, found in zip(grads, (d @ key, d.mT @ query, p.mT @ g), strict=True):
            shared = found.unflatten(0, (whole.shape[1], -1)).sum(1)  # over the query heads of a key head
            whole[part] = shared.transpose(0, 1).to(whole.dtype)
    return grads[0], grads[1], grads[2]


@_varlen.register_fake
def _(q, k, v, boundaries, longest):
    return torch.empty_like(q)


@_varlen_backward.register_fake
def _(grad, q, k, v, boundaries, longest):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx, inputs, output):
    *tensors, ctx.longest = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    return *_varlen_backward(grad, *ctx.saved_tensors, ctx.longest), None, None


_varlen.register_autograd(_backward, setup_context=_keep)


@pytest.fixture
def varlen_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """`varlen_attn` is the stand-in; the list fills with (segments, longest) of its calls."""

    def stand_in(q, k, v, q_bounds, k_bounds, q_longest, k_longest, *, window_size, enable_gqa=False):
        assert q_bounds is k_bounds and q_bounds.dtype == torch.int32 and q_longest == k_longest
        assert window_size == (-1, 0) and enable_gqa == (q.shape[1] != k.shape[1])
        return _varlen(q, k, v, q_bounds, q_longest)

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    CALLS.clear()
    return CALLS
