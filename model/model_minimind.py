"""MiniMind's decoder: pre-norm, grouped-query attention with normalised q and k, rotary positions, SwiGLU or experts.

Parameter names are Qwen3's, so weights go back and forth between this file, MiniMind and Hugging Face unchanged.
"""

import difflib
import math
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, initialization
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import ModelOutput

from model.attention import (
    AttentionPlan,
    attend,
    cached_mask,
    choose_backend,
    rotary_frequencies,
    rotary_table,
    rotate,
    segment_boundaries,
    segment_mask,
)
from model.dtypes import compute_dtype, wide_dtype
from model.loss import IGNORE_INDEX, linear_cross_entropy_sum
from model.moe import balance_loss_sum, route, run_experts

YARN = {
    "type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 2048,
    "beta_fast": 32,
    "beta_slow": 1,
    "attention_factor": 1.0,
}


class MiniMindConfig(PretrainedConfig):
    """Shape and constants of the model; names and defaults are MiniMind's. Raises ValueError on what cannot work."""

    model_type = "minimind"

    hidden_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    intermediate_size: int = 0  # 0: hidden_size x pi, rounded up to a multiple of 64
    vocab_size: int = 6400
    max_position_embeddings: int = 32768
    rope_theta: float = 1e6
    inference_rope_scaling: bool = False  # YaRN: longer contexts than trained on
    rope_scaling: dict | None = None
    rms_norm_eps: float = 1e-6
    dropout: float = 0.0
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    flash_attn: bool = True  # False: the unfused reference attention
    use_cache: bool = True
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    pad_token_id: int | None = 0
    use_moe: bool = False
    num_experts: int = 4
    num_experts_per_tok: int = 1
    moe_intermediate_size: int = 0  # 0: intermediate_size
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 5e-4

    def __post_init__(self, **unknown: Any) -> None:
        self._refuse_misspelt(unknown)
        problems = self._problems()
        if problems:
            raise ValueError("; ".join(problems))
        if not self.head_dim:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if not self.intermediate_size:
            self.intermediate_size = math.ceil(self.hidden_size * math.pi / 64) * 64
        if not self.moe_intermediate_size:
            self.moe_intermediate_size = self.intermediate_size
        if self.inference_rope_scaling and self.rope_scaling is None:
            self.rope_scaling = dict(YARN)
        super().__post_init__(**unknown)

    def _refuse_misspelt(self, unknown: dict[str, Any]) -> None:
        """Other names are kept, as transformers does: each of its releases writes more of them into a config.json."""
        for name in unknown:
            if near := difflib.get_close_matches(name, [field.name for field in fields(type(self))], n=1, cutoff=0.85):
                raise ValueError(f"MiniMindConfig has no field {name!r}: did you mean {near[0]!r}?")

    def _problems(self) -> list[str]:
        problems = []
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
            if getattr(self, name) < 1:
                problems.append(f"{name}={getattr(self, name)} must be at least 1")
        if problems:
            return problems
        head_dim = self.head_dim or self.hidden_size // heads
        if not self.head_dim and self.hidden_size % heads:
            problems.append(f"hidden_size={self.hidden_size} is no multiple of num_attention_heads={heads}")
        elif head_dim % 2:
            problems.append(f"head_dim={head_dim} is odd, and rotary positions turn pairs of dimensions")
        if heads % kv_heads:
            problems.append(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
        if self.hidden_act not in ACT2FN:
            problems.append(f"hidden_act={self.hidden_act!r} is unknown: use silu, gelu or relu")
        if self.use_moe and not 1 <= self.num_experts_per_tok <= self.num_experts:
            problems.append(
                f"num_experts_per_tok={self.num_experts_per_tok} must lie between 1 and num_experts={self.num_experts}"
            )
        if self.rope_scaling is not None and not self.inference_rope_scaling:
            problems.append("rope_scaling needs inference_rope_scaling=True")
        return problems


@dataclass
class MiniMindOutput(ModelOutput):
    """What forward returns. Losses are 0-dim float32 (float64 for a float64 model), each a sum / target_count.

    loss = logits_loss (the plain cross-entropy) + label smoothing and z-loss terms + aux_loss.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None  # [batch, seq, vocab]; None where `targets` were given
    cache: Cache | None = None
    logits_loss: Tensor | None = None
    aux_loss: Tensor | None = None


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

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], plan: AttentionPlan, cache: Cache | None) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))  # [batch, seq, heads, head_dim]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rotate(norm(y), rotary).to(v.dtype) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        if cache is not None:
            k, v = cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_index)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        out = attend(q, k, v, plan, self.dropout if self.training else 0.0, self.fused)
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
        plan: AttentionPlan,
        cache: Cache | None = None,
        counted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        x = x + self.self_attn(self.input_layernorm(x), rotary, plan, cache)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MoEFeedForward):
            out, balance = self.mlp(normed, counted)
            return x + out, balance
        return x + self.mlp(normed), None


class MiniMindModel(nn.Module):
    """Embedding, blocks and final norm: token ids to hidden states."""

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        plan: AttentionPlan,
        cache: Cache | None = None,
        counted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [batch, seq, hidden] and the balancing sum of all layers (None: no experts or no `counted`)."""
        x = F.dropout(self.embed_tokens(input_ids), self.config.dropout, self.training)
        rotary = self.rotary_table(position_ids)
        balances = []
        for layer in self.layers:
            if self.activation_checkpointing and self.training:
                x, balance = checkpoint(layer, x, rotary, plan, None, counted, use_reentrant=False)
            else:
                x, balance = layer(x, rotary, plan, cache, counted)
            if balance is not None:
                balances.append(balance)
        return self.norm(x), torch.stack(balances).sum() if balances else None

    def rotary_table(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for these positions. Made anew for every batch: a few thousand angles cost nothing, and there is
        no buffer to be left uninitialised by meta-device loading, broadcast by DDP or run past its end."""
        config, weight = self.config, self.embed_tokens.weight
        scaling = config.rope_scaling
        if scaling and config.max_position_embeddings <= scaling["original_max_position_embeddings"]:
            scaling = None
        frequencies = rotary_frequencies(
            config.head_dim, config.rope_theta, scaling, position_ids.device, wide_dtype(weight.dtype)
        )
        return rotary_table(position_ids, frequencies, scaling["attention_factor"] if scaling else 1.0)


class MiniMindForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = MiniMindConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]  # noqa: RUF012 - the name and kind of attribute transformers reads
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: MiniMindConfig | None = None):
        config = config or MiniMindConfig()
        super().__init__(config)
        self.attention_backend = "auto"  # auto, sdpa, segments or varlen: see model/attention.py
        self.cross_entropy = linear_cross_entropy_sum  # a compiled one may take its place
        self.model = MiniMindModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """normal(0, initializer_range); projections into the residual stream by 1 / sqrt(2 x layers) of that."""
        std = self.config.initializer_range
        if isinstance(module, ResidualLinear):
            std /= math.sqrt(2 * self.config.num_hidden_layers)
        if isinstance(module, (nn.Linear, nn.Embedding)):
            initialization.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, RMSNorm):
            initialization.ones_(module.weight)

    @property
    def activation_checkpointing(self) -> bool:
        """Keep only each block's input and run the block again in backward: a third more time, far less memory."""
        return self.model.activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, value: bool) -> None:
        self.model.activation_checkpointing = value

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        boundaries: Tensor | None = None,
        targets: Tensor | None = None,
        target_count: Tensor | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        labels: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool = True,
    ) -> MiniMindOutput | tuple:
        """Training: `targets`. Hugging Face: `labels` (shifted here). Generation: neither.

        Args:
            input_ids, position_ids, segment_ids, targets, labels: int64 [batch, seq]. Targets are the next tokens,
                -100 where there is none. Segment numbers keep the segments of a packed row apart, -1 is padding;
                without them attention is plainly causal.
            attention_mask: [batch, past + seq], 0 at (left) padding; generation only.
            boundaries: `segment_boundaries(segment_ids)` made on the host, to spare the varlen kernels a host sync.
            target_count: 0-dim; the divisor of every loss. None: the valid targets of this batch.
            label_smoothing, z_loss: see `linear_cross_entropy_sum`.
        """
        if labels is not None:
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        if cache is None and use_cache and targets is None:
            cache = DynamicCache(config=self.config)
        plan, position_ids = self._plan(input_ids, attention_mask, position_ids, segment_ids, boundaries, cache)
        counted = None if targets is None else targets != IGNORE_INDEX
        hidden, balance = self.model(input_ids, position_ids, plan, cache, counted)
        output = MiniMindOutput(cache=cache)
        if targets is not None:
            self._add_losses(output, hidden, balance, targets, target_count, label_smoothing, z_loss)
        if targets is None or labels is not None:
            output.logits = self.lm_head(hidden[:, -logits_to_keep:])
        return output if return_dict else output.to_tuple()

    def _plan(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        segment_ids: Tensor | None,
        boundaries: Tensor | None,
        cache: Cache | None,
    ) -> tuple[AttentionPlan, Tensor]:
        """Who attends to whom, and the positions: given, or counted from the first token that is not padding."""
        length = input_ids.shape[1]
        past = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(past, past + length, device=input_ids.device).unsqueeze(0)
            if attention_mask is not None and attention_mask.ndim == 2:
                position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -length:]
        if segment_ids is not None:
            if cache is not None or attention_mask is not None:
                raise ValueError("segment_ids are for training: they do not go with a cache or an attention_mask")
            return self._plan_segments(segment_ids, boundaries), position_ids
        if attention_mask is not None and attention_mask.ndim == 4:
            return AttentionPlan(mask=attention_mask), position_ids
        if attention_mask is None and (past == 0 or length == 1):
            return AttentionPlan(causal=past == 0), position_ids
        return AttentionPlan(mask=cached_mask(attention_mask, length, past + length, input_ids.device)), position_ids

    def _plan_segments(self, segment_ids: Tensor, boundaries: Tensor | None) -> AttentionPlan:
        weight, dropout = self.lm_head.weight, self.config.dropout if self.training else 0.0
        backend = self.attention_backend if self.config.flash_attn else "sdpa"
        chosen = choose_backend(backend, segment_ids.device, compute_dtype(weight), dropout, self.config.head_dim)
        if chosen == "sdpa":
            return AttentionPlan(mask=segment_mask(segment_ids))
        if chosen == "segments":
            return AttentionPlan(segment_ids=segment_ids)
        if boundaries is None:
            boundaries = segment_boundaries(segment_ids)
        return AttentionPlan(boundaries=boundaries, longest=segment_ids.shape[1])

    def _add_losses(
        self,
        output: MiniMindOutput,
        hidden: Tensor,
        balance: Tensor | None,
        targets: Tensor,
        target_count: Tensor | None,
        label_smoothing: float,
        z_loss: float,
    ) -> None:
        total, cross_entropy = self.cross_entropy(
            hidden.flatten(0, 1),
            self.lm_head.weight,
            targets.flatten(),
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )
        count = (targets != IGNORE_INDEX).sum() if target_count is None else target_count
        count = count.to(total.dtype)
        count = torch.where(count > 0, count, 1)  # a batch without targets has loss 0, not 0 / 0
        output.logits_loss = cross_entropy / count
        aux = torch.zeros_like(total) if balance is None else self.config.router_aux_loss_coef * balance
        output.aux_loss = aux / count
        output.loss = total / count + output.aux_loss
