"""What this trainer's speed is held against: pretraining as small trainers usually write it.

One document a row, padded or cut, tokenised when it is fetched; repeated keys and values, norms in Python, causal
attention over the whole row, all logits at once; AdamW as torch gives it; float32 on a CPU, plain autocast on CUDA;
each micro-batch's mean loss divided by the accumulation steps. Same architecture and parameter names as the trainer's
model, so that either one's weights can be evaluated by the other.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

ROW = 340  # MiniMind's default row length


@dataclass(frozen=True)
class Shape:
    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 6400
    rope_theta: float = 1e6


class PlainNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class PlainAttention(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.heads, self.kv_heads, self.size = s.heads, s.kv_heads, s.hidden // s.heads
        self.q_proj = nn.Linear(s.hidden, s.heads * self.size, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(s.heads * self.size, s.hidden, bias=False)
        self.q_norm, self.k_norm = PlainNorm(self.size), PlainNorm(self.size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, seq, self.heads, self.size))
        k = self.k_norm(self.k_proj(x).view(batch, seq, self.kv_heads, self.size))
        v = self.v_proj(x).view(batch, seq, self.kv_heads, self.size)
        q, k = (y * cos + rotate_half(y) * sin for y in (q, k))
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=2) for y in (k, v))
        q, k, v = (y.to(v.dtype).transpose(1, 2) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))


class PlainFeedForward(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        inner = math.ceil(s.hidden * math.pi / 64) * 64
        self.gate_proj = nn.Linear(s.hidden, inner, bias=False)
        self.up_proj = nn.Linear(s.hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainBlock(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.self_attn, self.mlp = PlainAttention(s), PlainFeedForward(s)
        self.input_layernorm, self.post_attention_layernorm = PlainNorm(s.hidden), PlainNorm(s.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainDecoder(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(PlainBlock(s) for _ in range(s.layers))
        self.norm = PlainNorm(s.hidden)


class PlainModel(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.shape, self.model = s, PlainDecoder(s)
        self.lm_head = nn.Linear(s.hidden, s.vocab, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        size = self.shape.hidden // self.shape.heads
        angles = torch.arange(input_ids.shape[1], device=input_ids.device)[:, None] / self.shape.rope_theta ** (
            torch.arange(0, size, 2, device=input_ids.device) / size
        )
        cos, sin = (torch.cat((f(angles), f(angles)), dim=-1)[None, :, None, :] for f in (torch.cos, torch.sin))
        x = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.model.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


class PlainDataset(Dataset):
    """Rows [bos, tokens cut to length - 2, eos, padding...]; labels are the ids with padding left out."""

    def __init__(self, path: str | Path, tokenizer: Any, length: int = ROW):
        with open(path, encoding="utf-8", newline="\n") as file:
            self.texts = [json.loads(line)["text"] for line in file if line.strip()]
        self.tokenizer, self.length = tokenizer, length

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        t = self.tokenizer
        ids = [t.bos_id, *t.encode_batch([self.texts[index]])[0][: self.length - 2], t.eos_id]
        row = torch.tensor(ids + [t.pad_id] * (self.length - len(ids)))
        return row, torch.where(torch.arange(self.length) < len(ids), row, -100)


def train_plain(
    shape: Shape,
    dataset: Dataset,
    device: torch.device,
    batch_size: int,
    accumulation_steps: int,
    steps: int,
    after_step: Callable[[int, int, float], object],
    learning_rate: float = 5e-4,
    seed: int = 42,
) -> PlainModel:
    """Train `steps` updates along a cosine; after each, `after_step(step, valid targets, loss)` is called."""
    torch.manual_seed(seed)
    model = PlainModel(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    order = RandomSampler(dataset, num_samples=steps * accumulation_steps * batch_size)  # type: ignore[arg-type]
    rows = iter(DataLoader(dataset, batch_size, sampler=order, pin_memory=device.type == "cuda"))
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - 1) / steps)))
        targets = torch.zeros((), dtype=torch.long, device=device)
        for _ in range(accumulation_steps):
            input_ids, labels = (x.to(device) for x in next(rows))
            with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
                loss = model(input_ids, labels) / accumulation_steps
            loss.backward()
            targets += (labels[:, 1:] != -100).sum()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after_step(step, int(targets), loss.item() * accumulation_steps)
    return model


class StepClock:
    """Wall and processor seconds and targets of each step, as `after_step` of `train_plain`."""

    def __init__(self) -> None:
        self.times, self.targets = [(time.perf_counter(), time.process_time())], [0]

    def __call__(self, step: int, targets: int, loss: float) -> None:
        self.times.append((time.perf_counter(), time.process_time()))
        self.targets.append(targets)
