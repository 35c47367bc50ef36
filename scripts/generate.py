"""Prompt in, text out, as it is written.

    python scripts/generate.py --load checkpoints/pretrain_768 --prompt "Once upon a time"
    echo "从前" | python scripts/generate.py --load checkpoints/pretrain_768/pretrain_768_best.pth
    python scripts/generate.py --load pretrain_768.pth --tokenizer_path ../minimind/model      # MiniMind's own weights

`--load` takes a run folder, a `.pth` weights file or a Hugging Face folder. Without --prompt the prompt is read from
standard input: all of it from a pipe, line by line from a terminal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:  # torch and transformers load slowly, and --help needs neither
    from dataset.text_tokenizer import TextTokenizer


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Write text with a trained model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--load", required=True, help="run folder, .pth weights file or Hugging Face folder")
    parser.add_argument("--prompt", help="how the text begins; without it standard input is read")
    parser.add_argument("--tokenizer_path", help="tokenizer folder; needed for weights that do not name theirs")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="length at most, in tokens")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the most probable token")
    parser.add_argument(
        "--top_p", type=float, default=0.9, help="draw from the most probable tokens that hold this much"
    )
    parser.add_argument("--top_k", type=int, default=0, help="draw from this many most probable tokens; 0: all")
    parser.add_argument("--seed", type=int, default=42, help="the same seed writes the same text")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="auto: float32 on a CPU"
    )
    arguments = parser.parse_args(argv)
    problems = [
        f"--{name} {getattr(arguments, name)}: must be {rule}"
        for name, good, rule in (
            ("max_new_tokens", arguments.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= arguments.temperature < float("inf"), "0 or more"),
            ("top_p", 0 < arguments.top_p <= 1, "above 0 and at most 1"),
            ("top_k", arguments.top_k >= 0, "0 or more"),
        )
        if not good
    ]
    if problems:
        parser.error("; ".join(problems))
    return arguments


def load_model(load: str, tokenizer_path: str | None = None) -> tuple[Any, TextTokenizer]:
    """The model (float32 or as stored, on the host, evaluation mode) and the tokenizer it was trained with.

    Raises UserError, CheckpointError or DataError where something is missing, damaged or does not belong together.
    """
    from errors import UserError
    from training.config import resolve_path

    path = resolve_path(load)
    weights_file = path / f"{path.name}.pth" if path.is_dir() else path
    if (path / "config.json").is_file():
        model, tokenizer = _load_hugging_face(path, tokenizer_path)
    elif weights_file.is_file():
        model, tokenizer = _load_weights_file(weights_file, tokenizer_path)
    else:
        found = f"holds neither {weights_file.name} nor config.json" if path.is_dir() else "does not exist"
        raise UserError(f"--load {path}: {found}; give a run folder, a .pth file or a Hugging Face folder")
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"--load {path}: the model knows {model.config.vocab_size} ids, its tokenizer {tokenizer.vocab_size}; "
            "give the tokenizer it was trained with as --tokenizer_path"
        )
    return model.eval(), tokenizer


def _load_weights_file(path: Path, tokenizer_path: str | None) -> tuple[Any, TextTokenizer]:
    from dataset.text_tokenizer import TextTokenizer
    from errors import UserError
    from training.config import resolve_path
    from training.saving.weights import read_weights

    weights, card = read_weights(path)
    if card is None and tokenizer_path is None:
        raise UserError(
            f"--load {path}: does not say which tokenizer it was trained with (no {path.with_suffix('.json').name}); "
            "give that tokenizer with --tokenizer_path"
        )
    folder = tokenizer_path or str((card or {})["tokenizer_path"])
    tokenizer = TextTokenizer.load(resolve_path(folder))
    if card is not None and card["tokenizer_digest"] != tokenizer.digest:
        raise UserError(
            f"--load {path}: trained with tokenizer {card['tokenizer_digest'][:12]}, {folder} is "
            f"{tokenizer.digest[:12]}; give the one it was trained with as --tokenizer_path"
        )
    return _build(path, weights, card), tokenizer


def _build(path: Path, weights: dict[str, Any], card: dict[str, Any] | None) -> Any:
    """The model these weights belong to: by their card, else by their shapes."""
    import torch

    from errors import UserError
    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
    from model.shapes import config_from_weights

    try:
        config = MiniMindConfig(**card["config"]) if card else config_from_weights(weights)
        if config.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        with torch.device("meta"):
            model = MiniMindForCausalLM(config)
        model.load_state_dict(weights, assign=True)
    except (ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"--load {path}: {error}") from None
    if card is None:
        rest = f"rope_theta {config.rope_theta:g}" + (
            f", {config.num_experts_per_tok} expert per token" * config.use_moe
        )
        print(f"Note: {path.name} has no card; its shapes were read from the weights, {rest} assumed", file=sys.stderr)
    model.tie_weights()
    return model.float()


def _load_hugging_face(folder: Path, tokenizer_path: str | None) -> tuple[Any, TextTokenizer]:
    from dataset.text_tokenizer import TextTokenizer
    from errors import UserError
    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
    from training.config import resolve_path

    tokenizer = TextTokenizer.load(resolve_path(tokenizer_path) if tokenizer_path else folder)
    try:
        if json.loads((folder / "config.json").read_bytes()).get("model_type") == MiniMindConfig.model_type:
            return MiniMindForCausalLM.from_pretrained(folder, local_files_only=True), tokenizer
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True), tokenizer
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"--load {folder}: {str(error).strip().splitlines()[0]}") from None


def prompts(arguments: argparse.Namespace) -> Iterator[str]:
    """The prompt given, or standard input: whole from a pipe, line by line from a terminal until it ends."""
    if arguments.prompt is not None:
        yield arguments.prompt
    elif not sys.stdin.isatty():
        yield sys.stdin.read().rstrip("\n")
    else:
        while True:
            try:
                yield input("> ")
            except (EOFError, KeyboardInterrupt):
                print()
                return


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    import torch

    from errors import UserError
    from model.sampling import sample_text
    from training.device import choose_device, choose_dtype

    try:
        device = choose_device(arguments.device)
        model, tokenizer = load_model(arguments.load, arguments.tokenizer_path)
        # On a CPU one token at a time is no faster in bfloat16, and float32 is exact.
        exact = arguments.dtype == "auto" and device.type == "cpu"
        model.to(device, torch.float32 if exact else choose_dtype(arguments.dtype, device))
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, AssertionError) as error:  # an unknown or absent device
        print(f"Error: --device {arguments.device}: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return 2
    options = {name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k", "seed")}
    for prompt in prompts(arguments):
        print(prompt, end="", flush=True)
        sample_text(model, tokenizer, prompt, **options, on_text=lambda piece: print(piece, end="", flush=True))
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
