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

    def corpus(path: str, part: str, fraction: float) -> TokenCache:
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

    problems, held_out = Findings(), None
    train = problems.of(corpus, config.data_path, "train", config.val_fraction)
    val_path = config.val_path or (str(SAMPLE_FOLDER / "val.jsonl") if config.uses_sample else "")
    if val_path:
        held_out = problems.of(corpus, val_path, "train", 0.0)
    elif config.val_fraction > 0:
        held_out = problems.of(corpus, config.data_path, "val", config.val_fraction)
    refuse(problems)
    dataset = PretrainDataset(train, config.max_seq_len, packing=bool(config.packing))
    if held_out is None:
        return Data(tokenizer, dataset, None)
    chosen = None
    if config.eval_rows:
        chosen = choose_documents(held_out, config.eval_rows, config.max_seq_len)
    validation = PretrainDataset(held_out, config.max_seq_len, packing=True, documents=chosen)
    if show:
        validation.ledger["shared_with_train"] = count_shared(train, held_out)
    return Data(tokenizer, dataset, validation)
