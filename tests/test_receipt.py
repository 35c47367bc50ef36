"""The receipt of a run stays whole and tells what ran."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from training.saving import receipt

ROOT = Path(__file__).parent.parent


def test_the_receipt_is_kept_whole_through_updates_and_restarts(tmp_path):
    record = receipt.Receipt(tmp_path / "run.json")
    record.update(status="running", seed=42, config={"data_path": Path("a.jsonl"), "lr": 1e-3})
    record.add_save(10, "aa", "resume/step_00000010")
    record.add_save(20, "bb", "resume/step_00000020")
    resumed = receipt.Receipt(tmp_path / "run.json")
    resumed.add_save(20, "cc", "resume/step_00000020")
    resumed.update(status="finished")
    data = json.loads((tmp_path / "run.json").read_text())
    assert (data["status"], data["seed"], data["config"]["data_path"]) == ("finished", 42, "a.jsonl")
    assert [(save["step"], save["weights_digest"]) for save in data["saves"]] == [(10, "aa"), (20, "cc")]
    resumed.add_save(15, "dd", "resume/step_00000015")  # gone back: step 20 is no longer part of this run
    assert [save["step"] for save in resumed.data["saves"]] == [10, 15]
    with pytest.raises(AssertionError, match="unknown status"):
        resumed.update(status="done")


def test_an_unreadable_receipt_is_replaced_and_the_new_one_says_so(tmp_path):
    (tmp_path / "run.json").write_text("{")
    receipt.Receipt(tmp_path / "run.json").update(status="running")
    assert "unreadable" in json.loads((tmp_path / "run.json").read_text())["notes"][0]


def test_the_loop_and_the_writer_s_thread_may_update_the_receipt_together(tmp_path):
    record = receipt.Receipt(tmp_path / "run.json")

    def note_saves():
        for step in range(1, 30):
            record.add_save(step, "x", "y")

    thread = threading.Thread(target=note_saves)
    thread.start()
    for number in range(30):
        record.update(number=number)
    thread.join()
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["number"] == 29 and len(data["saves"]) == 29


def test_environment_facts_import_no_package_and_are_json():
    code = (
        "import sys, json\nfrom training.saving import receipt\nfacts = receipt.environment_facts()\n"
        "assert not {'transformers', 'tokenizers', 'swanlab'} & set(sys.modules)\nprint(json.dumps(facts))"
    )
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["versions"]["torch"].startswith("2.") and facts["threads"] == 1 and facts["cpu"]


def test_git_state_tells_clean_from_dirty_and_is_none_outside_a_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert receipt.git_state(tmp_path) is None

    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "x")
    state = receipt.git_state(tmp_path)
    assert state is not None and len(state["commit"]) == 40 and state["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert receipt.git_state(tmp_path) == {**state, "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert receipt.git_state(tmp_path) is None
