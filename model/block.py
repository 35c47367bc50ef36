"""A decoder block: pre-norm, grouped-query attention with normalised q and k, SwiGLU or a mixture of experts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from model.attention import AttentionPattern, attend
from model.configuration import MiniMindConfig
from model.dtypes import compute_dtype, wide_dtype
from model.moe import balance_loss_sum, route, run_experts
from model.rotary import rotate


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467) in at least float32, handed on in the products' dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = wide_dtype(x.dtype)
        normed = F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        return normed.to(compute_dtype(x))  # cast once here, or autocast would cast again for each product


class ResidualLinear(nn.Linear):
    """A projection back into the residual stream: initialised smaller, since 2 x layers of them add up there."""


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245) with q and k normalised per head, as in Qwen3."""

    def __init__(self, config: MiniMindConfig, layer_index: int):
        super().__init__()
        head_dim = self.head_dim = config.head_dim
        heads, kv_heads = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        self.layer_index = layer_index
        self.dropout, self.fused = config.dropout, config.flash_attn
        self.q_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads, bias=False)
        self.o_proj = ResidualLinear(heads, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], pattern: AttentionPattern, cache: Cache | None
    ) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))  # [batch, seq, heads, head_dim]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rotate(norm(y), rotary).to(v.dtype) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        if cache is not None:
            k, v = cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_index)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        out = attend(q, k, v, pattern, self.dropout if self.training else 0.0, self.fused)
        return F.dropout(self.o_proj(out.flatten(-2)), self.dropout, self.training)


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(act(gate(x)) * up(x))."""

    def __init__(self, config: MiniMindConfig, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = ResidualLinear(intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.gate_proj(x)) * self.up_proj(x)
        return F.dropout(self.down_proj(hidden), self.dropout, self.training)


class MoEFeedForward(nn.Module):
    """A router and its experts: each token goes through the `num_experts_per_tok` most probable ones."""

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.choices, self.normalise = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            FeedForward(config, config.moe_intermediate_size) for _ in range(config.num_experts)
        )

    def forward(self, x: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [batch, seq, hidden] -> the same, and the balancing sum over positions `counted` (None: no such sum)."""
        tokens = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):  # near ties are decided in float32, a cheap product
            wide = wide_dtype(x.dtype)
            routing = route(F.linear(tokens.to(wide), self.gate.weight.to(wide)), self.choices, self.normalise)
        balance = None if counted is None else balance_loss_sum(routing, counted)
        return run_experts(tokens, routing, list(self.experts)).view_as(x), balance


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); also the balancing sum of its experts, if it has any."""

    def __init__(self, config: MiniMindConfig, layer_index: int):
        super().__init__()
        self.self_attn = Attention(config, layer_index)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoEFeedForward(config) if config.use_moe else FeedForward(config, config.intermediate_size)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        pattern: AttentionPattern,
        cache: Cache | None = None,
        counted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        x = x + self.self_attn(self.input_layernorm(x), rotary, pattern, cache)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MoEFeedForward):
            out, balance = self.mlp(normed, counted)
            return x + out, balance
        return x + self.mlp(normed), None
