"""A tokenizer folder made in milliseconds, for tests that need one."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = (
    "Once upon a time there was a little fox who could count to twenty-three. It's true, isn't it? "
    "从前有一只小狐狸，它会数到二十三。今天天气很好，我们去公园玩吧！你喜欢红色还是蓝色？ 1 + 2 = 3; 40 + 2 = 42.\n\n"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_backend(kind: str = "gpt2", normalizer: str | None = None, vocab_size: int = 420) -> Tokenizer:
    """Byte-level BPE with GPT-2's or cl100k's splitting rule, no rule at all, or one that marks the start of a text."""
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix", use_regex=kind in ("gpt2", "prefix"))
    steps = {
        "cl100k": [pre_tokenizers.Split(Regex(CL100K), "isolated"), byte_level],
        "metaspace": [pre_tokenizers.Metaspace(), byte_level],
        "words": [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(), byte_level],
    }
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps[kind]) if kind in steps else byte_level
    if normalizer:
        backend.normalizer = getattr(normalizers, normalizer)()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    return backend


def make_folder(folder: Path, backend: Tokenizer | None = None, **settings) -> Path:
    """Write tokenizer.json and tokenizer_config.json; `settings` override MiniMind's three special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (backend or make_backend()).save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
