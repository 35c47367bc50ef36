"""Kill a run with -9 at random instants, resume it, and compare with the run that was left alone; bit for bit.

    python tests/torture.py [--kills 40] [--seed 0]         a few minutes; ends with one summary line

About 60 steps over 2 epochs, accumulation 4, dropout 0.1, a partial last micro-batch and window; dense and MoE; one
process and two gloo ranks. Two in five kills aim at a save, the rest falls anywhere, the start included; on top
come the edges: before the first save, after the last step of an epoch, at the last step of the run, and two kills in a
row at one place, with each checkpoint's evaluation among them. Compared are final and best weights, every logged loss,
every score, and the ids of the rows that the surviving steps used.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from conftest import small_run, write_corpus  # noqa: E402 - found by the line above when run as a script

from hooks import Hook, at_call, at_event, record_rows  # noqa: E402
from runs import best_weights, final_weights, launch, logged, replaced, run_folder, same_bits, without  # noqa: E402
from training.saving.checkpoint import find_checkpoints  # noqa: E402

Rows = dict[int, list[int]]  # step -> row ids, rank after rank, missing ones left out


def saved_step(words: list[str]) -> int:
    found = find_checkpoints(run_folder(words) / "resume")
    return found[-1][0] if found else 0


def unfinished(words: list[str]) -> set[str]:
    """Names of what is being written to the run folder, or was when a process died; they tell its pid."""
    folder = run_folder(words)
    return {path.name for pattern in (".*.tmp-*", "resume/.*") for path in folder.glob(pattern)}


class Attempts:
    """One run through any number of deaths, always begun with the same command."""

    def __init__(self, words: list[str], ranks: int, scratch: Path):
        self.words, self.ranks, self.scratch = words, ranks, scratch
        self.rows: Rows = {}  # of the steps that stayed
        self.kills = self.kills_in_saves = 0
        self.finished = False

    def attempt(self, *hooks: Hook, until: Callable[[list[Any]], None] | None = None) -> None:
        """Go on until rank 0 kills itself (`hooks`), `until` returns, or the end; then kill what is left."""
        path, left_before = self.scratch / "rows", unfinished(self.words)
        path.unlink(missing_ok=True)
        by_rank = {rank: [record_rows(path), *hooks[: rank == 0 and len(hooks)]] for rank in range(self.ranks)}
        processes = launch(self.words, "--from_resume", 1, ranks=self.ranks, hooks=by_rank, log=self.scratch / "log")
        if until:
            until(processes)
        else:
            processes[0].join()
        if processes[0].exitcode != 0:
            for process in processes:
                process.kill()
        for process in processes:
            process.join(60)
        codes = {process.exitcode for process in processes}
        assert codes == {0} or codes <= {0, 1, -9}, f"{codes}: {(self.scratch / 'log').read_text()[-3000:]}"
        self.finished = codes == {0}
        self.kills += not self.finished
        self.kills_in_saves += not self.finished and bool(unfinished(self.words) - left_before)
        self.rows |= {step: rows for step, rows in rows_of(path).items() if step <= saved_step(self.words)}

    def same_as(self, other: Attempts) -> bool:
        """Weights, losses and rows are those of `other`, bit for bit."""
        weights = all(same_bits(of(self.words), of(other.words)) for of in (final_weights, best_weights))
        figures = all(logged(self.words, key) == logged(other.words, key) for key in ("loss", "val_loss"))
        return weights and figures and self.rows == other.rows


def rows_of(path: Path) -> Rows:
    """The last record of each step and rank in a file of `record_rows`."""
    found: dict[int, dict[int, list[int]]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        record = json.loads(line)
        found.setdefault(record["step"], {})[record["rank"]] = [row for row in record["rows"] if row >= 0]
    return {step: [row for rank in sorted(ranks) for row in ranks[rank]] for step, ranks in found.items()}


def tortured_run(folder: Path, documents: int, **changes: object) -> list[str]:
    """Twelve rows a step in micro-batches of three; the last step of an epoch is short, its last micro-batch too."""
    words = small_run(folder, write_corpus(folder / "corpus.jsonl", documents=documents))
    val_path = write_corpus(folder / "val.jsonl", documents=6, seed=3)
    settings = {
        "epochs": 2, "dropout": 0.1, "batch_size": 3, "global_batch_size": 12, "save_interval": 3,
        "val_path": val_path, "eval_interval": 3,
    }  # fmt: skip
    return without(replaced(words, **settings | changes), "accumulation_steps")


def at_step(words: list[str], step: int) -> Hook:
    """Death right after this step of the run is finished, before it is logged or saved."""
    return at_event("step", step - saved_step(words), "SIGKILL")


def die_at_the_edges(run: Attempts, steps_per_epoch: int, times: int = 2) -> None:
    """Before and in the first save, after a later one, after the last step of an epoch, in and right after an
    evaluation, while its score is kept, at the last step of the run and when all is saved; each place `times` in a row.
    Leaves the run finished."""
    places = (
        lambda: at_step(run.words, 3),
        lambda: at_call("training.saving.saver.write_weights", 1, "SIGKILL", after=True),
        lambda: at_call("training.saving.checkpoint.write_manifest", 1, "SIGKILL", after=True),
        lambda: at_call("training.saving.saver.prune", 1, "SIGKILL"),
        lambda: at_step(run.words, steps_per_epoch),
        lambda: at_event("evaluating", 1, "SIGKILL"),
        lambda: at_event("evaluated", 1, "SIGKILL"),
        lambda: at_call("training.saving.saver.publish_copy", 1, "SIGKILL", after=True),
        lambda: at_call("training.saving.saver.amend_checkpoint", 1, "SIGKILL", after=True),
        lambda: at_step(run.words, 2 * steps_per_epoch),
    )
    for edge, place in enumerate(places):
        for _ in range(times):
            run.attempt(place())
            assert not run.finished, f"edge {edge} was not met; step {saved_step(run.words)} is saved"
    run.attempt(at_event("leaving", 1, "SIGKILL"))
    assert saved_step(run.words) == 2 * steps_per_epoch
    run.attempt()


def die_anywhere(run: Attempts, draw: random.Random, seconds: float) -> None:
    """One attempt that ends at a random instant of an undisturbed run's `seconds`, or inside its next save."""
    aims_at_save = draw.random() < 0.4
    delay = draw.uniform(0, 0.006) if aims_at_save else draw.uniform(0, 1.2 * seconds)
    left_before = unfinished(run.words)

    def until(processes: list[Any]) -> None:
        while aims_at_save and processes[0].exitcode is None and not unfinished(run.words) - left_before:
            time.sleep(0.0005)
        deadline = time.monotonic() + delay
        while processes[0].exitcode is None and time.monotonic() < deadline:
            time.sleep(0.0005)

    run.attempt(until=until)


def torture(moe: int, ranks: int, kills: int, draw: random.Random) -> tuple[bool, str]:
    """Runs of one kind until so many random kills are done, every finished one compared. Returns (equal, summary)."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = tortured_run(folder, 400, use_moe=moe)
        whole = Attempts([*words, "--save_weight", "whole"], ranks, folder)
        whole.attempt()
        seconds, steps = time.monotonic() - began, saved_step(whole.words)
        assert whole.finished
        edge = Attempts([*words, "--save_weight", "edge"], ranks, folder)
        die_at_the_edges(edge, steps // 2)
        equal, compared = int(edge.same_as(whole)), 1
        total = in_saves = 0
        while total < kills:
            run = Attempts([*words, "--save_weight", f"run{compared}"], ranks, folder)
            while not run.finished:
                if total + run.kills < kills:
                    die_anywhere(run, draw, seconds)
                else:
                    run.attempt()
            total, in_saves = total + run.kills, in_saves + run.kills_in_saves
            equal, compared = equal + run.same_as(whole), compared + 1
            shutil.rmtree(run_folder(run.words))
    return equal == compared, (
        f"{'MoE' if moe else 'dense'} on {ranks}: {total} random kills ({in_saves} inside a save) and {edge.kills} at "
        f"edges of {steps} steps, {equal} of {compared} runs bit-equal, {time.monotonic() - began:.0f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40, help="random kills of each of the four kinds of run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    results = []
    for ranks in (1, 2):
        for moe in (0, 1):
            results.append(torture(moe, ranks, options.kills, draw))
            print(results[-1][1], flush=True)
    passed = all(equal for equal, _ in results)
    print(f"torture {'passed' if passed else 'FAILED'}: {'; '.join(summary for _, summary in results)}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
