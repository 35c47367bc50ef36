"""Train the byte-level BPE tokenizer of this folder, or measure it.

    python model/train_tokenizer.py --data_path corpus.jsonl --out my_tokenizer   # writes tokenizer.json and its config
    python model/train_tokenizer.py --evaluate val.jsonl --tokenizer_path model

A new tokenizer makes every weight trained with the old one meaningless: train one only for a corpus that needs it, into
a folder of its own, and name it with `--tokenizer_path`.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 6400
PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# 36 names, MiniMind's habit: the three above are used, the others are there so that chat, tools, thinking and other
# modalities can be taught later without changing the size of the embedding.
_NAMED = (
    [PAD_TOKEN, BOS_TOKEN, EOS_TOKEN]
    + [f"<|{name}_{edge}|>" for name in ("object_ref", "box", "quad", "vision", "audio") for edge in ("start", "end")]
    + [f"<|{name}_pad|>" for name in ("vision", "image", "video", "audio")]
    + ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
)
SPECIAL_TOKENS = _NAMED + [f"<|reserved_{i}|>" for i in range(36 - len(_NAMED))]

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def read_texts(paths: Iterable[Path], text_key: str = "text") -> Iterator[str]:
    """Yield the texts of `.jsonl` files in order. Raises ValueError naming file and line of a line without a text."""
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)[text_key]
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f'{path}:{number}: not a line like {{"{text_key}": "..."}} ({error!r})') from None
                if not isinstance(text, str):
                    raise ValueError(f"{path}:{number}: {text_key!r} holds {type(text).__name__}, not a text")
                yield text


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE, progress: bool = False) -> Tokenizer:
    """Train a byte-level BPE: special tokens from id 0, then the 256 bytes, then the merges.

    No normaliser and no added space, so that every text comes back as it was. The splitting pattern is GPT-2's: a
    pre-tokenizer that GGUF converters know. Same texts, same result, whatever the number of threads.
    Raises ValueError when `vocab_size` cannot hold the special tokens and bytes, or the texts are too few to fill it.
    """
    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise ValueError(f"vocab_size {vocab_size}: {len(SPECIAL_TOKENS)} special tokens and 256 bytes need {smallest}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        # All are special: only then can `encode_special_tokens` switch off their recognition inside plain text.
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        found = tokenizer.get_vocab_size()
        raise ValueError(f"vocab_size {vocab_size}: these texts yield only {found} tokens; give more text or that size")
    return tokenizer


def tokenizer_config(max_positions: int = 32768) -> dict:
    """What `AutoTokenizer` needs beside tokenizer.json. `max_positions` is MiniMind's max_position_embeddings."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD_TOKEN,
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": CHAT_TEMPLATE,
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, each under a temporary name first."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(tokenizer_config(), ensure_ascii=False, indent=2)
    for name, text in (("tokenizer.json", tokenizer.to_str(pretty=True)), ("tokenizer_config.json", config)):
        temporary = folder / f".{name}.{os.getpid()}.tmp"
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, folder / name)


def is_chinese(text: str) -> bool:
    """True when at least 3 in 10 characters are CJK ideographs (spaces, digits and punctuation count as characters)."""
    return 10 * sum("\u4e00" <= c <= "\u9fff" or "\u3400" <= c <= "\u4dbf" for c in text) >= 3 * max(1, len(text))


def evaluate(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, dict[str, int]]:
    """Count documents, characters, UTF-8 bytes and tokens (no bos, no eos) for Chinese, English and all texts."""
    counts = {kind: dict.fromkeys(("documents", "characters", "bytes", "tokens"), 0) for kind in ("zh", "en", "all")}
    for text in texts:
        size = (1, len(text), len(text.encode()), len(tokenizer.encode(text, add_special_tokens=False).ids))
        for kind in ("zh" if is_chinese(text) else "en", "all"):
            for key, amount in zip(counts[kind], size, strict=True):
                counts[kind][key] += amount
    return counts


def table(counts: dict[str, dict[str, int]]) -> str:
    lines = [f"{'':4}{'documents':>10}{'bytes':>12}{'tokens':>10}{'bytes/token':>13}{'characters/token':>18}"]
    for kind, row in counts.items():
        tokens = max(1, row["tokens"])
        lines.append(
            f"{kind:4}{row['documents']:>10,}{row['bytes']:>12,}{row['tokens']:>10,}"
            f"{row['bytes'] / tokens:>13.3f}{row['characters'] / tokens:>18.3f}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a byte-level BPE tokenizer, or measure one.")
    parser.add_argument("--data_path", type=Path, nargs="+", help=".jsonl files to train on")
    parser.add_argument("--out", type=Path, help="folder for tokenizer.json and tokenizer_config.json")
    parser.add_argument("--vocab_size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--text_key", default="text")
    parser.add_argument("--evaluate", type=Path, metavar="FILE", help="print bytes per token on this .jsonl file")
    parser.add_argument("--tokenizer_path", type=Path, default=Path(__file__).parent, help="the folder to evaluate")
    args = parser.parse_args(argv)
    if not args.data_path and not args.evaluate:
        parser.error("nothing to do: give --data_path FILE --out FOLDER to train, or --evaluate FILE to measure")
    if args.data_path and not args.out:
        parser.error("--data_path needs --out FOLDER: where shall the tokenizer go?")
    try:
        if args.data_path:
            save_tokenizer(train_tokenizer(read_texts(args.data_path, args.text_key), args.vocab_size, True), args.out)
            print(f"wrote {args.out / 'tokenizer.json'} and tokenizer_config.json")
        if args.evaluate:
            tokenizer = Tokenizer.from_file(str((args.out or args.tokenizer_path) / "tokenizer.json"))
            print(table(evaluate(tokenizer, read_texts([args.evaluate], args.text_key))))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
