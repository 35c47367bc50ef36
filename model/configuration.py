"""Shape and constants of the model."""

import difflib
import math
from dataclasses import fields
from typing import Any

from transformers import PretrainedConfig
from transformers.activations import ACT2FN

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
