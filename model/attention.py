"""Causal attention inside the segments of a batch: what all blocks share, and the kernels behind it.

A packed row holds several segments (a document, or a part of one), and no token may see another segment. Three ways:
  sdpa       one mask [batch, 1, seq, seq] for `scaled_dot_product_attention`; runs everywhere.
  segments  matrix products segment by segment (model/segment_attention.py); CPU, no attention dropout.
  varlen     cumulative segment lengths for flash kernels that never look outside a segment; CUDA, half precision,
             no attention dropout.
"""

import inspect
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

from model.segment_attention import segment_attention

BACKENDS = ("auto", "sdpa", "segments", "varlen")
# Up to torch 2.11 the flash kernels took unequal head counts without being told.
VARLEN_GQA: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}
)


class AttentionPattern(NamedTuple):
    """Who attends to whom in this batch; made once and shared by all blocks."""

    mask: Tensor | None = None  # to [batch, heads, queries, keys]: bool, True = may attend, or added to the scores
    causal: bool = False  # plain causal attention without a mask
    segment_ids: Tensor | None = None  # [batch, seq] (segments)
    boundaries: Tensor | None = None  # int32 [segments + 1], cumulative lengths over the flattened batch (varlen)
    longest: int = 0  # no segment and no run of padding is longer (varlen)


def segment_mask(segment_ids: Tensor) -> Tensor:
    """[batch, seq] segment numbers -> bool [batch, 1, seq, seq]: same segment and not in the future.

    Padding (-1) counts as a segment of its own, so that no row of the mask is empty.
    """
    length = segment_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril()
    same = segment_ids.unsqueeze(2) == segment_ids.unsqueeze(1)
    return (same & causal).unsqueeze(1)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The bool mask as what is added to scores in `dtype`, that of q. Each layer would otherwise make one and keep it
    for backward, since the kernels know no other kind."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def segment_boundaries(segment_ids: Tensor) -> Tensor:
    """Cumulative segment lengths of a packed batch for flash kernels: int32 [segments + 1], from 0 to batch x seq.

    A run of padding (-1) counts as a segment. Counting the segments of a CUDA tensor makes the host wait, so a training
    loop counts on the host's copy and passes the result along.
    """
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]  # a new row always starts a segment
    return F.pad(starts.flatten().nonzero().flatten(), (0, 1), value=segment_ids.numel()).to(torch.int32)


def varlen_pattern(boundaries: Tensor, longest: int, seq: int, compiled: bool) -> AttentionPattern:
    """For the varlen kernels. Rows of a segment beyond `longest` would be left uninitialised by them, padding's too.

    A compiled block takes any number of segments as one shape, and only three lengths: each costs it a compilation, and
    so few that training and evaluation together stay below torch's limit of eight.
    """
    if compiled:
        torch._dynamo.maybe_mark_dynamic(boundaries, 0)
        lengths = sorted({min(seq, max(128, seq // part)) for part in (1, 4, 16)})
        longest = next(length for length in lengths if length >= longest)
    return AttentionPattern(boundaries=boundaries, longest=longest)


def cached_mask(attention_mask: Tensor | None, queries: int, keys: int, device: torch.device) -> Tensor:
    """bool [batch or 1, 1, queries, keys]: causal, queries last, keys limited by attention_mask [batch, keys].

    A left-padded position sees itself: an empty row has no softmax, and nothing real ever looks there.
    """
    key_index = torch.arange(keys, device=device)
    query_index = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    causal = key_index <= query_index
    if attention_mask is None:
        return causal[None, None]
    allowed = causal & attention_mask.bool()[:, None, :]
    return (allowed | (key_index == query_index)).unsqueeze(1)


def causal_pattern(input_ids: Tensor, attention_mask: Tensor | None, past: int) -> AttentionPattern:
    """Without segments: each token sees `past` cached ones and those of its own row up to itself, but no padding."""
    length = input_ids.shape[1]
    if attention_mask is not None and attention_mask.ndim == 4:
        return AttentionPattern(mask=attention_mask)
    if attention_mask is None and (past == 0 or length == 1):
        return AttentionPattern(causal=past == 0)
    return AttentionPattern(mask=cached_mask(attention_mask, length, past + length, input_ids.device))


def choose_backend(requested: str, device: torch.device, dtype: torch.dtype, dropout: float, head_dim: int = 64) -> str:
    """`auto` takes the fastest that runs here: segments on a CPU, varlen on CUDA from Ampere on in half precision and
    with heads that flash kernels take."""
    if requested not in BACKENDS:
        raise ValueError(f"attention_backend={requested!r} is unknown: use one of {', '.join(BACKENDS)}")
    if requested != "auto":
        return requested
    if device.type == "cpu" and not dropout:
        return "segments"
    flash_takes = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256
    if device.type == "cuda" and not dropout and flash_takes:
        return "varlen" if torch.cuda.get_device_capability(device) >= (8, 0) else "sdpa"
    return "sdpa"


def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float = 0.0, fused: bool = True
) -> Tensor:
    """q [batch, queries, heads, head_dim], k and v [batch, keys, kv_heads, head_dim] -> the shape of q."""
    if pattern.segment_ids is not None:
        return segment_attention(q, k, v, pattern.segment_ids)
    if pattern.boundaries is not None:
        return _attend_varlen(q, k, v, pattern)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    share_heads = q.shape[1] != k.shape[1]
    if share_heads and q.device.type != "cpu":
        # With a mask, no fast CUDA kernel takes unequal head counts: copying K and V beats the silent slow path.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        share_heads = False
    with nullcontext() if fused else sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=pattern.mask, dropout_p=dropout, is_causal=pattern.causal, enable_gqa=share_heads
        )
    return out.transpose(1, 2)


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> Tensor:
    assert pattern.boundaries is not None, "the varlen kernels need cumulative segment lengths"
    out = varlen.varlen_attn(
        q.flatten(0, 1),  # [batch * seq, heads, head_dim]
        k.flatten(0, 1),
        v.flatten(0, 1),
        pattern.boundaries,
        pattern.boundaries,
        pattern.longest,
        pattern.longest,
        window_size=(-1, 0),  # causal
        **(VARLEN_GQA if q.shape[2] != k.shape[2] else {}),
    )
    assert isinstance(out, Tensor), "no auxiliary output was asked for"
    return out.view_as(q)
