"""The model at the start of a run: fresh under the seed, or with weights trained before (`--from_weight`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint import read_weights, restore_parameters
from config import Config, UserError, resolve_path
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM


def model_config(config: Config, tokenizer: Any) -> MiniMindConfig:
    """The model's own settings; vocabulary and special ids follow the tokenizer."""
    return MiniMindConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        use_moe=bool(config.use_moe),
        rope_theta=config.rope_theta,
        dropout=config.dropout,
        max_position_embeddings=max(32768, config.max_seq_len),
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    )


def init_model(config: Config, tokenizer: Any) -> MiniMindForCausalLM:
    """The model in float32 on the host, drawn from torch's current seed, then overwritten by `--from_weight` if given.
    Raises UserError or CheckpointError for weights that do not fit."""
    model = MiniMindForCausalLM(model_config(config, tokenizer))
    model.activation_checkpointing = bool(config.activation_checkpointing)
    if config.from_weight != "none":
        restore_parameters(model, start_weights(config, tokenizer.digest, model.lm_head.weight.dtype))
    return model


def start_weights(config: Config, tokenizer_digest: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters `--from_weight` names, in the model's dtype, checked to speak this run's tokenizer."""
    path = find_weights(config)
    if path.is_dir():
        weights, card = read_hugging_face(path), None
    else:
        weights, card = read_weights(path)
    check_tokenizer(config, path, card, tokenizer_digest)
    head, embedding = weights.pop("lm_head.weight", None), weights.get("model.embed_tokens.weight")
    if head is not None and (embedding is None or not torch.equal(head, embedding)):
        raise UserError(f"--from_weight {path}: its output head is not tied to its embedding; this model's is")
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def find_weights(config: Config) -> Path:
    """The file or folder behind `--from_weight`: a path, a run's folder, or MiniMind's flat `<name>_<hidden>.pth`."""
    named = resolve_path(config.from_weight)
    stem = f"{config.from_weight}_{config.hidden_size}{'_moe' if config.use_moe else ''}"
    save_dir = resolve_path(config.save_dir)
    candidates = [named, save_dir / stem / f"{stem}.pth", save_dir / f"{stem}.pth"]
    for path in candidates:
        if path.is_file() or (path / "config.json").is_file():
            return path
        inside = path / f"{path.name}.pth"  # a run folder
        if inside.is_file():
            return inside
    tried = ", ".join(map(str, candidates))
    raise UserError(f"--from_weight {config.from_weight}: nothing there; looked for {tried}")


def read_hugging_face(folder: Path) -> dict[str, Tensor]:
    """Weights of a Hugging Face folder, from one or several safetensors files."""
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    missing = [name for name in sorted(names) if not (folder / name).is_file()]
    if missing:
        raise UserError(f"--from_weight {folder}: {', '.join(missing)} missing; save the model as safetensors")
    weights: dict[str, Tensor] = {}
    for name in sorted(names):
        weights.update(load_file(folder / name))
    return weights


def check_tokenizer(config: Config, path: Path, card: dict[str, Any] | None, digest: str) -> None:
    """Two tokenizers of equal size load alike and speak nonsense: their digests must agree, or the user must say."""
    if card is None:
        if "tokenizer_path" not in config.given:
            raise UserError(
                f"--from_weight {path}: does not say which tokenizer it was trained with; "
                "give that tokenizer with --tokenizer_path"
            )
    elif card.get("tokenizer_digest") != digest:
        raise UserError(
            f"--from_weight {path}: trained with tokenizer {str(card.get('tokenizer_digest'))[:12]}, "
            f"--tokenizer_path {config.tokenizer_path} is {digest[:12]}; give the one it was trained with"
        )
