"""A local Hugging Face tokenizer folder as the trainer needs it: text to ids, three special ids, and a digest.

Only the `tokenizers` library is loaded (0.02 s); transformers is imported for folders without a tokenizer.json.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from errors import DataError

# Parts of tokenizer.json that cannot change the ids of plain text encoded without truncation, padding or template.
NO_INFLUENCE = ("version", "truncation", "padding", "post_processor", "decoder")
MARKUP = re.compile(r"<.+>|\[.+\]", re.DOTALL)  # <think>, [TOOL]; not the runs of spaces that some vocabularies add


class TextTokenizer:
    """Encodes text without bos or eos. `bos_id`, `eos_id`, `pad_id` are always set; `vocab_size` is max id + 1.

    Without `parse_special`, "<|im_end|>" inside a text is the ten characters it looks like, not an end of document.
    `markup`: added tokens that look alike but are not flagged special (<think>), which are then text for the same
    reason. Other added tokens (runs of spaces, words of a trade) are ordinary vocabulary.
    """

    def __init__(
        self, backend: Any, description: dict, bos_id: int, eos_id: int, pad_id: int, parse_special: bool = False
    ):
        self.backend, self.parse_special = backend, parse_special
        added = [] if parse_special else description.get("added_tokens") or []
        self.markup = sorted(t["content"] for t in added if not t["special"] and MARKUP.fullmatch(t["content"]))
        self._encoder = _with_special(description, self.markup) if self.markup else backend
        self._encoder.no_truncation()  # settings of the file, meant for other uses
        self._encoder.no_padding()
        self._encoder.encode_special_tokens = not parse_special
        self.bos_id, self.eos_id, self.pad_id = bos_id, eos_id, pad_id
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.digest = _digest(description, bos_id, eos_id)
        self._cuts = TextCuts(backend, description)

    @classmethod
    def load(cls, folder: str | Path, parse_special: bool = False) -> TextTokenizer:
        """Read a tokenizer folder. Raises DataError when it is missing, unreadable or has no end-of-text token."""
        folder = Path(folder).expanduser()
        if not folder.is_dir():
            raise DataError(f"tokenizer {folder}: no such folder; give a local folder that holds tokenizer.json")
        backend, names = _load_backend(folder)
        description = json.loads(backend.to_str())
        ids = {role: _special_id(folder, backend, role, name) for role, name in names.items()}
        eos = ids.get("eos_token")
        if eos is None:
            remedy = "set eos_token in its tokenizer_config.json"
            raise DataError(f"tokenizer {folder}: names no eos token, so documents have no end; {remedy}")
        bos, pad = ids.get("bos_token"), ids.get("pad_token")
        bos, pad = (eos if bos is None else bos), (eos if pad is None else pad)
        return cls(backend, description, bos, eos, pad, parse_special)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, on all cores, the GIL released meanwhile."""
        try:
            return [encoding.ids for encoding in self._encoder.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:  # the Rust side raises plain Exception, for a missing unknown token say
            raise DataError(f"tokenizer: cannot encode these texts ({error}); use one that covers them") from None

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def holds_markup(self, text: str) -> bool:
        return any(token in text for token in self.markup)

    def chunks(self, text: str, limit: int = 1 << 17) -> Iterator[str]:
        """`text` in chunks of about `limit` characters whose ids, joined, are those of the whole text."""
        return self._cuts.chunks(text, limit)

    def __reduce__(self):
        state = self.backend.to_str(), self.bos_id, self.eos_id, self.pad_id, self.parse_special
        return _restore, state


def _restore(backend: str, bos_id: int, eos_id: int, pad_id: int, parse_special: bool) -> TextTokenizer:
    from tokenizers import Tokenizer

    return TextTokenizer(Tokenizer.from_str(backend), json.loads(backend), bos_id, eos_id, pad_id, parse_special)


def _with_special(description: dict, contents: list[str]) -> Any:
    """The tokenizer with these added tokens flagged special: encoding can pass over special ones alone."""
    from tokenizers import Tokenizer

    added = [t | {"special": t["special"] or t["content"] in contents} for t in description["added_tokens"]]
    return Tokenizer.from_str(json.dumps(description | {"added_tokens": added}))


# --- loading ---


def _load_backend(folder: Path) -> tuple[Any, dict[str, str]]:
    """The Rust tokenizer and the names of its bos, eos and pad tokens (those that are set)."""
    settings = _read_json(folder / "tokenizer_config.json")
    file = folder / "tokenizer.json"
    if not file.is_file():
        return _load_by_transformers(folder)
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises plain Exception
        raise DataError(f"{file}: is no readable tokenizer ({error}); fetch or train it again") from None
    added = settings.get("added_tokens_decoder") or {}
    if any(str(backend.token_to_id(_name(token) or "")) != number for number, token in added.items()):
        return _load_by_transformers(folder)  # tokenizer_config.json adds tokens that the file does not know
    special = _read_json(folder / "special_tokens_map.json")
    roles = ("bos_token", "eos_token", "pad_token")
    names = {role: _name(settings.get(role)) or _name(special.get(role)) for role in roles}
    return backend, {role: name for role, name in names.items() if name}


def _load_by_transformers(folder: Path) -> tuple[Any, dict[str, str]]:
    """A folder in another form (vocab.json + merges.txt, a sentencepiece model): let transformers convert it."""
    remedy = "save it once in fast form (tokenizer.save_pretrained) so that the folder holds a tokenizer.json"
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # missing files, unknown classes, missing converters: many kinds
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"tokenizer {folder}: holds no usable tokenizer ({reason[:200]}); {remedy}") from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise DataError(f"tokenizer {folder}: exists in slow form only ({type(tokenizer).__name__}); {remedy}")
    roles = ("bos_token", "eos_token", "pad_token")
    return backend, {role: str(getattr(tokenizer, role)) for role in roles if getattr(tokenizer, role, None)}


def _read_json(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: is not readable JSON ({error}); fetch or write it again") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds no JSON object; fetch or write it again")
    return value


def _name(token: Any) -> str | None:
    """Tokens are written as a string or as {"content": ..., "lstrip": ...}."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None


def _special_id(folder: Path, backend: Any, role: str, name: str) -> int:
    number = backend.token_to_id(name)
    if number is None:
        remedy = "correct tokenizer_config.json"
        raise DataError(f"tokenizer {folder}: its {role} {name!r} is not in the vocabulary; {remedy}")
    return number


def _digest(description: dict, bos_id: int, eos_id: int) -> str:
    """SHA-256 over everything that changes the ids of a document, in a form that re-saving does not change."""
    kept = _pruned({key: value for key, value in description.items() if key not in NO_INFLUENCE})
    canonical = json.dumps([kept, bos_id, eos_id], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def _pruned(node: Any) -> Any:
    """Without null and false entries: what a newer library adds, switched off, does not make another tokenizer."""
    if isinstance(node, dict):
        return {key: _pruned(value) for key, value in node.items() if value is not None and value is not False}
    return [_pruned(value) for value in node] if isinstance(node, list) else node


# --- cutting long texts ---


class TextCuts:
    """Finds places in a long text where the pre-tokenizer cuts anyway, so that the halves give the ids of the whole.

    Candidates lie between a letter and a following space or punctuation mark. Each is tried on the text around it:
    the pre-tokenizer must give the same parts for the window as for its two halves. Where such a local trial proves
    nothing (pre-tokenizers and normalizers that look at the whole text), or no trial succeeds, the rest stays whole.
    """

    SPACE = re.compile(r"(?<=[^\W\d_])(?= )")  # tried first: no rule known to us joins a letter to a space after it
    MARK = re.compile(r"(?<=[^\W\d_])(?=[,.;:!?()，。；：！？、（）《》])")
    LOCAL_STEPS = frozenset(
        ("ByteLevel", "Split", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits", "Punctuation")
    )
    LOCAL_NORMALIZERS = frozenset(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"))
    WINDOW = 2048  # characters on each side
    SEARCH = 1 << 16  # characters looked through for a candidate
    TRIALS = 8

    def __init__(self, backend: Any, description: dict):
        self.pre_tokenizer, self.normalizer = backend.pre_tokenizer, backend.normalizer
        steps = {step["type"] for step in _steps(description.get("pre_tokenizer"), "pretokenizers")}
        normalizers = {step["type"] for step in _steps(description.get("normalizer"), "normalizers")}
        self.possible = (
            bool(steps)
            and steps <= self.LOCAL_STEPS
            and normalizers <= self.LOCAL_NORMALIZERS
            and not any(_spans_a_cut(token) for token in description.get("added_tokens") or [])
        )

    def chunks(self, text: str, limit: int) -> Iterator[str]:
        start = 0
        while self.possible and len(text) - start > limit:
            cut = self._find(text, start + max(1, limit // 2), start + limit)  # never an empty chunk
            if cut is None:
                break
            yield text[start:cut]
            start = cut
        yield text[start:] if start else text

    def _find(self, text: str, low: int, high: int) -> int | None:
        """The last good cut in [low, high), else the first good one after it."""
        low = max(low, high - self.SEARCH)
        for pattern in (self.SPACE, self.MARK):
            back = [match.start() for match in pattern.finditer(text, low, high)]
            for cut in reversed(back[-self.TRIALS :]):
                if self._good(text, cut):
                    return cut
        for pattern in (self.SPACE, self.MARK):
            for match in itertools.islice(pattern.finditer(text, high), self.TRIALS):
                if self._good(text, match.start()):
                    return match.start()
        return None

    def _good(self, text: str, cut: int) -> bool:
        left, right = text[max(0, cut - self.WINDOW) : cut], text[cut : cut + self.WINDOW]
        return self._split(left + right) == self._split(left) + self._split(right)

    def _split(self, text: str) -> list[str]:
        if self.normalizer is not None:
            text = self.normalizer.normalize_str(text)
        return [part for part, _ in self.pre_tokenizer.pre_tokenize_str(text)]


def _steps(node: dict | None, children: str) -> list[dict]:
    if node is None:
        return []
    if node["type"] == "Sequence":
        return [step for child in node[children] for step in _steps(child, children)]
    return [node]


def _spans_a_cut(token: dict) -> bool:
    """Could this added token reach over a cut between a letter and a space or punctuation mark?"""
    content = token["content"]
    inside = TextCuts.SPACE.search(content) or TextCuts.MARK.search(content)
    return bool(inside or (token["rstrip"] and content[-1:].isalpha()) or token["single_word"])
