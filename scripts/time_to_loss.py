"""Time to the same validation loss: Muon against AdamW, or this trainer against the plain baseline.

    python scripts/time_to_loss.py optimizers --minutes 120 --data_path train.jsonl --val_path val.jsonl
    python scripts/time_to_loss.py baseline --minutes 60 --data_path train.jsonl --val_path val.jsonl

`--minutes` is for everything together; runs are made as long as it allows: with less time the comparison covers only an
earlier part of training. Any option of train_pretrain.py may be given too; both sides of a comparison get it.

optimizers: each optimizer at three learning rates with one seed, then the best at three seeds, all for the same number
of steps. The loss to reach is the worse of the two mean final ones. Seconds are steps x the median step of that
optimizer over its runs: neighbours on the machine then do not decide the race. Each run follows a cosine to its own
last step, so an optimizer that is there earlier is judged at a learning rate still high: the gain is understated.

baseline: the plain baseline trains for two thirds of the time; this trainer gets a quarter of that with each optimizer,
from the start of its process on, compiling included. Both have the same positions a step, the same peak learning rate
and the same cosine over their own length.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "use_compile": 0}  # of the optimizers' comparison
LARGE = {"hidden_size": 512, "num_hidden_layers": 8, "use_compile": 1}  # of the baseline's
COMMON = {"max_seq_len": 512, "batch_size": 8, "accumulation_steps": 1, "eval_rows": 64, "log_interval": 1,
          "save_interval": 0, "save_state": 0}  # fmt: skip
OPTIMIZERS = ("adamw", "muon")
PLAIN_SHARE = 2 / 3  # of a race's time; each of this trainer's two runs gets a quarter of that
PROBE_STEPS = 8
EVALUATIONS = 12  # in a run
SHARE_TRAINING = 0.8  # of a run's time; the rest is start-up and evaluation


@dataclass
class Outcome:
    """One run: validation loss by step, and what a step took."""

    losses: dict[int, float]
    step_seconds: float
    wall_seconds: float
    overhead_seconds: float  # outside the steps' clock: start-up, last evaluation, exit

    @property
    def final(self) -> float:
        return self.losses[max(self.losses)]

    def steps_to(self, target: float) -> float | None:
        """The step at which the loss first is `target`, between evaluations by straight line; None if never."""
        before: tuple[int, float] | None = None
        for step, loss in sorted(self.losses.items()):
            if loss <= target:
                if before is None:
                    return float(step)
                return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
            before = step, loss
        return None


def words_of(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def train(folder: Path, words: list[str], steps: int, evaluate: bool = True, **settings: Any) -> Outcome:
    """One run of the trainer in a process of its own."""
    settings |= {"save_dir": folder, "save_weight": "run", "overwrite": 1, "max_steps": steps}
    settings |= {
        "warmup_steps": max(1, steps // 20),
        "eval_interval": max(1, steps // EVALUATIONS if evaluate else steps),
    }
    began = time.monotonic()
    command = [sys.executable, str(ROOT / "train_pretrain.py"), *words, *words_of(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nfailed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    wall = time.monotonic() - began
    records = [
        json.loads(line) for file in folder.glob("run_*/metrics.jsonl") for line in file.read_text().splitlines()
    ]
    logged = [r for r in records if "tokens_per_second" in r]
    tokens = [b["tokens_seen"] - a["tokens_seen"] for a, b in itertools.pairwise(logged)]
    seconds = [count / r["tokens_per_second"] for count, r in zip(tokens, logged[1:], strict=True)]
    losses = {r["step"]: r["val_loss"] for r in records if "val_loss" in r}
    return Outcome(losses, statistics.median(seconds), wall, wall - logged[-1]["elapsed_seconds"])


# --- Muon against AdamW ---


def optimizers(minutes: float, words: list[str], rates: list[float], seeds: list[int], folder: Path) -> int:
    probes = {name: train(folder, words, PROBE_STEPS, False, optimizer=name) for name in OPTIMIZERS}
    runs = len(OPTIMIZERS) * (len(rates) + len(seeds) - 1)
    per_pair = sum(probe.step_seconds for probe in probes.values())
    overhead = statistics.mean(probe.overhead_seconds for probe in probes.values())
    left = 60 * minutes - sum(probe.wall_seconds for probe in probes.values()) - runs * overhead
    steps = max(EVALUATIONS, int(SHARE_TRAINING * left / (runs / len(OPTIMIZERS) * per_pair)))
    print(
        f"{runs} runs of {steps} steps\n\n| optimizer | learning rate | seed | final val loss | s / step |", flush=True
    )
    print("|---|---:|---:|---:|---:|", flush=True)
    found: dict[tuple[str, float, int], Outcome] = {}

    def run(name: str, rate: float, seed: int) -> None:
        outcome = found[name, rate, seed] = train(folder, words, steps, optimizer=name, learning_rate=rate, seed=seed)
        print(f"| {name} | {rate:g} | {seed} | {outcome.final:.4f} | {outcome.step_seconds:.3f} |", flush=True)

    for rate in rates:
        for name in OPTIMIZERS:
            run(name, rate, seeds[0])
    best = {name: min((found[name, rate, seeds[0]].final, rate) for rate in rates)[1] for name in OPTIMIZERS}
    for seed in seeds[1:]:
        for name in OPTIMIZERS:
            run(name, best[name], seed)
    chosen = {name: [found[name, best[name], seed] for seed in seeds] for name in OPTIMIZERS}
    target = max(statistics.mean(outcome.final for outcome in outcomes) for outcomes in chosen.values())
    print(f"\nLoss to reach: {target:.4f}\n\n| optimizer | rate | final (mean) | spread | s / step | steps | seconds |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    times = {}
    for name, outcomes in chosen.items():
        finals = [outcome.final for outcome in outcomes]
        # A seed that just misses its own optimizer's mean counts as there at its last step.
        reached = statistics.mean(outcome.steps_to(target) or max(outcome.losses) for outcome in outcomes)
        second = statistics.median(o.step_seconds for key, o in found.items() if key[0] == name)
        times[name] = reached * second
        edge = " (at the edge of the range)" if best[name] in (min(rates), max(rates)) else ""
        print(
            f"| {name} | {best[name]:g}{edge} | {statistics.mean(finals):.4f} | {max(finals) - min(finals):.4f} | "
            f"{second:.3f} | {reached:.0f} | {times[name]:.0f} |"
        )
    print(f"\nMuon takes {times['muon'] / times['adamw']:.2f} of AdamW's time to the same validation loss.")
    return 0


# --- this trainer against the plain baseline ---


def baseline(minutes: float, words: list[str], rate: float, folder: Path) -> int:
    """Prints both sides' time and validation loss; status 1 if this trainer loses with either optimizer."""
    weights, steps, took = train_plain_for(60 * minutes * PLAIN_SHARE, words, rate, folder)
    target = validation_loss(weights, words, folder)
    print(f"Plain baseline: {steps} steps in {took:.0f} s, val loss {target:.4f}", flush=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")  # nothing is compiled yet, as on a new machine
    first, again = (train(folder, words, PROBE_STEPS, False, learning_rate=rate) for _ in range(2))
    compiling = max(0.0, first.wall_seconds - again.wall_seconds)
    return max([race(took, target, compiling, [*words, "--optimizer", name], rate, folder) for name in OPTIMIZERS])


def race(took: float, target: float, compiling: float, words: list[str], rate: float, folder: Path) -> int:
    """This trainer against a baseline that `took` so many seconds to the loss `target`; `compiling` seconds are added
    to its time. Status 1 if its run never reaches `target`."""
    probe = train(folder, words, PROBE_STEPS, False, learning_rate=rate)
    startup = probe.wall_seconds - PROBE_STEPS * probe.step_seconds
    steps = max(EVALUATIONS, int(SHARE_TRAINING * (took / 4 - startup - compiling) / probe.step_seconds))
    outcome = train(folder, words, steps, learning_rate=rate)
    print(
        f"This trainer, {words[-1]}: {steps} steps in {outcome.wall_seconds:.0f} s (+ {compiling:.0f} s that compiling "
        f"takes the first time), val loss {outcome.final:.4f}",
        flush=True,
    )
    needed = outcome.steps_to(target)
    if needed is None:
        print("It does not reach the baseline's loss in a quarter of its time.", flush=True)
        return 1
    seconds = outcome.overhead_seconds + compiling + needed * outcome.step_seconds
    print(f"It is there after {needed:.0f} steps, {seconds:.0f} s = {seconds / took:.2f} of the time.", flush=True)
    return 0


def train_plain_for(seconds: float, words: list[str], rate: float, folder: Path) -> tuple[Path, int, float]:
    """(weights file, steps, seconds) of the plain baseline, as many steps as the time allows."""
    import torch

    from dataset.text_tokenizer import TextTokenizer
    from scripts.plain_baseline import ROW, PlainDataset, Shape, StepClock, train_plain
    from training.command_line import load_config
    from training.config import resolve_path
    from training.device import choose_device

    c = load_config(words)
    dataset = PlainDataset(resolve_path(c.data_path), TextTokenizer.load(resolve_path(c.tokenizer_path)))
    shape = Shape(c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads)
    rows = max(1, round(c.batch_size * c.max_seq_len / ROW))
    device, clock = choose_device(c.device), StepClock()
    train_plain(shape, dataset, device, rows, c.accumulation_steps, 4, clock)
    step_seconds = (clock.times[-1][0] - clock.times[1][0]) / 3
    steps = max(2, int(seconds / step_seconds))
    began = time.monotonic()
    model = train_plain(shape, dataset, device, rows, c.accumulation_steps, steps, StepClock(), rate)
    took = time.monotonic() - began
    torch.save(model.state_dict(), folder / "plain.pth")
    return folder / "plain.pth", steps, took


def validation_loss(weights: Path, words: list[str], folder: Path) -> float:
    """val_loss of a weights file, by the trainer itself."""
    from training.command_line import load_config

    same = {"tokenizer_path": load_config(words).tokenizer_path}  # explicit: the file does not name it
    more = words_of({"from_weight": weights, "eval_only": 1, "save_dir": folder, "save_weight": "look", **same})
    command = [sys.executable, str(ROOT / "train_pretrain.py"), *words, *more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"evaluating {weights} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])["val_loss"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("comparison", choices=("optimizers", "baseline"))
    parser.add_argument("--minutes", type=float, default=25, help="for everything together (default: %(default)s)")
    parser.add_argument("--rates", default="0.0015,0.003,0.006", help="learning rates of the optimizers' comparison")
    parser.add_argument("--seeds", default="1,2,3", help="its seeds; the first is for the learning rates")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of both in the baseline's comparison")
    options, words = parser.parse_known_args(argv)
    sizes = SMALL if options.comparison == "optimizers" else LARGE
    with tempfile.TemporaryDirectory(prefix="time-to-loss-") as name:
        folder = Path(name)
        words = [*words_of({**COMMON, **sizes, "cache_dir": folder / "cache"}), *words]
        if options.comparison == "baseline":
            return baseline(options.minutes, words, options.rate, folder)
        rates = [float(rate) for rate in options.rates.split(",")]
        return optimizers(options.minutes, words, rates, [int(seed) for seed in options.seeds.split(",")], folder)


if __name__ == "__main__":
    sys.exit(main())
