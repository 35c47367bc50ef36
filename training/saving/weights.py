"""Weights for use: half-precision `.pth` files, and the cards beside them that say what they are."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from errors import CheckpointError, SaveFailed
from storage.files import all_finite, remove_quietly, temporary_name, write_json_atomic
from storage.hashed_file import HashedFile, file_digest, sync
from training.saving.live_state import plain_name


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
