"""MiniMind's decoder: embedding, blocks (model/block.py), head and losses, in the form that transformers knows.

Parameter names are Qwen3's, so weights go back and forth between this file, MiniMind and Hugging Face unchanged.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel, initialization
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import ModelOutput

from model.attention import (
    AttentionPattern,
    additive,
    causal_pattern,
    choose_backend,
    segment_boundaries,
    segment_mask,
    varlen_pattern,
)
from model.block import Block, ResidualLinear, RMSNorm
from model.configuration import MiniMindConfig
from model.dtypes import compute_dtype, wide_dtype
from model.loss import IGNORE_INDEX, linear_cross_entropy_sum
from model.rotary import rotary_frequencies, rotary_table

__all__ = ["MiniMindConfig", "MiniMindForCausalLM", "MiniMindModel", "MiniMindOutput"]


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
        pattern: AttentionPattern,
        cache: Cache | None = None,
        counted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [batch, seq, hidden] and the balancing sum of all layers (None: no experts or no `counted`)."""
        x = F.dropout(self.embed_tokens(input_ids), self.config.dropout, self.training)
        rotary = self.rotary_table(position_ids)
        balances = []
        for layer in self.layers:
            if self.activation_checkpointing and self.training:
                x, balance = checkpoint(layer, x, rotary, pattern, None, counted, use_reentrant=False)
            else:
                x, balance = layer(x, rotary, pattern, cache, counted)
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
        longest: int | None = None,
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
            boundaries, longest: `segment_boundaries(segment_ids)` and their longest run, known on the host: no sync.
            target_count: 0-dim; the divisor of every loss. None: the valid targets of this batch.
            label_smoothing, z_loss: see `linear_cross_entropy_sum`.
        """
        if labels is not None:
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        if cache is None and use_cache and targets is None:
            cache = DynamicCache(config=self.config)
        if segment_ids is not None and (cache is not None or attention_mask is not None):
            raise ValueError("segment_ids are for training: they do not go with a cache or an attention_mask")
        past = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            position_ids = positions(input_ids, attention_mask, past)
        if segment_ids is None:
            pattern = causal_pattern(input_ids, attention_mask, past)
        else:
            pattern = self._segment_pattern(segment_ids, boundaries, longest)
        counted = None if targets is None else targets != IGNORE_INDEX
        hidden, balance = self.model(input_ids, position_ids, pattern, cache, counted)
        output = MiniMindOutput(cache=cache)
        if targets is not None:
            self._add_losses(output, hidden, balance, targets, target_count, label_smoothing, z_loss)
        if targets is None or labels is not None:
            output.logits = self.lm_head(hidden[:, -logits_to_keep:])
        return output if return_dict else output.to_tuple()

    def _segment_pattern(self, segment_ids: Tensor, boundaries: Tensor | None, longest: int | None) -> AttentionPattern:
        dtype, dropout = compute_dtype(self.lm_head.weight), self.config.dropout if self.training else 0.0
        backend = self.attention_backend if self.config.flash_attn else "sdpa"
        chosen = choose_backend(backend, segment_ids.device, dtype, dropout, self.config.head_dim)
        if chosen == "sdpa":
            return AttentionPattern(mask=additive(segment_mask(segment_ids), dtype))
        if chosen == "segments":
            return AttentionPattern(segment_ids=segment_ids)
        if boundaries is None:  # host sync
            boundaries = segment_boundaries(segment_ids)
            longest = int(boundaries.diff().max())
        seq = segment_ids.shape[1]
        compiled = self.model.layers[0]._compiled_call_impl is not None
        return varlen_pattern(boundaries, longest or seq, seq, compiled)

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


def positions(input_ids: Tensor, attention_mask: Tensor | None, past: int) -> Tensor:
    """Where the tokens stand, [batch or 1, seq]: counted from the first token that is not padding."""
    length = input_ids.shape[1]
    if attention_mask is not None and attention_mask.ndim == 2:
        return (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -length:]
    return torch.arange(past, past + length, device=input_ids.device).unsqueeze(0)
