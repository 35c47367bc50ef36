"""Causal attention inside each document of a packed batch, document by document, for the CPU.

A masked kernel computes all seq x seq scores of a row and throws most of them away; here only the pairs that may attend
are computed, as plain matrix products. On a CPU with bfloat16 products this takes a fifth to a half of the time of
`scaled_dot_product_attention` with a document mask (see benchmarks/RESULTS.md). Scores and softmax are float32 (float64
for float64 inputs), the products with probabilities run in the inputs' dtype, as in flash attention. A document gets
bit for bit the same result wherever it lies in a batch.

It is a registered operator, so that a compiled model calls it as it stands: its loops depend on the data.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.dtypes import wide_dtype

BLOCK = 256  # queries at a time: a long document's future keys are not computed, and scores stay in the cache


class Piece(NamedTuple):
    """Queries first:last of the flattened batch and their keys start:last; where the buffer holds the probabilities."""

    start: int
    first: int
    last: int
    offset: int


def document_attention(q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor) -> Tensor:
    """q [batch, seq, heads, head_dim], k, v [batch, seq, kv_heads, head_dim], document_ids [batch, seq], -1 = padding.

    Returns [batch, seq, heads, head_dim], zero at padding. Query head h uses key head h // (heads / kv_heads).
    """
    return _document_attention(q, k, v, document_ids)[0]


def _pieces(document_ids: Tensor, heads: int) -> Iterator[Piece]:
    """Documents of the flattened batch cut into blocks of queries; a new row starts a new document."""
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    flat = document_ids.flatten()
    edges = starts.flatten().nonzero().flatten()
    real = (flat[edges] >= 0).tolist()
    bounds = [*edges.tolist(), flat.numel()]
    offset = 0
    for start, end, is_real in zip(bounds[:-1], bounds[1:], real, strict=True):
        for first in range(start, end if is_real else start, BLOCK):
            last = min(first + BLOCK, end)
            yield Piece(start, first, last, offset)
            offset += heads * (last - first) * (last - start)


def _by_head(x: Tensor, kv_heads: int) -> Tensor:
    """[length, heads, head_dim] -> [kv_heads, length * group, head_dim]: the queries of one key head as one matrix."""
    length, heads, head_dim = x.shape
    return x.reshape(length, kv_heads, heads // kv_heads * head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)


def _by_position(x: Tensor, heads: int) -> Tensor:
    """The inverse of `_by_head`: -> [length, heads, head_dim] (a view)."""
    kv_heads, rows, head_dim = x.shape
    group = heads // kv_heads
    return (
        x.view(kv_heads, rows // group, group * head_dim).transpose(0, 1).unflatten(-1, (group, head_dim)).flatten(1, 2)
    )


def _probability_slice(buffer: Tensor, piece: Piece, heads: int, kv_heads: int) -> Tensor:
    queries, keys = piece.last - piece.first, piece.last - piece.start
    part = buffer.view(-1)[piece.offset : piece.offset + heads * queries * keys]
    return part.view(kv_heads, queries * (heads // kv_heads), keys)


@torch.library.custom_op("minimind::document_attention", mutates_args=(), device_types="cpu")
def _document_attention(q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor) -> tuple[Tensor, Tensor]:
    batch, seq, heads, head_dim = q.shape
    kv_heads, wide = k.shape[2], wide_dtype(q.dtype)
    out = torch.zeros(batch, seq, heads, head_dim, dtype=q.dtype)
    # Room for the longest documents; only what is written costs memory. Kept for backward.
    buffer = torch.empty(batch * seq, heads, seq, dtype=q.dtype)
    flat_q, flat_k, flat_v, flat_out = (x.flatten(0, 1) for x in (q, k, v, out))
    size = min(BLOCK, seq)
    future = torch.full((size, size), float("-inf"), dtype=wide).triu(1).repeat_interleave(heads // kv_heads, dim=0)
    with torch.autocast("cpu", enabled=False):  # float32 scores means float32
        for piece in _pieces(document_ids, heads):
            start, first, last, _ = piece
            query = _by_head(flat_q[first:last], kv_heads).to(wide)
            scores = (query * head_dim**-0.5) @ flat_k[start:last].permute(1, 2, 0).to(wide)
            scores[:, :, first - start :] += future[: query.shape[1], : last - first]
            probabilities = _probability_slice(buffer, piece, heads, kv_heads)
            probabilities.copy_(scores.softmax(dim=-1))
            flat_out[first:last] = _by_position(probabilities @ flat_v[start:last].transpose(0, 1), heads)
    return out, buffer


@torch.library.custom_op("minimind::document_attention_backward", mutates_args=(), device_types="cpu")
def _document_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor, buffer: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
    grads = tuple(torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
    flat_grad, flat_q, flat_k, flat_v, grad_q, grad_k, grad_v = (x.flatten(0, 1) for x in (grad, q, k, v, *grads))
    for piece in _pieces(document_ids, heads):
        start, first, last, _ = piece
        probabilities = _probability_slice(buffer, piece, heads, kv_heads)
        grad_out = _by_head(flat_grad[first:last], kv_heads)
        grad_probabilities = grad_out @ flat_v[start:last].permute(1, 2, 0)
        grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, probabilities.dtype).mul_(
            scale
        )
        grad_q[first:last] = _by_position(grad_scores @ flat_k[start:last].transpose(0, 1), heads)
        grad_k[start:last] += (grad_scores.transpose(1, 2) @ _by_head(flat_q[first:last], kv_heads)).transpose(0, 1)
        grad_v[start:last] += (probabilities.transpose(1, 2) @ grad_out).transpose(0, 1)
    return grads[0], grads[1], grads[2]


@_document_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch * seq, heads, seq)


@_document_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # nothing flows back through the probabilities
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    return *_document_attention_backward(grad, *ctx.saved_tensors), None


_document_attention.register_autograd(_backward, setup_context=_keep_for_backward)
