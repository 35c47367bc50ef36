"""Settings: where a value comes from, what it is taken for, what the help says, where a path leads."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from dataset.source_files import find_files
from errors import UserError
from runs import ROOT
from training.command_line import load_config, nearest
from training.config import (
    EVERYDAY,
    NOT_CARRIED_OVER,
    OPTIONS,
    Config,
    changed_settings,
    grouped_options,
    resolve_path,
    resolve_paths,
    unset_variables,
    with_saved,
)
from training.config import (
    ROOT as CONFIG_ROOT,
)


def problems(*words: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_config(list(words))
    return caught.value.problems


# --- where a value comes from ---


def test_defaults_yield_to_the_yaml_file_and_that_to_the_command_line(tmp_path):
    (tmp_path / "c.yaml").write_text("epochs: 7\nseed: 8\n")
    config = load_config(["--config", str(tmp_path / "c.yaml"), "--seed", "9"])
    assert (config.epochs, config.seed, config.batch_size) == (7, 9, 32)
    assert config.given == {"config", "epochs", "seed"}
    assert config.flags == {"config", "seed"}


def test_the_last_of_a_repeated_flag_counts():
    assert load_config(["--epochs", "3", "--epochs", "4"]).epochs == 4


def test_a_resume_takes_the_saved_settings_under_what_was_said_this_time():
    saved = dataclasses.replace(Config(), epochs=9, seed=5, from_resume=0, save_dir="/old/place", device="cuda:3")
    now = load_config(["--from_resume", "1", "--seed", "6"])
    merged = with_saved(now, saved.values())
    assert (merged.epochs, merged.seed, merged.from_resume) == (9, 6, 1)
    assert (merged.save_dir, merged.device) == ("checkpoints", "auto")  # where the run lies and what it runs on now
    assert changed_settings(merged, saved.values()) == [("seed", 5, 6, "fixed")]


def test_a_setting_that_an_older_save_does_not_know_keeps_its_default():
    saved = Config(epochs=9).values()
    del saved["z_loss"]
    assert with_saved(Config(), {**saved, "long_gone": 3}).z_loss == 0.0


def test_nothing_can_write_to_the_settings():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 7  # type: ignore[misc]


def test_the_command_line_is_parsed_once(tmp_path):
    """A program's start reads a YAML file once, also on the way to a report."""
    script = (
        "import sys, runpy, training.command_line as module; read, seen = module.read_yaml, []\n"
        "module.read_yaml = lambda path: (seen.append(path), read(path))[1]\n"
        f"sys.argv[1:] = ['--config', '{tmp_path}/c.yaml']\n"
        "try: runpy.run_path('train_pretrain.py', run_name='__main__')\n"
        "finally: print(len(seen))"
    )
    (tmp_path / "c.yaml").write_text("device: tpu\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "1\n") and "--device tpu: no such device" in done.stderr


def test_every_option_that_is_not_carried_over_exists():
    assert set(OPTIONS) >= NOT_CARRIED_OVER


# --- what it is taken for ---

ALTERNATIVES = {int: "3", float: "0.25", str: "abc"}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_takes_a_value_of_its_own_type_from_both_sources(name, tmp_path):
    entry = OPTIONS[name]
    choices = list(entry.metadata.get("choices", ()))
    text = str(choices[-1]) if choices else ALTERNATIVES[type(entry.default)]
    if "above" in entry.metadata:
        text = str(entry.metadata["above"] + 1)
    from_flag = getattr(load_config([f"--{name}={text}"] if name != "config" else []), name)
    if name == "config":
        return
    (tmp_path / "c.yaml").write_text(f"{name}: {text}\n")
    from_yaml = getattr(load_config(["--config", str(tmp_path / "c.yaml")]), name)
    assert type(from_flag) is type(from_yaml) is type(entry.default)
    assert from_flag == from_yaml == type(entry.default)(text)


@pytest.mark.parametrize("name", [name for name, entry in OPTIONS.items() if type(entry.default) in (int, float)])
def test_each_number_has_limits_on_both_sides(name):
    about = OPTIONS[name].metadata
    if "choices" in about:
        return
    assert "low" in about or "above" in about
    assert "high" in about or name in ("grad_clip", "save_minutes")  # any finite number makes sense there
    assert any("too large" in p or "finite" in p for p in problems(f"--{name}", "1" + "0" * 400))
    assert problems(f"--{name}", "-1000000000")


@pytest.mark.parametrize("name", [name for name, entry in OPTIONS.items() if entry.metadata.get("choices") == (0, 1)])
def test_a_switch_may_stand_without_its_1(name):
    assert getattr(load_config([f"--{name}"]), name) == 1
    assert getattr(load_config([f"--{name}", "0"]), name) == 0
    assert problems(f"--{name}", "2") == [f"--{name} 2: choose one of 0, 1"]


YAML_VALUES = {
    "learning_rate: 5e-4": 5e-4,  # YAML 1.1 reads this as a text
    "learning_rate: 0.0005": 5e-4,
    "learning_rate: 1": 1.0,
    "use_moe: true": 1,
    "use_moe: no": 0,
    "use_compile: 1": "1",
    "use_compile: off": "0",
    "save_weight: 123": "123",
    "epochs: '3'": 3,
    "data_path: [a.jsonl, b.jsonl]": "a.jsonl,b.jsonl",
    "val_path: ['a,b.jsonl', c.jsonl]": "a\\,b.jsonl,c.jsonl",
    "val_path: ''": "",
}


@pytest.mark.parametrize("line", YAML_VALUES)
def test_yaml_values_become_what_a_person_means(line, tmp_path):
    (tmp_path / "c.yaml").write_text(line + "\n")
    value = getattr(load_config(["--config", str(tmp_path / "c.yaml")]), line.partition(":")[0])
    assert value == YAML_VALUES[line] and type(value) is type(YAML_VALUES[line])


def test_an_empty_yaml_file_changes_nothing(tmp_path):
    (tmp_path / "c.yaml").write_text("# nothing\n")
    assert load_config(["--config", str(tmp_path / "c.yaml")]).values() == {
        **Config().values(),
        "config": str(tmp_path / "c.yaml"),
    }


def test_a_mistake_in_the_yaml_file_is_reported_even_where_a_flag_overrides_it(tmp_path):
    (tmp_path / "c.yaml").write_text("epochs: ten\n")
    assert problems("--config", str(tmp_path / "c.yaml"), "--epochs", "3") == [
        f"--config {tmp_path}/c.yaml: epochs 'ten': a whole number is needed"
    ]


# --- names ---

NEAR = {
    "learnin_rate": "learning_rate",
    "learning-rate": "learning_rate",
    "lr_scedule": "lr_schedule",
    "batchsize": "batch_size",
    "hiden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "val_data": "val_path",
    "zzz": "",
}


@pytest.mark.parametrize("name", NEAR)
def test_a_misspelt_name_gets_the_nearest_one_or_none(name):
    assert nearest(name, OPTIONS) == (f" (did you mean {NEAR[name]}?)" if NEAR[name] else "")


def test_an_unknown_flag_and_its_value_are_one_problem():
    assert problems("--lr", "0.1") == ["--lr: no such option; see --help"]
    assert problems("--lr=0.1") == ["--lr=0.1: no such option; see --help"]
    assert problems("--lr", "0.1", "0.2", "--seed", "1") == [
        "--lr: no such option; see --help",
        "'0.2': stands alone; options are written --name value",
    ]


def test_abbreviations_are_not_guessed():
    assert problems("--epoch", "3")[0].startswith("--epoch: no such option (did you mean epochs?)")


# --- help ---


def test_help_is_grouped_with_defaults_and_units_and_takes_no_second():
    script = "import sys, time, runpy; t = time.perf_counter(); sys.argv[1:] = ['--help']\n"
    script += "try: runpy.run_path('train_pretrain.py', run_name='__main__')\n"
    script += "finally: print('torch' in sys.modules, time.perf_counter() - t)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT).stdout
    *lines, last = out.splitlines()
    loaded, seconds = last.split()
    assert loaded == "False" and float(seconds) < 5  # torch alone takes seconds on a busy machine
    groups = [line.rstrip(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert groups == ["options", *grouped_options()]
    text = " ".join(" ".join(lines).split())
    for name, entry in OPTIONS.items():
        start = text.index(f"--{name} ")
        about = text[start : start + 400]
        assert entry.metadata["help"] in about
        assert entry.default == "" or f"(default: {entry.default})" in about


def test_help_shows_some_twenty_everyday_options_first():
    groups = grouped_options()
    assert next(iter(groups)) == "everyday options" and 15 <= len(EVERYDAY) <= 25
    assert sorted(name for names in groups.values() for name in names) == sorted(OPTIONS)


UNITS = {
    "save_minutes": "minutes",
    "save_interval": "steps",
    "eval_interval": "steps",
    "log_interval": "steps",
    "warmup_steps": "steps",
    "batch_size": "rows",
    "global_batch_size": "rows",
    "eval_rows": "rows",
    "max_seq_len": "positions",
    "epochs": "passes",
}


@pytest.mark.parametrize("name", UNITS)
def test_the_help_of_a_quantity_names_its_unit(name):
    assert UNITS[name] in OPTIONS[name].metadata["help"]


# --- paths ---


def test_paths_expand_home_and_variables_and_start_at_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/her")
    monkeypatch.setenv("CORPUS", "/data/corpus")
    assert resolve_path("~/runs") == Path("/home/her/runs")
    assert resolve_path("$CORPUS/a.jsonl") == resolve_path("${CORPUS}/a.jsonl") == Path("/data/corpus/a.jsonl")
    assert resolve_path("runs") == tmp_path / "runs"
    assert resolve_path("./model") == tmp_path / "model"


def test_default_paths_hang_off_the_repository_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CONFIG_ROOT == ROOT
    for name in ("save_dir", "data_path", "tokenizer_path", "cache_dir"):
        default = OPTIONS[name].default
        assert resolve_path(default) == ROOT / default
    assert Config().run_folder == ROOT / "checkpoints" / "pretrain_768"
    assert Config(use_moe=1, save_dir="runs").run_folder == tmp_path / "runs" / "pretrain_768_moe"


def test_a_list_of_paths_is_split_at_commas_unless_a_name_holds_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_paths("a.jsonl, b.jsonl,") == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]
    Path("a.jsonl, b.jsonl").touch()
    assert resolve_paths("a.jsonl, b.jsonl") == [f"{tmp_path}/a.jsonl, b.jsonl"]


def test_a_yaml_list_keeps_names_with_commas_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("data_path:\n- a,b.jsonl\n- c.jsonl\n- c.jsonl\n")
    config = load_config(["--config", "c.yaml"])
    expected = [f"{tmp_path}/{name}" for name in ("a,b.jsonl", "c.jsonl", "c.jsonl")]
    assert resolve_paths(config.data_path) == expected
    assert resolve_paths(config.values()["data_path"]) == expected  # as the run's own config.yaml has it
    assert resolve_paths(r"a\,b.jsonl,c.jsonl") == expected[:2]  # and on a command line


def test_a_lone_name_with_a_comma_is_saved_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a,b.jsonl").touch()
    saved = Config(data_path="a,b.jsonl", save_dir="x,y").values()
    assert resolve_paths(saved["data_path"]) == [f"{tmp_path}/a,b.jsonl"]
    assert saved["save_dir"] == f"{tmp_path}/x,y"


def test_the_sample_beside_another_file_is_saved_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = Config(data_path="dataset/sample/train.jsonl,mine.jsonl").values()["data_path"]
    monkeypatch.chdir("/")
    assert resolve_paths(saved) == [str(ROOT / "dataset/sample/train.jsonl"), f"{tmp_path}/mine.jsonl"]


def test_a_dollar_in_an_existing_name_is_a_letter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("B", "elsewhere")
    Path("a$B").mkdir()
    Path("a$B/$c.jsonl").write_text('{"text": "x"}\n')
    assert resolve_path("a$B/$c.jsonl") == tmp_path / "a$B" / "$c.jsonl"
    assert [file.path.name for file in find_files(resolve_paths("a$B/*.jsonl"))] == ["$c.jsonl"]
    assert resolve_path("$B/$c.jsonl") == tmp_path / "elsewhere" / "$c.jsonl"
    assert [unset_variables(text) for text in ("a$B/$c.jsonl", "$B/x", "$B/${NO_SUCH}/x")] == [[], [], ["${NO_SUCH}"]]


def test_a_glob_starts_at_a_current_folder_with_brackets_in_its_name(tmp_path, monkeypatch):
    (tmp_path / "k[1]").mkdir()
    monkeypatch.chdir(tmp_path / "k[1]")
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).write_text('{"text": "x"}\n')
    assert [file.path.name for file in find_files(resolve_paths("*.jsonl"))] == ["a.jsonl", "b.jsonl"]
    assert resolve_paths("a.jsonl, b.jsonl") == [f"{tmp_path}/k[1]/a.jsonl", f"{tmp_path}/k[1]/b.jsonl"]


def test_an_empty_path_is_not_the_current_folder():
    for name in ("save_dir", "data_path", "tokenizer_path", "cache_dir", "from_weight"):
        assert problems(f"--{name}", "") == [f"--{name} '': a value is needed"]


def test_importing_any_file_prints_nothing_and_changes_no_environment():
    names = sorted(path.stem for path in ROOT.glob("*.py"))
    names += sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in ("model", "dataset", "storage", "training")
        for path in (ROOT / folder).rglob("*.py")
    )
    script = (
        "import os, sys, importlib; before = dict(os.environ)\n"
        f"for name in {names}: importlib.import_module(name)\n"
        "assert dict(os.environ) == before, set(os.environ) ^ set(before)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
