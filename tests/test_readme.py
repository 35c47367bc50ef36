"""What the README says is what the program does.

`python tests/test_readme.py` writes the table of flags into both READMEs.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from training.command_line import load_config  # noqa: E402
from training.config import OPTIONS  # noqa: E402 - also run as a script, from anywhere

READMES = ["README.md", "README_zh.md"]
MARKED = re.compile(r"(<!-- flags: .*? -->\n)(.*?)(<!-- end of flags -->)", re.DOTALL)


def flag_table() -> str:
    """Every option with default and meaning, a table a group."""
    groups: dict[str, list[str]] = {}
    for name, entry in OPTIONS.items():
        default = entry.default if entry.default != "" else "(empty)"
        choices = entry.metadata.get("choices", ())
        values = "" if choices in ((), (0, 1)) else f"; one of {', '.join(map(str, choices))}"
        text = (entry.metadata["help"] + values).replace("|", "\\|")
        groups.setdefault(entry.metadata["group"], []).append(f"| `--{name}` | {default} | {text} |")
    return "\n".join(
        f"**{group}**\n\n| flag | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
        for group, rows in groups.items()
    )


def commands(readme: str) -> list[list[str]]:
    """The trainer's command lines in code blocks and tables, as words behind train_pretrain.py."""
    text = (ROOT / readme).read_text(encoding="utf-8")
    code = re.findall(r"```bash\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]*train_pretrain\.py[^`\n]*)`", text)
    lines = [line.split("#")[0] for block in code for line in block.splitlines() if "train_pretrain.py " in line]
    return [shlex.split(line.split("train_pretrain.py", 1)[1]) for line in lines]


@pytest.mark.parametrize("readme", READMES)
def test_the_table_of_flags_is_the_parser_s(readme: str) -> None:
    found = MARKED.search((ROOT / readme).read_text(encoding="utf-8"))
    assert found and found[2] == flag_table(), "run `python tests/test_readme.py`"


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


if __name__ == "__main__":
    for name in READMES:
        text = (ROOT / name).read_text(encoding="utf-8")
        (ROOT / name).write_text(MARKED.sub(lambda found: found[1] + flag_table() + found[3], text), encoding="utf-8")
