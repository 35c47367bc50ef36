"""What the README says is what the program does."""

from __future__ import annotations

import re
import shlex

import pytest

from runs import ROOT
from scripts.update_readme import MARKED, READMES, flag_table
from training.command_line import load_config


def commands(readme: str) -> list[list[str]]:
    """The trainer's command lines in code blocks and tables, as words behind train_pretrain.py."""
    text = (ROOT / readme).read_text(encoding="utf-8")
    code = re.findall(r"```bash\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]*train_pretrain\.py[^`\n]*)`", text)
    lines = [line.split("#")[0] for block in code for line in block.splitlines() if "train_pretrain.py " in line]
    return [shlex.split(line.split("train_pretrain.py", 1)[1]) for line in lines]


@pytest.mark.parametrize("readme", READMES)
def test_the_table_of_flags_is_the_parser_s(readme: str) -> None:
    found = MARKED.search((ROOT / readme).read_text(encoding="utf-8"))
    assert found and found[2] == flag_table(), "run `python scripts/update_readme.py`"


@pytest.mark.parametrize("readme", READMES)
def test_every_command_in_the_readme_is_accepted_by_the_parser(readme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = [words for words in commands(readme) if "..." not in words]
    assert len(found) >= 8
    for words in found:
        load_config(words)


@pytest.mark.parametrize("readme", READMES)
def test_every_file_the_readme_links_to_exists(readme: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / readme).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []
