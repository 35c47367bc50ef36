"""The configuration behind a state dict, for weights that come without one (MiniMind's own `.pth` files)."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from model.model_minimind import MiniMindConfig


def config_from_weights(weights: Mapping[str, Tensor], **known: Any) -> MiniMindConfig:
    """Shape options read from tensor shapes; `known` adds what they do not tell (rope_theta, num_experts_per_tok).

    Raises ValueError for a state dict of another architecture.
    """
    embedding, q_norm = weights.get("model.embed_tokens.weight"), weights.get("model.layers.0.self_attn.q_norm.weight")
    if embedding is None or q_norm is None:
        missing = "model.embed_tokens" if embedding is None else "model.layers.0.self_attn.q_norm"
        raise ValueError(f"these weights are of another architecture: they hold no {missing}.weight")

    def rows(name: str) -> int:
        return weights[f"model.layers.0.{name}.weight"].shape[0]

    def count(pattern: str) -> int:
        return len({match.group() for name in weights if (match := re.match(pattern, name))})

    head_dim, experts = q_norm.shape[0], count(r"model\.layers\.0\.mlp\.experts\.\d+\.")
    head = weights.get("lm_head.weight")
    fields: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "hidden_size": embedding.shape[1],
        "num_hidden_layers": count(r"model\.layers\.\d+\."),
        "head_dim": head_dim,
        "num_attention_heads": rows("self_attn.q_proj") // head_dim,
        "num_key_value_heads": rows("self_attn.k_proj") // head_dim,
        "tie_word_embeddings": head is None or torch.equal(head, embedding),
    }
    if experts:
        size = rows("mlp.experts.0.gate_proj")
        fields |= {"use_moe": True, "num_experts": experts, "intermediate_size": size, "moe_intermediate_size": size}
    else:
        fields["intermediate_size"] = rows("mlp.gate_proj")
    return MiniMindConfig(**{**fields, **known})
