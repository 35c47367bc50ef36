"""The texts of a run: found, tokenised or opened, packed into rows."""

from __future__ import annotations

from filelock import FileLock

from dataset.lm_dataset import PretrainDataset, choose_documents
from dataset.make_sample import make_sample
from dataset.text_tokenizer import TextTokenizer
from dataset.token_cache import TokenCache, build_or_open, count_shared
from errors import Findings, UserError, refuse
from training.config import SAMPLE_FOLDER, Config, resolve_path, resolve_paths
from training.data import Data


def make_bundled_sample() -> None:
    """The bundled sample, made by one process while others wait. Raises UserError where it cannot be written."""
    try:
        with FileLock(SAMPLE_FOLDER.with_name(".sample.lock")):
            make_sample(SAMPLE_FOLDER)
    except (OSError, NotImplementedError) as error:
        raise UserError(
            f"--data_path: the bundled sample cannot be made in {SAMPLE_FOLDER} ({error}); make it elsewhere with "
            "`python dataset/make_sample.py --out DIR` and give --data_path DIR/train.jsonl --val_path DIR/val.jsonl"
        ) from None


def open_data(config: Config, tokenizer: TextTokenizer, show: bool) -> Data:
    """Training rows and, where there are texts for it, validation rows. Raises DataError."""
    if config.uses_sample:
        make_bundled_sample()
    problems = Findings()
    cache = problems.of(open_cache, config, tokenizer, show, config.data_path, "train", config.val_fraction)
    validation = problems.of(open_validation, config, tokenizer, show)
    refuse(problems)
    train = PretrainDataset(cache, config.max_seq_len, packing=bool(config.packing))
    if show and validation:
        validation.ledger["shared_with_train"] = count_shared(cache, validation.cache)
    return Data(tokenizer, train, validation)


def open_validation(config: Config, tokenizer: TextTokenizer, show: bool) -> PretrainDataset | None:
    """Rows of held-out documents: of --val_path, of the bundled sample, or of --val_fraction; None without any. Raises
    DataError."""
    val_path = config.val_path or (str(SAMPLE_FOLDER / "val.jsonl") if config.uses_sample else "")
    if config.uses_sample:
        make_bundled_sample()
    if val_path:
        cache = open_cache(config, tokenizer, show, val_path, "train", 0.0)
    elif config.val_fraction > 0:
        cache = open_cache(config, tokenizer, show, config.data_path, "val", config.val_fraction)
    else:
        return None
    chosen = choose_documents(cache, config.eval_rows, config.max_seq_len) if config.eval_rows else None
    return PretrainDataset(cache, config.max_seq_len, packing=True, documents=chosen)


def open_cache(
    config: Config, tokenizer: TextTokenizer, show: bool, path: str, part: str, fraction: float
) -> TokenCache:
    return build_or_open(
        resolve_paths(path),
        tokenizer,
        text_key=config.text_key,
        cache_dir=resolve_path(config.cache_dir),
        bad_lines=config.bad_lines,
        val_fraction=fraction,
        part=part,
        verify=bool(config.verify_data),
        progress=show,
    )
