"""What a folder says of its files: a JSON file, written last, with the size and SHA-256 of each ("files": name ->
entry), whatever else its owner notes, and a digest of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storage.files import file_digest, json_bytes, write_file

OWN_DIGEST = "manifest_sha256"


def write_manifest(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Write `content`, "files" among it, under its own digest, into a folder in the making; returns it as it will be
    read. Raises OSError."""
    manifest = json.loads(json_bytes(content))
    manifest[OWN_DIGEST] = _own_digest(manifest)
    write_file(path, json_bytes(manifest))
    return manifest


def _own_digest(manifest: Mapping[str, Any]) -> str:
    """Of all entries but itself, so that damage to the manifest shows."""
    rest = {key: value for key, value in manifest.items() if key != OWN_DIGEST}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def check_folder(
    path: Path, expected: Mapping[str, Any], *, rehash: bool = True, signed: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """(manifest, what is wrong with its folder, in words) of the manifest `path`; use it if nothing is wrong.

    Checked are the manifest's own digest, the `expected` entries (format version ...), and the size of each file.
    `rehash`: also the SHA-256 of each. `signed`: a manifest without its own digest is damaged.
    """
    try:
        manifest = json.loads(path.read_bytes())
        if (signed or OWN_DIGEST in manifest) and manifest[OWN_DIGEST] != _own_digest(manifest):
            return {}, [f"{path} is damaged: it does not match its own digest"]
        other = {key: manifest[key] for key, value in expected.items() if manifest[key] != value}
        if other:
            return {}, [f"{path.parent} holds {k.replace('_', ' ')} {v}, not {expected[k]}" for k, v in other.items()]
        problems = [_problem(path, name, entry, rehash) for name, entry in manifest["files"].items()]
    except FileNotFoundError:
        return {}, [f"{path.parent} has no {path.name}: it is incomplete"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, [f"{path} cannot be read: {type(error).__name__}: {error}"]
    return manifest, [problem for problem in problems if problem]


def _problem(manifest: Path, name: str, entry: Mapping[str, Any], rehash: bool) -> str | None:
    path = manifest.with_name(name)
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{path} has {size:,} bytes instead of {entry['bytes']:,}"
        if rehash and file_digest(path) != entry["sha256"]:
            return f"{path} is damaged: its SHA-256 differs from that in {manifest.name}"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return None
