"""Whatever is typed: a run or a report in words, never an exception. PROPERTY_EXAMPLES=20 looks 20 times longer."""

from __future__ import annotations

import os
import string
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from conftest import small_run, write_corpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_pretrain
from errors import UserError
from training.command_line import load_config
from training.config import OPTIONS, Config

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "1"))  # times the usual number
ANY = settings(
    deadline=None, derandomize=EXAMPLES == 1, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)

# Values that ask for much time or for another program are left out; what is left must be small enough to run.
LEFT_OUT = {"use_wandb", "use_compile", "samples", "num_workers", "config", "epochs", "threads"}
SMALL = {
    "hidden_size": ["2", "8", "12", "32", "33"],
    "num_hidden_layers": ["1", "2", "3"],
    "num_attention_heads": ["1", "2", "3", "4"],
    "num_key_value_heads": ["1", "2", "3"],
    "intermediate_size": ["0", "1", "64"],
    "max_seq_len": ["2", "3", "4", "64", "100"],
    "max_steps": ["1", "2", "3"],
    "device": ["auto", "cpu", "cuda", "mps", "cpu:0", "cpu:1", "meta", "xla"],
    "save_weight": ["a", "b b", "猫", ".", "x" * 300, "-", "a.b"],
    "data_path": ["corpus.jsonl", "corpus.jsonl,corpus.jsonl", "*.jsonl", ".", "corpus.jsonl,", "/dev/null", "$X"],
    "val_path": ["corpus.jsonl", "none.jsonl", "", "corpus.jsonl,none.jsonl"],
    "tokenizer_path": ["model", "./model", ".", "none"],
    "save_dir": ["runs", "./runs", "corpus.jsonl", "corpus.jsonl/x", "x" * 300, "~nobody/x"],
    "cache_dir": ["cache", "corpus.jsonl", "\n"],
    "from_weight": ["none", "pretrain", "good", ".", "corpus.jsonl", "runs"],
    "text_key": ["text", "body", "é"],
}
LIKELY = {int: ["1", "2", "3", "0"], float: ["0.1", "0.5", "0", "1"], str: ["x"]}
ODD_NUMBERS = ["-1", "1e-3", "1e-320", "1e300", "nan", "-inf", "10" * 20, "1_0", "0x1", "٣", "7", "1e9"]
ODD_WORDS = ["", " ", "--", "-", "=", "None", "true", "[1]", "{}", "\0", "%s", "$X", "\ud800"]


def values(name: str) -> st.SearchStrategy[str]:
    """Nine times in ten a value that may work, else an odd one or any text."""
    entry = OPTIONS[name]
    likely = SMALL.get(name) or [str(choice) for choice in entry.metadata.get("choices", LIKELY[type(entry.default)])]
    odd = st.sampled_from(ODD_NUMBERS if isinstance(entry.default, (int, float)) else ODD_WORDS)
    garbage = st.one_of(odd, odd, st.text(max_size=8))
    return st.integers(0, 9).flatmap(lambda draw: garbage if draw == 9 else st.sampled_from(likely))


OPTION = st.sampled_from(sorted(set(OPTIONS) - LEFT_OUT)).flatmap(
    lambda name: values(name).map(lambda value: [f"--{name}={value}"])
)
STRAY = st.one_of(
    st.text(alphabet=string.printable, max_size=6).filter(lambda word: word not in ("-h", "--h")).map(lambda w: [w]),
    st.sampled_from(sorted(OPTIONS)).map(lambda name: [f"--{name}"]),
)
WORDS = st.lists(st.integers(0, 30).flatmap(lambda draw: STRAY if draw == 30 else OPTION), min_size=1, max_size=5).map(
    lambda lists: [word for words in lists for word in words]
)


RANK = st.integers(0, 30).map({30: "0", 29: "1", 28: "x", 27: "-1"}.get)
WORLD = st.integers(0, 30).map({30: "1", 29: "0", 28: "x"}.get)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("any")
    write_corpus(folder / "corpus.jsonl", documents=20)
    assert train_pretrain.main(base(folder)) == 0
    return folder


def base(folder: Path) -> list[str]:
    words = small_run(folder, folder / "corpus.jsonl")
    at = words.index("--epochs")
    return [*words[:at], *words[at + 2 :], "--save_weight", "good", "--max_steps", "2"]


@settings(ANY, max_examples=50 * EXAMPLES)
@given(words=WORDS, rank=RANK, world=WORLD)
def test_any_flags_give_a_run_or_a_report_and_never_an_exception(place, words, rank, world):
    before = {path.name for path in (place / "runs").iterdir()}
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(place)
        for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
            patch.setenv(name, value) if value else patch.delenv(name, raising=False)
        status = train_pretrain.main([*base(place), "--save_weight", "other", "--overwrite", "1", *words])
    assert status in (0, 2), (status, err.getvalue())
    if status == 2:
        assert "Error: " in err.getvalue() and "Traceback" not in err.getvalue()
        assert {path.name for path in (place / "runs").iterdir()} == before


YAML_TEXT = st.one_of(
    st.binary(max_size=60),
    st.text(alphabet=":-[]{}#&*!|>'\"%@`,? \n\tabcepohs013.~\x85\u2028\ufeff", max_size=40).map(str.encode),
    st.lists(
        st.tuples(
            st.sampled_from([*OPTIONS, "epoch", "<<", "7", "null", "[a]", "? x"]),
            st.one_of(st.sampled_from(ODD_WORDS + ODD_NUMBERS), st.text(max_size=8)),
        ),
        max_size=4,
    ).map(lambda pairs: "".join(f"{name}: {value}\n" for name, value in pairs).encode("utf-8", "surrogatepass")),
)


@settings(ANY, max_examples=300 * EXAMPLES)
@given(data=YAML_TEXT)
def test_any_yaml_file_gives_settings_or_a_report(place, data):
    path = place / "any.yaml"
    path.write_bytes(data)
    try:
        config = load_config(["--config", str(path)])
    except UserError as error:
        assert error.problems and all(str(path) in problem for problem in error.problems)
    else:
        assert isinstance(config, Config)
        assert all(type(value) is type(OPTIONS[name].default) for name, value in config.values().items())
