"""Runs and token caches made by an earlier release go on: the fixture was written by format 1 as it first came out.

It holds two runs of 24 steps stopped at step 7 (dense with AdamW; experts with Muon), the cache of their texts, and
what that release came to at the end.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import small_run, write_corpus
from tiny_tokenizer import make_folder

from runs import logged, replaced, train, without

FIXTURE = Path(__file__).parent / "fixtures" / "begun_with_1"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text())
RUNS: dict[str, dict[str, object]] = {
    "dense_32": {"save_weight": "dense"},
    "moe_32_moe": {"save_weight": "moe", "use_moe": 1, "optimizer": "muon"},
}


def words_of(folder: Path, name: str) -> list[str]:
    corpus = write_corpus(folder / "corpus.jsonl", documents=150, seed=1)
    words = replaced(
        without(small_run(folder, corpus), "epochs"),
        tokenizer_path=make_folder(folder / "tokenizer"), dropout=0.1, hidden_size=32, save_interval=4, eval_interval=6,
        val_path=corpus, max_steps=24, threads=1, keep_checkpoints=1, **RUNS[name],
    )  # fmt: skip
    shutil.copytree(FIXTURE / name, folder / "runs" / name)
    return words


@pytest.mark.parametrize("name", list(RUNS))
def test_a_run_begun_with_format_1_ends_as_it_would_have(tmp_path, name):
    words = words_of(tmp_path, name)
    train(words, "--from_resume", 1)
    expected, losses = EXPECTED[name], logged(words)
    run = json.loads((tmp_path / "runs" / name / "run.json").read_text())
    assert [save["step"] for save in run["saves"]][-1] == 24
    assert list(losses) == list(range(1, 25))
    environment = run["environment"]
    same_place = (environment["cpu"], environment["cpu_flags"], environment["versions"]["torch"]) == (
        EXPECTED["processor"], EXPECTED["cpu_flags"], EXPECTED["torch"],
    )  # fmt: skip
    if same_place:  # other processors and libraries round otherwise
        assert run["saves"][-1]["weights_digest"] == expected["weights_digest"]
    for step, loss in losses.items():
        assert loss == pytest.approx(expected["losses"][str(step)], abs=0 if same_place else 2e-3)
    for step, loss in logged(words, "val_loss").items():
        assert loss == pytest.approx(expected["val_losses"][str(step)], abs=0 if same_place else 2e-3)


def test_a_cache_built_with_format_1_is_opened_as_it_stands(tmp_path, capsys):
    words = words_of(tmp_path, "dense_32")
    train(words, "--from_resume", 1)
    built = next(path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    shutil.rmtree(built)
    shutil.copytree(next((FIXTURE / "cache").iterdir()), built)
    stamp = (built / "metadata.json").stat().st_mtime_ns
    capsys.readouterr()
    train(words, "--overwrite", 1, "--stop_after", 2)
    assert "tokenis" not in capsys.readouterr().out
    assert (built / "metadata.json").stat().st_mtime_ns == stamp
    assert torch.isfinite(torch.tensor(list(logged(words).values()))).all()
