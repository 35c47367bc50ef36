"""The model a run starts from: drawn under the seed, or with the weights that `--from_weight` names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from errors import CheckpointError, UserError
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer_utils import setup_seed
from training.config import Config, resolve_path
from training.saving.live_state import restore_parameters
from training.saving.weights import read_weights


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


def model_shape(config: Config, tokenizer: Any) -> MiniMindForCausalLM:
    """The model without its numbers: names and shapes, at no cost in memory or random numbers."""
    with torch.device("meta"):
        return MiniMindForCausalLM(model_config(config, tokenizer))


def init_model(config: Config, tokenizer: Any) -> MiniMindForCausalLM:
    """The model in float32 on the host, drawn under `config.seed`, then overwritten by `--from_weight` if given.
    Raises UserError or CheckpointError for weights that do not fit."""
    setup_seed(config.seed)
    model = MiniMindForCausalLM(model_config(config, tokenizer))
    model.activation_checkpointing = bool(config.activation_checkpointing)
    if config.from_weight != "none":
        path, weights = start_weights(config, tokenizer.digest, model)
        try:
            restore_parameters(model, weights)
        except CheckpointError as error:
            raise UserError(f"--from_weight {path}: {error}") from None
    return model


def start_weights(config: Config, tokenizer_digest: str, model: MiniMindForCausalLM) -> tuple[Path, dict[str, Tensor]]:
    """Where `--from_weight` leads and the parameters found there, in the model's dtype, checked against this
    model's options and this run's tokenizer."""
    path, dtype = find_weights(config), model.lm_head.weight.dtype
    if path.is_dir():
        weights, card = read_hugging_face(path), None
        made_with = read_json(path / "config.json")
    else:
        weights, card = read_weights(path)
        made_with = mapping(mapping(card).get("config"))
    check_tokenizer(config, path, card, tokenizer_digest)
    check_architecture(path, made_with, model.config.to_dict())
    head, embedding = weights.pop("lm_head.weight", None), weights.get("model.embed_tokens.weight")
    if head is not None and (embedding is None or not torch.equal(head.float(), embedding.float())):
        raise UserError(f"--from_weight {path}: its output head is not tied to its embedding; this model's is")
    return path, {name: tensor.to(dtype) for name, tensor in weights.items()}


def check_architecture(path: Path, made_with: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise UserError where the weights were made with other model options, including the rotary base, which shapes
    cannot reveal."""
    if made_with.get("rope_theta") is None:  # where transformers 5 writes it
        made_with = made_with | {"rope_theta": mapping(made_with.get("rope_parameters")).get("rope_theta")}
    names = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size rope_theta use_moe"
    differing = [
        f"--{name} {shown_option(made_with[name])} (not {shown_option(wanted[name])})"
        for name in names.split()
        if made_with.get(name) is not None and made_with[name] != wanted[name]
    ]
    if differing:
        raise UserError(f"--from_weight {path}: another model; it was made with {', '.join(differing)}; give these")


def shown_option(value: Any) -> Any:
    """As one types it: switches are 0 and 1."""
    return int(value) if isinstance(value, bool) else value


def mapping(value: Any) -> dict[str, Any]:
    """What a JSON file of another program holds where it should hold an object; empty if it does not."""
    return value if isinstance(value, dict) else {}


def find_weights(config: Config) -> Path:
    """The file or folder behind `--from_weight`: a path, a run's folder, or MiniMind's flat `<name>_<hidden>.pth`."""
    named = resolve_path(config.from_weight)
    stem = f"{config.from_weight}_{config.hidden_size}{'_moe' if config.use_moe else ''}"
    save_dir = resolve_path(config.save_dir)
    candidates = [named, save_dir / stem / f"{stem}.pth", save_dir / f"{stem}.pth", save_dir / config.from_weight]
    for path in candidates:
        inside = path / f"{path.name}.pth"  # a run folder
        if os.path.isfile(path) or os.path.isfile(path / "config.json"):
            return path
        if os.path.isfile(inside):
            return inside
    tried = ", ".join(map(str, candidates))
    flag = "save_weight" if config.from_weight == config.save_weight and config.eval_only else "from_weight"
    raise UserError(f"--{flag} {config.from_weight}: no weights there; looked for {tried}; check the name")


def read_hugging_face(folder: Path) -> dict[str, Tensor]:
    """Weights of a Hugging Face folder, from one or several safetensors files."""
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    names = set(map(str, mapping(read_json(index).get("weight_map")).values())) or {"model.safetensors"}
    missing = [name for name in sorted(names) if not (folder / name).is_file()]
    if missing:
        raise UserError(f"--from_weight {folder}: {', '.join(missing)} missing; save the model as safetensors")
    weights: dict[str, Tensor] = {}
    for name in sorted(names):
        try:
            weights.update(load_file(folder / name))
        except Exception as error:  # SafetensorError is not exported
            raise UserError(f"--from_weight {folder}: {name} cannot be read ({error}); fetch it again") from None
    return weights


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a Hugging Face folder; empty without the file. Raises UserError."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"--from_weight {path}: is not readable JSON ({error}); fetch it again") from None
    return mapping(value)


def check_tokenizer(config: Config, path: Path, card: dict[str, Any] | None, digest: str) -> None:
    """The wrong tokenizer of the right size loads without complaint and yields nonsense: digests must agree, or the
    user must name one."""
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
