"""Weights for use: half-precision `.pth` files with their cards, and the model a run starts from (`--from_weight`)."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import Config, UserError, resolve_path
from dataset.hashed_file import HashedFile, file_digest, sync
from files import (
    CheckpointError,
    SaveFailed,
    all_finite,
    remove_quietly,
    temporary_name,
    write_json_atomic,
)
from live_state import plain_name, restore_parameters
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer_utils import setup_seed

# --- the model at the start ---


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
    """Where `--from_weight` leads and the parameters found there, in the model's dtype, checked to be of its make and
    to speak this run's tokenizer."""
    path, dtype = find_weights(config), model.lm_head.weight.dtype
    if path.is_dir():
        weights, card = read_hugging_face(path), None
        made_with = read_json(path / "config.json")
    else:
        weights, card = read_weights(path)
        made_with = mapping(mapping(card).get("config"))
    check_tokenizer(config, path, card, tokenizer_digest)
    check_make(path, made_with, model.config.to_dict())
    head, embedding = weights.pop("lm_head.weight", None), weights.get("model.embed_tokens.weight")
    if head is not None and (embedding is None or not torch.equal(head.float(), embedding.float())):
        raise UserError(f"--from_weight {path}: its output head is not tied to its embedding; this model's is")
    return path, {name: tensor.to(dtype) for name, tensor in weights.items()}


def check_make(path: Path, made_with: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise UserError where the weights were made with other model options, the rotary base, which no shape betrays,
    among them."""
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
    candidates = [named, save_dir / stem / f"{stem}.pth", save_dir / f"{stem}.pth"]
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


# --- weights files ---


def half_precision(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Host copies with plain names, floating-point ones in float16 as MiniMind saves them; tied tensors stay tied.

    Raises CheckpointError for what float16 cannot hold (beyond 65504, or not finite to begin with).
    """
    copies: dict[tuple[Any, ...], Tensor] = {}  # one for each place in memory; torch.save writes a shared copy once
    halves: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0 or place not in copies:
            half = tensor.detach().to(torch.float16) if tensor.is_floating_point() else tensor.detach()
            if half.is_floating_point() and not all_finite(half):
                raise CheckpointError(
                    f"{name} holds {tensor.abs().max().item():g}, which float16 cannot (its largest number is 65504): "
                    "the weights file was not written; the run has probably diverged"
                )
            # A view would drag its whole storage into the file: torch.save writes storages.
            own = half.clone() if half.data_ptr() == tensor.data_ptr() else half
            copies[place] = own.cpu().contiguous()
        halves[plain_name(name)] = copies[place]
    return halves


def write_weights(path: str | os.PathLike[str], state_dict: Mapping[str, Tensor], card: Mapping[str, Any]) -> str:
    """Write a half-precision `.pth` and its card `<stem>.json` (with the file's SHA-256, which is returned).

    Both atomically. The card comes first and keeps the one it replaces under "previous": a crash between the two
    renames leaves the older weights with the card that describes them.
    Raises SaveFailed, or CheckpointError for numbers beyond float16.
    """
    path = Path(path)
    card_path, temporary = path.with_suffix(".json"), temporary_name(path)
    halves = half_precision(state_dict)
    file: HashedFile | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with HashedFile(temporary) as file:
            torch.save(halves, file)  # type: ignore[arg-type]  # it needs write and flush
        digest = file.sha256.hexdigest()
        new_card = {**card, "sha256": digest}
        previous = _cards(card_path)[:1] if path.exists() else []
        write_json_atomic(card_path, {**new_card, "previous": previous[0]} if previous else new_card)
        os.replace(temporary, path)
        sync(path.parent)
        if previous:
            write_json_atomic(card_path, new_card)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        remove_quietly(temporary)
        cause = (file.error if file else None) or error
        if isinstance(cause, SaveFailed):
            raise
        reason = (cause.strerror if isinstance(cause, OSError) else None) or str(cause)
        raise SaveFailed(f"could not write {path}: {reason}; the file it would have replaced is untouched") from cause
    return digest


def _cards(card_path: Path) -> list[dict[str, Any]]:
    """The card of a weights file, then the one it was about to replace; none if there is no readable one."""
    try:
        card = json.loads(card_path.read_bytes())
        return [c for c in (card, card.pop("previous", None)) if c and c["sha256"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def _matching_card(path: Path) -> dict[str, Any] | None:
    """The card that describes the weights file as it is now, by digest; None without one. Raises CheckpointError."""
    card_path = path.with_suffix(".json")
    if not card_path.exists():
        return None
    cards = _cards(card_path)
    if not cards:
        raise CheckpointError(f"{card_path}, the card of {path.name}, is damaged; delete it to use the weights without")
    digest = file_digest(path)
    matching = [card for card in cards if card["sha256"] == digest]
    if not matching:
        raise CheckpointError(f"{path} is damaged or was exchanged: its SHA-256 differs from that in {card_path.name}")
    return matching[0]


def read_weights(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """(state dict with plain names, card or None) of a `.pth`, one of MiniMind's own included.

    The digest of the card is checked, or the zip archive's checksums where there is no card. Only tensors are read: a
    pickle that would run code is refused. Raises CheckpointError in words for whatever is wrong.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no weights file {path}")
    card = _matching_card(path)
    try:
        if card is None and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if (broken := archive.testzip()) is not None:
                    raise CheckpointError(f"{path} is damaged: the checksum of its part {broken} is wrong")
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # truncated: RuntimeError, empty: EOFError, garbage: KeyError, code: UnpicklingError ...
        unsafe = "Unsupported" in str(error) or "Weights only load failed" in str(error)
        reason = (
            "it holds more than tensors, maybe code, and was not read" if unsafe else "it is damaged or no weights file"
        )
        raise CheckpointError(f"{path} is refused: {reason} ({type(error).__name__})") from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(f"{path} holds no state dict (tensor name -> tensor): is it a file of another program?")
    return {plain_name(name): tensor for name, tensor in weights.items()}, card
