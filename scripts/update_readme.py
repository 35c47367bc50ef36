"""Write the tables of flags into both READMEs, from the parser's own table of options.

python scripts/update_readme.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

READMES = ("README.md", "README_zh.md")
MARKED = re.compile(r"(<!-- flags: .*? -->\n)(.*?)(<!-- end of flags -->)", re.DOTALL)


def flag_table() -> str:
    """Every option with default and meaning, under the headings of the help."""
    from training.config import grouped_options

    return "\n".join(
        f"**{title}**\n\n| flag | default | meaning |\n|---|---|---|\n" + "\n".join(map(flag_row, names)) + "\n"
        for title, names in grouped_options().items()
    )


def flag_row(name: str) -> str:
    from training.config import OPTIONS

    entry = OPTIONS[name]
    choices = entry.metadata.get("choices", ())
    values = "" if choices in ((), (0, 1)) else f"; one of {', '.join(map(str, choices))}"
    text = (entry.metadata["help"] + values).replace("|", "\\|")
    return f"| `--{name}` | {entry.default if entry.default != '' else '(empty)'} | {text} |"


def main() -> int:
    for name in READMES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        path.write_text(MARKED.sub(lambda found: found[1] + flag_table() + found[3], text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
