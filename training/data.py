"""The texts of a run as the model meets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataset.lm_dataset import PretrainDataset
from dataset.text_tokenizer import TextTokenizer


@dataclass(frozen=True)
class Data:
    """Training rows, validation rows (None: no texts for it) and the tokenizer that made both."""

    tokenizer: TextTokenizer
    train: PretrainDataset
    validation: PretrainDataset | None

    @property
    def identity(self) -> dict[str, Any]:
        """What makes them these data and no others."""
        return {
            "data_fingerprint": self.train.fingerprint,
            "validation_fingerprint": self.validation.fingerprint if self.validation else None,
            "tokenizer_digest": self.tokenizer.digest,
            "rows": len(self.train),
        }

    @property
    def ledgers(self) -> dict[str, dict[str, Any]]:
        """Counts for people of what was read, by part."""
        parts = {"train": self.train, "val": self.validation}
        return {part: dataset.ledger for part, dataset in parts.items() if dataset}
