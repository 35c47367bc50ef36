"""Mistakes end before the first step: exit status 2, words a person would look for, nothing written and nothing lost.

Each case is a run that differs from a good one in what its line says. The good run has been trained before; it and its
token cache must be the same afterwards, to the byte and the second.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_run, write_corpus
from filelock import FileLock
from tiny_tokenizer import make_folder

import train_pretrain
from dataset.text_formats import JsonLines
from runs import command, environment, replaced


@dataclass
class Place:
    """Where a case plays: its own empty folder (the current one), and the good run beside it."""

    folder: Path
    good: Path
    monkeypatch: pytest.MonkeyPatch
    held: Any = None  # a lock, while the case lasts

    @property
    def run(self) -> Path:
        return self.good / "runs" / "good_32"


@dataclass
class Case:
    name: str
    flags: str  # added to the good run's; {good} and {run} are its folders
    say: list[str]  # what stderr must hold
    files: dict[str, bytes] = field(default_factory=dict)
    setup: Callable[[Place], Any] | None = None
    lines: int | None = None  # of the report, where that matters


TEXT = b'{"text": "the cat sat on a mat"}\n'
YAML, DATA = "--config c.yaml", "--data_path d.jsonl"


def yaml(name: str, text: str | bytes, *say: str) -> Case:
    return Case(f"yaml: {name}", YAML, list(say), {"c.yaml": text if isinstance(text, bytes) else text.encode()})


def line(name: str, data: bytes, *say: str) -> Case:
    """A wrong line after a good one."""
    return Case(f"line: {name}", DATA, ["d.jsonl:2: ", *say, "--bad_lines skip"], {"d.jsonl": TEXT + data})


def file(name: str, path: str, data: bytes, *say: str) -> Case:
    return Case(f"file: {name}", f"--data_path {path}", ["--data_path", path, *say], {path: data})


def flag(flags: str, *say: str, **more: Any) -> Case:
    return Case(flags.replace("/", "_"), flags, list(say), **more)


# --- what is done to a place before a case ---


def environment_of(**values: str) -> Callable[[Place], None]:
    whole = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}

    def setup(place: Place) -> None:
        for name, value in (whole | values).items():
            place.monkeypatch.setenv(name, value) if value else place.monkeypatch.delenv(name, raising=False)

    return setup


def gpus(count: int, capability: tuple[int, int] = (8, 0)) -> Callable[[Place], None]:
    def setup(place: Place) -> None:
        place.monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        place.monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        place.monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        place.monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Old Card")

    return setup


def copied_run(place: Place) -> Path:
    """The good run once more, under w/ of the case's folder: it may be damaged."""
    return Path(shutil.copytree(place.run, place.folder / "w" / "good_32"))


def without_card(place: Place) -> None:
    (copied_run(place) / "good_32.json").unlink()


def damaged_weights(place: Place) -> None:
    path = copied_run(place) / "good_32.pth"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damaged_states(place: Place) -> None:
    for manifest in copied_run(place).glob("resume/step_*/manifest.json"):
        manifest.write_text("{}")


def locked_folder(place: Place) -> None:
    Path("other_32").mkdir()
    place.held = FileLock("other_32/.lock")
    place.held.acquire()


def weights_alone(place: Place) -> None:
    shutil.rmtree(copied_run(place) / "resume")


class Malicious:
    def __reduce__(self) -> Any:
        return os.system, ("touch was-run",)


def hugging_face(place: Place, **changes: Any) -> Path:
    from safetensors.torch import save_file

    folder = place.folder / "hf"
    folder.mkdir()
    weights = {k: v.float() for k, v in torch.load(place.run / "good_32.pth", weights_only=True).items()}
    save_file({k: v.clone() for k, v in weights.items()}, folder / "model.safetensors")
    config = json.loads((place.run / "good_32.json").read_text())["config"]
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def untied(place: Place) -> None:
    weights = torch.load(place.run / "good_32.pth", weights_only=True)
    torch.save(weights | {"lm_head.weight": weights["lm_head.weight"] + 1}, place.folder / "w.pth")


def changing_file(place: Place) -> None:
    """Someone appends to the corpus while it is being read."""
    path = place.folder / "d.jsonl"
    path.write_bytes(TEXT * 3)
    records = JsonLines.records

    def read(self: JsonLines, file: Any, where: Path) -> Any:
        yield from records(self, file, where)
        with open(path, "ab") as appended:
            appended.write(TEXT)

    place.monkeypatch.setattr(JsonLines, "records", read)


def free_disk(count: int) -> Callable[[Place], None]:
    usage = namedtuple("usage", "total used free")
    return lambda place: place.monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, count))


def deny(*denied: str) -> Callable[[Place], None]:
    """Folders that may not be written to; tests may run as root, whom the system lets write anywhere."""
    allowed = os.access

    def access(path: Any, mode: int, **more: Any) -> bool:
        return Path(path).name not in denied and allowed(path, mode, **more)

    def setup(place: Place) -> None:
        for name in denied:
            (place.folder / name).mkdir()
        place.monkeypatch.setattr(os, "access", access)

    return setup


def of_memory(count: int) -> Callable[[Place], None]:
    return lambda place: place.monkeypatch.setattr("training.before.machine.host_memory_bytes", lambda: count)


WARM = "--from_weight {run}"
RESUME = "--save_weight good --from_resume 1"
NEW = "\\ud800"

CASES = [
    # lines of text
    line("invalid JSON", b"hello\n", "invalid JSON"),
    line("single quotes", b"{'text': 'a'}\n", "invalid JSON"),
    line("two values", b'{"text": "a"} {"text": "b"}\n', "more than one JSON value on a line"),
    line("a line cut short", b'{"text": "the cat', "cut short"),
    line("invalid UTF-8", b'{"text": "\xff\xfe"}\n', "invalid UTF-8", "byte 11 is 0xff"),
    line("a lone surrogate", b'{"text": "a\\ud800b"}\n', "lone surrogate"),
    line("a list", b'["text"]\n', "not an object", "a list"),
    line("a string", b'"text"\n', "not an object", "a string"),
    line("key missing", b'{"content": "a"}\n', "key 'text' missing", "'content'", "--text_key"),
    line("text null", b'{"text": null}\n', "'text' is null, not a string"),
    line("text a number", b'{"text": 5}\n', "'text' is a number, not a string"),
    line("text NaN", b'{"text": NaN}\n', "'text' is a number, not a string"),
    line("text a list", b'{"text": ["a"]}\n', "'text' is a list, not a string"),
    line("nested too deeply", b"[" * 100_000 + b"\n", "nested too deeply"),
    Case(
        "line: twelve wrong ones of two kinds",
        DATA,
        ["d.jsonl:1: invalid JSON", "12 wrong lines (invalid JSON 7, key 'text' missing 5)", "the first 10"],
        {"d.jsonl": b"x\n" * 7 + b"{}\n" * 5},
        lines=11,
    ),
    Case(
        "line: UTF-16",
        DATA,
        ["d.jsonl:1: UTF-16 text: convert the file to UTF-8"],
        {"d.jsonl": TEXT.decode().encode("utf-16")},
    ),
    Case("line: of the validation texts", "--val_path d.jsonl", ["d.jsonl:1: invalid JSON"], {"d.jsonl": b"x\n"}),
    Case(
        "line: of training and validation texts",
        f"{DATA} --val_path v.jsonl",
        ["d.jsonl:1: invalid JSON", "v.jsonl:1: key 'text' missing"],
        {"d.jsonl": b"x\n", "v.jsonl": b"{}\n"},
    ),
    # files of text
    file("empty", "d.jsonl", b"", "the file is empty (0 bytes)"),
    file("a web page", "d.jsonl", b"<!DOCTYPE html>\n<html>", "is a web page (HTML)", "download the file itself"),
    file("a large-file pointer", "d.jsonl", b"version https://git-lfs.github.com/spec/v1\noid", "git-lfs pointer"),
    file("gzip by another name", "d.jsonl", gzip.compress(TEXT), "is gzip data; rename it to .jsonl.gz"),
    file("no gzip in spite of its name", "d.jsonl.gz", TEXT, "is not gzip data in spite of its name"),
    file("no parquet in spite of its name", "d.parquet", TEXT, "is not a parquet file"),
    file("another kind", "d.csv", b"a,b", "unknown kind of file", ".jsonl"),
    Case(
        "file: one JSON array over many lines",
        DATA,
        ["--data_path", "d.jsonl: is one JSON array, not one object a line", "python -c", "lines.jsonl"],
        {"d.jsonl": json.dumps([{"text": "a"}] * 30, indent=1).encode()},
        lines=1,
    ),
    Case(
        "file: conversations",
        DATA,
        ["d.jsonl: line 1 is chat data", "learns from plain texts", "under the key 'text'", "python -c"],
        {"d.jsonl": b'{"conversations": [{"role": "user", "content": "a"}]}\n' * 30},
        lines=1,
    ),
    Case(
        "file: a truncated gzip",
        "--data_path d.jsonl.gz",
        ["d.jsonl.gz: the gzip data ends too early, at byte 40 of the file"],
        {"d.jsonl.gz": gzip.compress(TEXT * 9)[:40]},
    ),
    Case("file: blank lines and empty texts", DATA, ["no document to use"], {"d.jsonl": b'\n\n{"text": " "}\n'}),
    Case("file: changes while it is read", DATA, ["d.jsonl: changed while it was being read"], setup=changing_file),
    Case(
        "file: a named pipe",
        DATA,
        ["--data_path", "d.jsonl: is a named pipe (fifo), not a file"],
        setup=lambda place: os.mkfifo("d.jsonl"),
    ),
    flag("--data_path /dev/null", "--data_path /dev/null: is a device, not a file"),
    Case("file: a broken link", DATA, ["d.jsonl: cannot be looked at"], setup=lambda place: os.symlink("x", "d.jsonl")),
    # paths
    flag("--data_path x.jsonl", "x.jsonl: no such file or folder; check the spelling"),
    flag("--data_path *.jsonl", "*.jsonl: no file matches this pattern"),
    flag("--data_path .", "the folder holds no file ending in .jsonl"),
    flag("--data_path x.jsonl,y.jsonl", "x.jsonl: no such", "y.jsonl: no such", lines=2),
    flag("--data_path $NO_SUCH/x.jsonl", "the variable $NO_SUCH is not set"),
    flag("--val_path x.jsonl", "--val_path", "x.jsonl: no such file or folder"),
    flag("--save_dir $NO_SUCH", "the variable $NO_SUCH is not set"),
    flag("--save_dir f", "/f is not a folder; give another", files={"f": b""}),
    flag("--save_dir f/sub/sub", "/f is not a folder; give another", files={"f": b""}),
    flag(
        "--save_dir .",
        "other_32 is not a folder",
        setup=lambda place: Path("other_32").write_text(""),
    ),
    flag(
        "--save_dir ./ --overwrite 1",
        "other_32: ",
        "Is a directory",
        "put that right or give another folder",
        setup=lambda place: Path("other_32/metrics.jsonl").mkdir(parents=True),
    ),
    flag("--save_dir locked", "cannot be written to; give another folder or change", setup=deny("locked")),
    flag("--save_dir " + "x" * 300, "File name too long"),
    flag("--cache_dir f", "/f is not a folder; give another", files={"f": b""}),
    flag("--cache_dir locked/cache", "cannot be written to", setup=deny("locked")),
    flag("--tokenizer_path nowhere", "nowhere: no such folder; give a local folder that holds tokenizer.json"),
    flag("--tokenizer_path .", "holds no usable tokenizer"),
    flag("--tokenizer_path ./", "tokenizer.json: is no readable tokenizer", files={"tokenizer.json": b"{"}),
    flag("--tokenizer_path t", "names no eos token", setup=lambda place: make_folder(Path("t"), eos_token=None)),
    flag("--save_weight a/b", "--save_weight 'a/b': it names a folder"),
    flag("--save_weight ..", "--save_weight '..': it names a folder"),
    flag("--save_weight " + "x" * 300, "a name of 300 bytes; 200 at most"),
    # flags alone
    flag("--learnin_rate 0.1", "--learnin_rate: no such option (did you mean learning_rate?); see --help", lines=1),
    flag("--hidden-size=64", "--hidden-size=64: no such option (did you mean hidden_size?)", lines=1),
    flag("--lr 0.1", "--lr: no such option", lines=1),
    flag("train", "'train': stands alone; options are written --name value"),
    flag("--epochs", "--epochs: a value is needed"),
    flag("--epochs ten", "--epochs 'ten': a whole number is needed"),
    flag("--epochs 1.5", "--epochs '1.5': a whole number is needed"),
    flag("--epochs 0", "--epochs 0: too small; the least that can work is 1"),
    flag("--batch_size -1", "--batch_size -1: too small"),
    flag("--max_steps " + "9" * 30, "too large; the most that can work is"),
    flag("--seed " + "9" * 5000, "--seed"),
    flag("--learning_rate fast", "--learning_rate 'fast': a number is needed"),
    flag("--learning_rate nan", "--learning_rate nan: a finite number is needed"),
    flag("--learning_rate inf", "--learning_rate inf: a finite number is needed"),
    flag("--learning_rate 0", "--learning_rate 0.0: must be greater than 0"),
    flag("--learning_rate 100", "--learning_rate 100.0: too large; the most that can work is 10.0"),
    flag("--val_fraction 0.9", "--val_fraction 0.9: too large; the most that can work is 0.5"),
    flag("--dropout 1", "--dropout 1.0: too large"),
    flag("--packing 2", "--packing 2: choose one of 0, 1"),
    flag("--lr_schedule cosin", "--lr_schedule cosin: choose one of", "(did you mean cosine?)"),
    flag("--dtype float23", "--dtype float23: choose one of", "(did you mean float32?)"),
    flag("--bad_lines ignore", "--bad_lines ignore: choose one of stop, skip"),
    flag("--data_path ,", "is empty: name files, folders or globs"),
    flag(
        "--epochs 0 --learnin_rate 1 --dtype f32 --hidden_size x --config none.yaml",
        "--learnin_rate",
        "--epochs 0",
        "--dtype f32",
        "--hidden_size 'x'",
        "none.yaml: No such file",
        lines=5,
    ),
    flag(
        "--data_path x.jsonl --val_path y.jsonl --save_dir f --from_weight w --device tpu --tokenizer_path t",
        "--data_path",
        "--val_path",
        "--save_dir",
        "--from_weight",
        "--device",
        "tokenizer",
        files={"f": b""},
        lines=6,
    ),
    # YAML
    flag(YAML, "--config c.yaml: No such file or directory; give the path of a YAML file"),
    flag("--config .", "--config .: Is a directory"),
    yaml("an unknown key", "learnin_rate: 1\n", "unknown setting 'learnin_rate' (did you mean learning_rate?)"),
    yaml("two unknown keys", "lr: 1\nbatchsize: 2\n", "'lr'", "'batchsize' (did you mean batch_size?)"),
    yaml("a number as a key", "7: 1\ntrue: 2\n", "unknown setting '7'", "unknown setting 'True'"),
    yaml("a list as a key", "? [a]\n: 1\n", "unknown setting"),
    yaml("a key twice", "epochs: 1\nseed: 3\nepochs: 2\n", "epochs is set more than once; keep one line"),
    yaml("a wrong type", "epochs: many\n", "--config c.yaml: epochs 'many': a whole number is needed"),
    yaml("a list for a number", "epochs: [1, 2]\n", "c.yaml: epochs [1, 2]: a number is needed"),
    yaml("a mapping for a text", "data_path: {a: b}\n", "c.yaml: data_path {'a': 'b'}: a text is needed"),
    yaml("nothing for a number", "epochs:\n", "c.yaml: epochs: a value is needed"),
    yaml("a list", "- epochs\n", "holds a list; it needs one `name: value` a line"),
    yaml("one word", "epochs\n", "holds a str; it needs one `name: value` a line"),
    yaml("no YAML", "epochs: [1\n", "c.yaml: not valid YAML", "line 2"),
    yaml("a tab", "epochs:\n\t1\n", "not valid YAML"),
    yaml("no text", b"\xff\xfe\x00", "not valid YAML"),
    yaml("a Python object", "epochs: !!python/object/apply:os.system [touch was-run]\n", "not valid YAML"),
    yaml("an impossible date", "epochs: 2001-99-99\n", "not valid YAML"),
    yaml("nested too deeply", "[" * 5000, "not valid YAML"),
    yaml("another file of settings", "config: other.yaml\n", "unknown setting 'config'"),
    yaml("an unprintable name", 'save_weight: "a\\0b"\n', "holds characters that cannot be printed"),
    yaml("a surrogate in a path", f'data_path: "{NEW}"\n', "data_path", "not UTF-8"),
    # shapes
    flag("--hidden_size 33", "--hidden_size 33: not divisible by --num_attention_heads 2"),
    flag("--num_attention_heads 4 --num_key_value_heads 3", "--num_key_value_heads 3", "is not a multiple"),
    flag(
        "--hidden_size 30 --num_attention_heads 2",
        "--hidden_size 30: its 2 heads have an odd size; rotary positions need an even one",
    ),
    flag("--hidden_size 100000", "--hidden_size 100000: too large"),
    # settings that cannot act together
    flag("--val_path {good}/corpus.jsonl --val_fraction 0.1", "--val_fraction 0.1: --val_path is given already"),
    flag("--data_path dataset/sample/train.jsonl --val_fraction 0.1", "the bundled sample has validation texts"),
    flag("--eval_only 1", "--save_weight other: no weights there"),
    flag("--eval_only 1 --from_weight {run}/good_32.pth", "--eval_only 1: there are no validation texts; give"),
    flag("--eval_interval 5", "--eval_interval 5: there are no validation texts"),
    flag(
        "--hidden_size 33 --num_attention_heads 4 --num_key_value_heads 3",
        "--hidden_size 33",
        "--num_key_value",
        lines=2,
    ),
    flag("--resume_reset optimizer", "--resume_reset optimizer: it needs --from_resume 1"),
    flag(f"{RESUME} --save_state 0", "a run without states cannot be resumed"),
    flag("--packing 0 --max_seq_len 2", "without packing a row holds bos, a token and eos; give 3 or more"),
    # steps and ranks
    Case(
        "ranks: more than rows in a step",
        "--global_batch_size 4 --batch_size 1",
        ["WORLD_SIZE=5: a step has 4 rows, fewer than ranks; start 4 ranks at most"],
        setup=environment_of(RANK="0", WORLD_SIZE="5"),
    ),
    Case(
        "ranks: more than rows of text",
        "--data_path d.jsonl",
        ["WORLD_SIZE=5: a step has 1 rows"],
        {"d.jsonl": TEXT},
        setup=environment_of(RANK="0", WORLD_SIZE="5"),
    ),
    Case(
        "ranks: an address, no rank",
        "",
        ["environment: WORLD_SIZE, MASTER_ADDR", "RANK, LOCAL_RANK missing; start with torchrun or unset them"],
        setup=environment_of(WORLD_SIZE="2", LOCAL_RANK=""),
    ),
    Case(
        "ranks: a rank, no world",
        "",
        ["environment: RANK", "WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing"],
        setup=environment_of(RANK="0", MASTER_ADDR="", MASTER_PORT=""),
    ),
    Case(
        "ranks: a word for a rank",
        "",
        ["environment: RANK='first' is not a number"],
        setup=environment_of(RANK="first", WORLD_SIZE="2"),
    ),
    Case(
        "ranks: a rank beyond the world",
        "",
        ["environment: RANK=2 is not below WORLD_SIZE=2"],
        setup=environment_of(RANK="2", WORLD_SIZE="2"),
    ),
    # the machine
    flag("--device tpu", "--device tpu: no such device; use auto, cpu, mps, cuda or cuda:0"),
    flag("--device meta", "--device meta: not a device this trainer runs on"),
    flag("--device cpu:1", "--device cpu:1: there is one CPU device"),
    flag("--device mps", "--device mps: this machine has no MPS; use --device cpu"),
    Case(
        "device: no CUDA",
        "--device cuda",
        ["--device cuda: no CUDA device can be used here", "use --device cpu"],
        setup=lambda place: place.monkeypatch.setattr(torch.cuda, "is_available", lambda: False),
    ),
    Case("device: no such GPU", "--device cuda:2", ["there is no GPU 2; this machine has 2"], setup=gpus(2)),
    Case(
        "device: more ranks than GPUs",
        "--device cuda",
        ["3 ranks on this machine, 2 GPUs; start 2 ranks at most"],
        setup=lambda place: (gpus(2)(place), environment_of(RANK="0", WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")(place)),
    ),
    Case(
        "device: all ranks on one GPU",
        "--device cuda:0",
        ["all 2 ranks would share one GPU; use --device cuda"],
        setup=lambda place: (gpus(2)(place), environment_of(RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")(place)),
    ),
    Case(
        "device: a GPU without bfloat16",
        "--device cuda --dtype bfloat16",
        ["--dtype bfloat16: Old Card has none; use float16 or auto"],
        setup=gpus(1, (7, 5)),
    ),
    flag("--seed 1", "free, this run's saves need", "lower --keep_checkpoints", setup=free_disk(10_000)),
    flag("--keep_checkpoints 100000000", "this run's saves need"),
    flag(
        "--seed 2",
        "parameters with gradients, optimizer state and one row",
        "choose a smaller model",
        setup=of_memory(10**6),
    ),
    flag("--hidden_size 65536 --num_hidden_layers 1024", "choose a smaller model"),
    flag(
        "--hidden_size 65536 --max_seq_len 1048576", "--max_seq_len 1048576", "choose a smaller model or shorter rows"
    ),
    # run folders
    flag("--save_dir . --overwrite 1", "another process is training in", setup=locked_folder),
    flag("--save_weight good", "holds a run already", "--from_resume 1", "--save_weight NEW", "--overwrite 1"),
    flag(f"{RESUME} --num_hidden_layers 3", "--num_hidden_layers 3: the saved run has 2; a resume cannot change it"),
    flag(f"{RESUME} --seed 7 --optimizer muon", "--seed 7", "--optimizer muon: the saved run has adamw", lines=2),
    Case(
        "resume: other texts",
        f"{RESUME} {DATA}",
        ["its data fingerprint is", "give the same texts, or start another run"],
        {"d.jsonl": TEXT * 90},
    ),
    Case(
        "resume: another tokenizer",
        f"{RESUME} --tokenizer_path t",
        ["its tokenizer digest is", "give the tokenizer the run began with"],
        setup=lambda place: make_folder(Path("t")),
    ),
    flag(f"{RESUME} --stop_after 3", "--stop_after 3: the saved run is at step 13"),
    Case("resume: fewer steps than done", f"{RESUME} --max_steps 5", ["the saved run is at step 13, past the end"]),
    Case(
        "resume: no save is whole",
        f"{RESUME} --save_dir w",
        ["no checkpoint in", "manifest.json cannot be read", "Restore one from a backup"],
        setup=damaged_states,
    ),
    Case(
        "resume: weights alone",
        f"{RESUME} --save_dir w",
        ["holds weights but no resume state", "--from_weight good --save_weight NEW"],
        setup=weights_alone,
    ),
    # --from_weight
    flag("--from_weight nothing", "--from_weight nothing: no weights there; looked for"),
    flag(f"{WARM} --num_hidden_layers 3", "another model", "--num_hidden_layers 2 (not 3); give these"),
    flag(f"{WARM} --hidden_size 64 --use_moe 1", "--hidden_size 32 (not 64)", "--use_moe 0 (not 1)"),
    flag(f"{WARM} --rope_theta 10000", "--rope_theta 1000000.0 (not 10000.0)"),
    Case(
        "weights: another tokenizer",
        f"{WARM} --tokenizer_path t",
        ["trained with tokenizer", "give the one it was trained with"],
        setup=lambda place: make_folder(Path("t")),
    ),
    Case(
        "weights: of an unknown tokenizer",
        "--from_weight w/good_32",
        ["does not say which tokenizer it was trained with", "give that tokenizer with --tokenizer_path"],
        setup=without_card,
    ),
    Case(
        "weights: another vocabulary",
        "--from_weight w/good_32 --tokenizer_path t",
        ["model.embed_tokens.weight has shape [6400, 32], this model needs ["],
        setup=lambda place: (without_card(place), make_folder(Path("t"))),
    ),
    Case(
        "weights: another shape",
        "--from_weight w/good_32 --tokenizer_path model --num_hidden_layers 3",
        ["--from_weight", "the saved parameters are those of another architecture", "is missing"],
        setup=without_card,
    ),
    Case(
        "weights: damaged",
        "--from_weight w/good_32",
        ["is damaged or was exchanged: its SHA-256 differs"],
        setup=damaged_weights,
    ),
    Case(
        "weights: code in the file",
        "--from_weight w.pth --tokenizer_path model",
        ["it holds more than tensors, maybe code, and was not read"],
        {"w.pth": pickle.dumps({"model.embed_tokens.weight": Malicious()})},
    ),
    flag("--from_weight w.pth", "w.pth is refused", files={"w.pth": b"no weights"}),
    flag("--from_weight w.pth --tokenizer_path model", "its output head is not tied", setup=untied),
    Case(
        "weights: a Hugging Face folder without safetensors",
        "--from_weight . --tokenizer_path model",
        ["model.safetensors missing; save the model as safetensors"],
        {"config.json": b"{}"},
    ),
    Case(
        "weights: a Hugging Face folder with a broken index",
        "--from_weight . --tokenizer_path model",
        ["model.safetensors.index.json: is not readable JSON"],
        {"config.json": b"{}", "model.safetensors.index.json": b"{"},
    ),
    Case(
        "weights: a Hugging Face folder of odd JSON",
        "--from_weight . --tokenizer_path model",
        ["model.safetensors missing"],
        {"config.json": b'{"rope_parameters": [1]}', "model.safetensors.index.json": b'{"weight_map": [1]}'},
    ),
    Case(
        "weights: a state dict of another program",
        "--from_weight w.pth --tokenizer_path model",
        ["--from_weight", "w.pth: the saved parameters are those of another architecture"],
        setup=lambda place: torch.save({"encoder.weight": torch.ones(2)}, "w.pth"),
    ),
    Case(
        "weights: a Hugging Face folder with broken tensors",
        "--from_weight . --tokenizer_path model",
        ["model.safetensors cannot be read"],
        {"config.json": b"{}", "model.safetensors": b"{"},
    ),
    Case(
        "weights: a Hugging Face model of another make",
        "--from_weight hf --tokenizer_path model",
        ["--rope_theta 10000.0 (not 1000000.0)"],
        setup=lambda place: hugging_face(place, rope_theta=None, rope_parameters={"rope_theta": 10000.0}),
    ),
]


# --- the good run, and that it stays so ---


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    words = small_run(folder, write_corpus(folder / "corpus.jsonl"))
    assert train_pretrain.main([*words, "--save_weight", "good"]) == 0
    return folder


def contents(folder: Path, but: tuple[str, ...] = ()) -> dict[str, tuple[int, int]]:
    """Every file's size and time, and which folders there are. Locks are taken and row plans made without harm."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.name.endswith(".lock") or "plans" in path.parts or path.parts[-1] in but:
            continue
        info = path.lstat()
        found[str(path.relative_to(folder))] = (info.st_size, info.st_mtime_ns) if path.is_file() else (0, 0)
    return found


def errors(stderr: str) -> list[str]:
    """The problems reported; a progress bar may stand on the line before them."""
    return [text for text in re.split(r"[\r\n]+", stderr) if text.startswith("Error: ")]


def words_of(case: Case, good: Path) -> list[str]:
    base = [*small_run(good, good / "corpus.jsonl"), "--save_weight", "other"]
    if "--epochs" in case.flags or "--max_steps" in case.flags or "--global_batch_size" in case.flags:
        skipped = {"--epochs", "--accumulation_steps", "--batch_size"}
        pairs = zip(base[::2], base[1::2], strict=True)
        base = [word for pair in pairs if pair[0] not in skipped for word in pair]
    return base + case.flags.format(good=good, run=good / "runs" / "good_32").split()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mistake_ends_with_status_2_in_words_and_nothing_written_or_lost(case, good, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path, good, monkeypatch)
    for name, data in case.files.items():
        (tmp_path / name).write_bytes(data)
    if case.setup:
        case.setup(place)
    before, own = contents(good), contents(tmp_path)
    status = train_pretrain.main(words_of(case, good))
    after = contents(good)
    shutil.rmtree(good / "runs" / "other_32", ignore_errors=True)  # else one failure would bring others
    report = capsys.readouterr().err
    assert status == 2, report
    for phrase in case.say:
        assert phrase in report
    problems = errors(report)
    assert problems and (case.lines is None or len(problems) == case.lines)
    if DATA not in case.flags and "--data_path" not in case.flags:
        assert after == before
    runs = {name for name in after if name.startswith("runs")}
    assert runs == {name for name in before if name.startswith("runs")}
    assert all(after[name] == before[name] for name in before)  # texts of its own may have been cached beside
    assert {name for name in contents(tmp_path) if name not in own} == set()


def test_the_table_has_at_least_sixty_cases_of_different_names():
    assert len({case.name for case in CASES}) == len(CASES) >= 60


def test_wrong_lines_publish_no_cache(good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for case in [case for case in CASES if case.name.startswith("line: ") and DATA in case.flags]:
        for name, data in case.files.items():
            (tmp_path / name).write_bytes(data)
        assert train_pretrain.main([*words_of(case, good), "--cache_dir", "own"]) == 2
    assert [path.name for path in Path("own").glob("*/metadata.json")] == []


# --- the same as programs of their own ---


def test_as_programs_mistakes_end_with_status_2_and_no_traceback(good, tmp_path):
    (tmp_path / "d.jsonl").write_bytes(TEXT + b"hello\n")
    (tmp_path / "c.yaml").write_text("epochs: 1\nlearnin_rate: 2\n")
    base = [*small_run(good, good / "corpus.jsonl"), "--save_weight", "good"]
    cases: list[tuple[list[str], dict[str, str], str]] = [
        ([*base, "--learnin_rate", "1"], {}, "(did you mean learning_rate?)"),
        (["--config", str(tmp_path / "c.yaml")], {}, "unknown setting 'learnin_rate'"),
        (replaced(base, data_path=tmp_path / "d.jsonl", save_weight="new"), {}, "d.jsonl:2: invalid JSON"),
        (base, {"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing"),
    ]
    before = contents(good)
    started = [
        subprocess.Popen(
            command(words), env=environment(**changes), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for words, changes, _ in cases
    ]
    for process, (words, _, phrase) in zip(started, cases, strict=True):
        out, err = process.communicate(timeout=240)
        assert process.returncode == 2, f"{words}: {out}{err}"
        assert phrase in err and "Traceback" not in err and not out.startswith("Epoch")
        assert errors(err) and "Warning" not in err
    assert contents(good) == before
