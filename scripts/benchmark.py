"""Speed on this machine, measured side by side: one Markdown table.

    python scripts/benchmark.py                                      # 30 M parameters on the bundled sample
    python scripts/benchmark.py --data_path my.jsonl --hidden_size 768 --batch_size 16
    python scripts/benchmark.py --curves all                         # cost against documents, row length, layers, width
    python scripts/benchmark.py --quick                              # tiny: does it run?

Every option of train_pretrain.py may be given too; --data_path is one .jsonl file here.

Work is counted in useful tokens: targets predicted, no padding. Each figure comes from a process of its own that trains
with the real loop on real rows and logs every step, the variants in turn (A B C A B C), each beside the machine's
ceiling at that moment: a large matrix product in the training's dtype. The plain baseline is scripts/plain_baseline.py.
Ratios are medians over the turns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

DEFAULTS = {
    "hidden_size": 512, "num_hidden_layers": 8, "max_seq_len": 512, "batch_size": 8, "accumulation_steps": 1,
}  # fmt: skip
QUICK = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_seq_len": 128,
    "batch_size": 4, "accumulation_steps": 1,
}  # fmt: skip
VARIANTS = {"plain": "plain baseline", "eager": "this trainer", "compiled": "this trainer, compiled"}
PARTS = ("data", "forward", "backward", "optimizer", "logging", "other")
WRAPPED = ("update_parameters", "log_step", "forward_backward")
SAVE_EVERY = 100  # steps between saves for which the cost of one is spread
# Dense bfloat16 TFLOP/s of the makers' datasheets; the first name that occurs in the device's.
DATASHEET = {"H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "RTX 4090": 165}
CURVES: dict[str, list[dict[str, int]]] = {
    "max_seq_len": [{"max_seq_len": s, "batch_size": 4096 // s} for s in (256, 512, 1024, 2048)],
    "layers": [{"num_hidden_layers": n} for n in (2, 4, 8, 16)],
    "hidden": [{"hidden_size": n} for n in (256, 512, 768, 1024)],
    "rows": [{"batch_size": n} for n in (2, 4, 8, 16)],
}


# --- the parent: starts the parts, prints the table ---


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """(own options, options of train_pretrain.py)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps")
    parser.add_argument(
        "--variants", default="", help="some of plain,eager,compiled (default: all, quick: the first two)"
    )
    parser.add_argument("--pairs", type=int, default=0, help="turns (default: 3, quick: 1)")
    parser.add_argument("--steps", type=int, default=0, help="timed steps a turn (default: 8, quick: 3)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--plain_row", type=int, default=340, help="the baseline's row length; MiniMind's is 340")
    parser.add_argument("--curves", default="", help="all, documents, or some of: " + ", ".join(CURVES))
    parser.add_argument("--rows_only", action="store_true", help="no header and no data part: table rows alone")
    parser.add_argument("--no_save", action="store_true", help="leave out the save at the end, and its cost")
    parser.add_argument("--label", default="", help="put before the name of each row")
    parser.add_argument("--json", default="", help="also write every measurement to this file")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    options, words = parser.parse_known_args(argv)
    options.variants = options.variants or ("plain,eager" if options.quick else ",".join(VARIANTS))
    options.pairs = options.pairs or (1 if options.quick else 3)
    options.steps = options.steps or (3 if options.quick else 8)
    sizes = QUICK if options.quick else DEFAULTS
    return options, [*(word for name, value in sizes.items() for word in (f"--{name}", str(value))), *words]


def main(argv: list[str] | None = None) -> int:
    options, words = parse(argv)
    if options.part:
        return child(options, words)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        words += ["--save_dir", f"{folder}/runs", *(["--cache_dir", f"{folder}/cache"] * ("--cache_dir" not in words))]
        if options.curves:
            return curves(options, words, folder)
        found: dict[str, list[dict[str, Any]]] = {}
        if not options.rows_only:
            found["data"] = [run_part("data", options, words)]
            print(header(found["data"][0], words), flush=True)
        variants = options.variants.split(",")
        for turn in range(options.pairs):
            for variant in variants:
                found.setdefault(variant, []).append(run_part(variant, options, words))
                rate = found[variant][-1]["tokens_per_second"]
                print(f"turn {turn + 1} {variant}: {rate:,.0f} useful tokens/s", file=sys.stderr, flush=True)
        print(table(found, variants, options), flush=True)
        started: dict[str, float] = next((found[v][-1]["startup"] for v in variants if "startup" in found[v][-1]), {})
        if started and not options.label:
            print("Start-up with a token cache: " + ", ".join(f"{name} {s:.1f} s" for name, s in started.items()))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))
    return 0


def run_part(name: str, options: argparse.Namespace, words: list[str], **more: object) -> dict[str, Any]:
    """One part in a process of its own: its memory, threads and caches are not another part's."""
    extra = [w for key, value in more.items() for w in (f"--{key}", str(value))]
    own = ["--part", name, "--steps", options.steps, "--warmup", options.warmup, "--plain_row", options.plain_row]
    own += ["--no_save"] * options.no_save
    command = [sys.executable, __file__, *map(str, own), *words, *extra]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"benchmark part {name} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def header(data: dict[str, Any], words: list[str]) -> str:
    settings = dict(zip(words[::2], words[1::2], strict=False))
    shown = " ".join(f"{name} {value}" for name, value in settings.items() if not name.endswith("_dir"))
    return (
        f"Machine: {data['machine']}\n"
        f"Settings: {shown}\n"
        f"Ceiling: {data['ceiling'] / 1e9:,.0f} GFLOP/s {data['dtype']}, {data['float32_ceiling'] / 1e9:,.0f} GFLOP/s "
        f"float32 (matrix products), {data['copy_bytes'] / 1e9:.1f} GB/s memory copy (read + write)\n"
        f"Data: {data['megabytes']:.1f} MB tokenised, packed and stored in {data['build_seconds']:.1f} s = "
        f"{data['megabytes'] / data['build_seconds']:.1f} MB/s, {100 * data['tokenizer_share']:.0f} % of the bare "
        f"tokenizer's rate; opened again in {data['open_seconds']:.2f} s; input alone "
        f"{1e3 * data['batch_seconds']:.2f} ms a micro-batch = {data['input_tokens_per_second'] / 1e6:.1f} M tokens/s\n"
    )


def table(found: dict[str, list[dict[str, Any]]], variants: list[str], options: argparse.Namespace) -> str:
    """The Markdown table: one row a variant, medians over the turns."""
    head = "| | " + " | ".join(COLUMNS) + " |\n|---" + "|---:" * len(COLUMNS) + "|"
    rows = [] if options.rows_only else [head]
    flops = next((e["flops_per_token"] for v in variants for e in found[v] if "flops_per_token" in e), 0.0)
    for variant in variants:
        name = f"{options.label} {VARIANTS[variant]}".strip()
        cells = [f"{name} ({found[variant][0]['label']})", *figures(found[variant], found.get("plain", []), flops)]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


COLUMNS = (
    "useful tokens/s", "useful MFU", "of datasheet", *PARTS, "one save", "peak GiB", "first step", "last loss",
    "x plain", "x plain, CPU time",
)  # fmt: skip


def figures(entries: list[dict[str, Any]], plain: list[dict[str, Any]], flops: float) -> list[str]:
    """The cells of one row under COLUMNS; empty where something was not measured."""

    def median(form: str, value: Any, others: list[dict[str, Any]] | None = None) -> str:
        try:
            values = [value(*pair) for pair in zip(entries, others or entries, strict=False)]
            return form.format(statistics.median(values))
        except KeyError:
            return ""

    def ratio(key: str) -> str:
        return median("{:.2f} x", lambda e, p: e[key] / p[key], plain) if plain else ""

    rate, sheet = "tokens_per_second", entries[0]["datasheet"]
    return [
        median("{:,.0f}", lambda e, _: e[rate]),
        median("{:.1%}", lambda e, _: e[rate] * flops / e["ceiling"]) if flops else "",
        median("{:.1%}", lambda e, _: e[rate] * flops / (sheet * 1e12)) if flops and sheet else "",
        *(median("{:.1%}", lambda e, _, part=part: e["shares"][part]) for part in PARTS),
        median("{:.1%}", lambda e, _: e["save_seconds"] / (SAVE_EVERY * e["step_seconds"])),
        median("{:.2f}", lambda e, _: e["peak_memory_gib"]),
        median("{:.1f} s", lambda e, _: e["first_step_seconds"]),
        median("{:.4f}", lambda e, _: e["last_loss"]),
        ratio(rate),
        ratio("tokens_per_cpu_second") if not sheet else "",
    ]


def curves(options: argparse.Namespace, words: list[str], folder: str) -> int:
    """Cost against size, a row as soon as it is known: time for a million useful tokens, and what it holds."""
    wanted = [*CURVES, "documents"] if options.curves == "all" else options.curves.split(",")

    def show(*cells: object) -> None:
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)

    show("varied", "to", "s / M tokens", "CPU s / M tokens", "MFLOP / token", "GFLOP / CPU s", "peak GiB")
    show("---", *["---:"] * 6)
    for change in (change for name in wanted for change in CURVES.get(name, [])):
        found = run_part("eager", options, words, **change)
        rate, by_cpu, flops = found["tokens_per_second"], found["tokens_per_cpu_second"], found["flops_per_token"]
        cells = (1e6 / rate, 1e6 / by_cpu, flops / 1e6, by_cpu * flops / 1e9, found["peak_memory_gib"])
        show(next(iter(change)), next(iter(change.values())), *(f"{cell:,.1f}" for cell in cells))
    if "documents" in wanted:
        print(flush=True)
        show("documents", "MB", "preparation s", "s / MB", "peak GiB")
        show(*["---:"] * 5)
        lines = corpus_file(words).read_bytes().splitlines(keepends=True)
        for part in (8, 4, 2, 1):
            text = Path(folder) / f"part{part}.jsonl"
            text.write_bytes(b"".join(lines[: len(lines) // part]))
            found = run_part("data", options, words, data_path=text, cache_dir=f"{folder}/cache{part}")
            mb, seconds = found["megabytes"], found["build_seconds"]
            figures_of = (mb, seconds, seconds / mb, found["peak_gib"])
            show(f"{len(lines) // part:,}", *(f"{figure:.2f}" for figure in figures_of))
    return 0


def corpus_file(words: list[str]) -> Path:
    from training.before.data import make_bundled_sample
    from training.command_line import load_config
    from training.config import resolve_path

    config = load_config(words)
    if config.uses_sample:
        make_bundled_sample()
    return resolve_path(config.data_path)


# --- the children: each measures one thing and prints one line of JSON ---


def child(options: argparse.Namespace, words: list[str]) -> int:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        if options.part == "data":
            found = measure_data(words)
        elif options.part == "plain":
            found = measure_plain(options, words)
        else:
            found = measure_trainer(options, words, compiled=options.part == "compiled")
    print(json.dumps(found))
    return 0


def measure_trainer(options: argparse.Namespace, words: list[str], compiled: bool) -> dict[str, Any]:
    """The trainer itself: its loop on its rows, timed from outside by wrapping what the loop calls."""
    import torch

    import train_pretrain as trainer
    from training.before.begin import begin_run
    from training.before.prepare import prepare
    from training.device import peak_memory_gib
    from training.distributed import init_distributed_mode
    from training.during.stopping import StopSignal

    imported = time.perf_counter()
    more = {"use_compile": int(compiled), "overwrite": 1, "log_interval": 1, "save_interval": 0}
    more["max_steps"] = options.warmup + 2 * options.steps
    if torch.cuda.is_available():
        more["log_interval"] = 10  # as by default: a log line waits for the device
    if options.no_save:
        more["save_state"] = 0  # the check of free disk space then asks for none
    config = trainer.load_config([*words, *(word for k, v in more.items() for word in (f"--{k}", str(v)))])
    prepared = prepare(config)
    opened = time.perf_counter()
    with StopSignal() as stop:
        run = begin_run(prepared, init_distributed_mode(config.device), stop, trainer.nobody)
        run.data = dataclasses.replace(run.data, validation=None)
        if options.no_save:
            run.saver.save = run.saver.finish = lambda *_: None  # type: ignore[assignment,method-assign]
        begun = time.perf_counter()
        with LoopWatch(trainer, run, options.warmup, options.steps) as watch:
            trainer.train(run)
    rate_seconds = watch.at[options.warmup + options.steps] - watch.at[options.warmup]
    share_seconds = watch.at[-1] - watch.at[options.warmup + options.steps]
    useful = sum(watch.targets[options.warmup : options.warmup + options.steps])
    parts = {name: watch.seconds[name] / share_seconds for name in PARTS if name != "other"}
    return {
        "label": run.choices.dtype,
        "flops_per_token": prepared.cost.flops_per_token,
        "tokens_per_second": useful / rate_seconds,
        "tokens_per_cpu_second": useful / watch.cpu_seconds,
        "step_seconds": rate_seconds / options.steps,
        "last_loss": watch.last_loss,
        **({} if options.no_save else {"save_seconds": watch.seconds["saving"]}),
        "shares": parts | {"other": 1 - sum(parts.values())},
        "first_step_seconds": watch.at[1] - begun,
        "startup": {
            "imports": imported - STARTED,
            "checks and data": opened - imported,
            "model and dry step": begun - opened,
            "first step": watch.at[1] - begun,
        },
        "peak_memory_gib": peak_memory_gib(run.world.device),
        "ceiling": matmul_flops(run.world.device, run.choices.torch_dtype),
        "datasheet": datasheet(run.world.device),
        "threads": torch.get_num_threads(),
    }


class LoopWatch:
    """When each step ended, and the seconds of the loop's parts, by wrapping the functions that the loop calls.

    `steps` steps after the `warmup` run undisturbed and give the rate; in the `steps` after them every part waits for
    the device, so that its time is its own, and gives the shares. The save at the end of the run is timed too.
    """

    def __init__(self, trainer: Any, run: Any, warmup: int, steps: int):
        self.run, self.trainer, self.device = run, trainer, run.world.device
        self.rate_steps = range(warmup, warmup + steps)
        self.seconds = dict.fromkeys((*PARTS, "saving"), 0.0)
        self.at, self.targets = [time.perf_counter()], list[int]()  # by step; before the first
        self.cpu_seconds = self.last_loss = 0.0

    def __enter__(self) -> LoopWatch:
        trainer, run = self.trainer, self.run
        self._originals = {name: getattr(trainer, name) for name in WRAPPED}
        rows = run.data.train
        rows.batch = self._timed(rows.batch, "data")
        trainer.update_parameters = self._timed(trainer.update_parameters, "optimizer")
        trainer.log_step = self._timed(trainer.log_step, "logging")
        trainer.forward_backward = self._timed(trainer.forward_backward, "backward", less=("data", "forward"))
        trainer.log_step = self._remember_loss(trainer.log_step)
        run.model.forward = self._timed(run.model.forward, "forward")
        run.saver.save = self._timed(run.saver.save, "saving")
        self._count, run.throughput.count = run.throughput.count, self._step_done
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(self.trainer, name, original)

    def _now(self) -> float:
        from training.before.dry_step import synchronise

        synchronise(self.device)
        return time.perf_counter()

    def _timed(self, function: Any, part: str, less: tuple[str, ...] = ()) -> Any:
        """`function`, its seconds added to `part`; those of the parts `less` inside it are theirs alone."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if len(self.at) <= self.rate_steps.stop:
                return function(*args, **kwargs)
            began, inside = self._now(), sum(self.seconds[name] for name in less)
            result = function(*args, **kwargs)
            self.seconds[part] += self._now() - began - sum(self.seconds[name] for name in less) + inside
            return result

        return wrapped

    def _remember_loss(self, log_step: Any) -> Any:
        def wrapped(run: Any, step: Any, losses: Any, *args: Any) -> Any:
            log_step(run, step, losses, *args)
            self.last_loss = losses[1].item()

        return wrapped

    def _step_done(self, targets: int) -> None:
        """The loop calls this once a step, after the update: a step lasts from there to there."""
        self._count(targets)
        self.targets.append(targets)
        step = len(self.at)
        at_edge = step in (1, self.rate_steps.start, self.rate_steps.stop) or step > self.rate_steps.stop
        self.at.append(self._now() if at_edge else time.perf_counter())
        if step == self.rate_steps.start:
            self.cpu_seconds = -time.process_time()
        if step == self.rate_steps.stop:
            self.cpu_seconds += time.process_time()


def measure_plain(options: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    import torch

    from dataset.text_tokenizer import TextTokenizer
    from scripts.plain_baseline import PlainDataset, Shape, StepClock, train_plain
    from training.command_line import load_config
    from training.config import resolve_path
    from training.device import choose_device, choose_dtype, peak_memory_gib

    c = load_config(words)
    device = choose_device(c.device)
    dataset = PlainDataset(corpus_file(words), TextTokenizer.load(resolve_path(c.tokenizer_path)), options.plain_row)
    # About as many positions in a micro-batch as the trainer's has.
    rows = max(1, round(c.batch_size * c.max_seq_len / options.plain_row))
    shape = Shape(c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads)
    clock = StepClock()
    train_plain(shape, dataset, device, rows, c.accumulation_steps, options.warmup + options.steps, clock)
    (began, cpu), (ended, cpu_end) = clock.times[options.warmup], clock.times[-1]
    useful = sum(clock.targets[options.warmup + 1 :])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {
        "label": f"{str(dtype).removeprefix('torch.')}, {rows} x {options.plain_row}",
        "tokens_per_second": useful / (ended - began),
        "tokens_per_cpu_second": useful / (cpu_end - cpu),
        "step_seconds": (ended - began) / options.steps,
        "shares": {},
        "first_step_seconds": clock.times[1][0] - clock.times[0][0],
        "peak_memory_gib": peak_memory_gib(device),
        "ceiling": matmul_flops(device, choose_dtype(c.dtype, device)),  # the same ceiling for every row of the table
        "datasheet": datasheet(device),
    }


def measure_data(words: list[str]) -> dict[str, Any]:
    """Machine and data: ceilings, tokenising against the bare call of the library, and batches without a model."""
    import torch

    from dataset.lm_dataset import PretrainDataset
    from dataset.make_sample import make_sample
    from dataset.packing import RowOrder
    from dataset.text_tokenizer import TextTokenizer
    from dataset.token_cache import build_or_open
    from training.command_line import load_config
    from training.config import resolve_path
    from training.device import choose_device, choose_dtype, peak_memory_gib
    from training.saving.receipt import environment_facts

    c = load_config(words)
    if c.uses_sample:
        make_sample(corpus_file(words).parent)
    tokenizer, path = TextTokenizer.load(resolve_path(c.tokenizer_path)), corpus_file(words)
    with open(path, encoding="utf-8", newline="\n") as file:
        texts = [json.loads(line)["text"] for line in file if line.strip()]

    def bare_seconds() -> float:
        began = time.perf_counter()
        for first in range(0, len(texts), 2000):
            tokenizer.encode_batch(texts[first : first + 2000])
        return time.perf_counter() - began

    bare = bare_seconds()
    began = time.perf_counter()
    cache = build_or_open(str(path), tokenizer, cache_dir=resolve_path(c.cache_dir), progress=False)
    dataset = PretrainDataset(cache, c.max_seq_len)
    built = time.perf_counter() - began
    bare = (bare + bare_seconds()) / 2  # before and after: neighbours come and go
    peak = peak_memory_gib(torch.device("cpu"))
    began = time.perf_counter()
    PretrainDataset(
        build_or_open(str(path), tokenizer, cache_dir=resolve_path(c.cache_dir), progress=False), c.max_seq_len
    )
    reopened = time.perf_counter() - began
    order = RowOrder(len(dataset), 0, 0)[: 200 * c.batch_size]
    lists = [order[first : first + c.batch_size].tolist() for first in range(0, len(order), c.batch_size)]
    began = time.perf_counter()
    targets = sum(int((dataset.batch(rows).targets >= 0).sum()) for rows in lists)
    fetching = time.perf_counter() - began
    device = choose_device(c.device)
    dtype = choose_dtype(c.dtype, device)
    facts = environment_facts(device)
    where = ", ".join(facts.get("gpus", [])) or f"{facts['cpu']} ({', '.join(facts['cpu_flags'])})"
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    return {
        "machine": f"{where}, {facts['threads']} threads, torch {torch.__version__}, {facts['platform']}",
        "dtype": str(dtype).removeprefix("torch."),
        "ceiling": matmul_flops(device, dtype),
        "float32_ceiling": matmul_flops(device, torch.float32),
        "copy_bytes": copied_bytes(device),
        "megabytes": megabytes,
        "build_seconds": built,
        "tokenizer_share": bare / built,
        "open_seconds": reopened,
        "batch_seconds": fetching / len(lists),
        "input_tokens_per_second": targets / fetching,
        "peak_gib": peak,
    }


def matmul_flops(device: Any, dtype: Any) -> float:
    """FLOP/s of the best of some large products x @ w.T, as a linear layer makes them."""
    import torch

    sizes = (4096, 8192) if device.type == "cuda" else (1024, 2048)
    best = 0.0
    for size in sizes:
        x, w = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        best = max(best, 2 * size**3 / seconds_of_best(lambda x=x, w=w: x @ w.t(), device))
    return best


def copied_bytes(device: Any) -> float:
    """Bytes a second read and written by a large copy."""
    import torch

    x = torch.empty(2**28, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.numel() / seconds_of_best(lambda: y.copy_(x), device)


def seconds_of_best(work: Any, device: Any, seconds: float = 1.0) -> float:
    """Shortest time of one call, over about a second of them."""
    from training.before.dry_step import seconds_of

    seconds_of(work, device)
    times, end = list[float](), time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        times.append(seconds_of(work, device))
    return min(times)


def datasheet(device: Any) -> float | None:
    """TFLOP/s of the device's datasheet in bfloat16, where it is known."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((value for key, value in DATASHEET.items() if key in name), None)


if __name__ == "__main__":
    sys.exit(main())
