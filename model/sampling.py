"""Text from a model, token by token, leaving no trace: its own random numbers, the model's mode as it was."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

INCOMPLETE = "\ufffd"  # what decoding gives for the first bytes of a character whose last bytes are still to come


def sample_text(
    model: Any,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.9,
    top_k: int = 0,
    seed: int = 0,
    on_text: Callable[[str], None] | None = None,
) -> str:
    """What `model` writes after `prompt` (without it), until the end of the document or `max_new_tokens`.

    Args:
        model: a causal language model of transformers' kind, on any device; its training mode is restored.
        tokenizer: encode_batch, decode, bos_id, eos_id as TextTokenizer has them. The document starts with bos.
        temperature: 0 takes the most probable token each time.
        top_p, top_k: draw from the most probable tokens only, see `next_token_probabilities`.
        seed: of a generator of its own on the host; the global random numbers are neither used nor changed.
        on_text: is given each chunk of text as soon as its characters are whole.
    """
    prompt_ids = [tokenizer.bos_id, *tokenizer.encode_batch([prompt])[0]]
    start = written = len(tokenizer.decode(prompt_ids))
    ids, text = list(prompt_ids), ""
    was_training = model.training
    model.eval()
    try:
        for token in _tokens(model, prompt_ids, max_new_tokens, temperature, top_p, top_k, seed):
            if token == tokenizer.eos_id:
                break
            ids.append(token)
            # The whole is decoded each time: a tokenizer may write a token differently at the start of a text.
            text = tokenizer.decode(ids)
            if on_text and not text.endswith(INCOMPLETE):
                on_text(text[written:])
                written = len(text)
    finally:
        model.train(was_training)
    if on_text and text[written:]:
        on_text(text[written:])
    return text[start:]


@torch.no_grad()
def _tokens(
    model: Any, prompt_ids: list[int], max_new_tokens: int, temperature: float, top_p: float, top_k: int, seed: int
) -> Iterator[int]:
    """Up to `max_new_tokens` token ids that follow the prompt; keys and values are cached."""
    generator = torch.Generator().manual_seed(seed)
    new, cache = prompt_ids, None
    for _ in range(max_new_tokens):
        out = model(torch.tensor([new], device=model.device), cache=cache, use_cache=True)
        cache, logits = out.cache, out.logits[0, -1].float().cpu()
        new = [_draw(logits, temperature, top_p, top_k, generator)]
        yield new[0]


def _draw(logits: Tensor, temperature: float, top_p: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    probabilities = next_token_probabilities(logits, temperature, top_p, top_k)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def next_token_probabilities(logits: Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """[vocab] logits -> probabilities after temperature, then top_k, then top_p.

    top_k keeps that many tokens (0: all), top_p the smallest set of the most probable that holds that much probability
    (nucleus sampling, arXiv:1904.09751); the most probable token always stays.
    """
    sorted_logits, order = (logits / temperature).sort(descending=True, stable=True)
    sorted_probabilities = sorted_logits.softmax(dim=0)
    if top_k:
        sorted_probabilities[top_k:] = 0
        sorted_probabilities /= sorted_probabilities.sum()
    before = sorted_probabilities.cumsum(dim=0) - sorted_probabilities
    sorted_probabilities[before >= top_p] = 0
    sorted_probabilities[0] = sorted_probabilities[0].clamp(min=torch.finfo(logits.dtype).tiny)
    return torch.zeros_like(logits).scatter_(0, order, sorted_probabilities / sorted_probabilities.sum())
