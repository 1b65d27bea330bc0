"""Markdown pages as the blocks that a test can run.

Comments in a page's source say what a reader need not see:

    <!-- not run: REASON -->    the next block is compiled or parsed, not run
    <!-- printed -->            each line of the next block is one that the page's code printed before it
    <!-- prelude                runs before the first block
    CODE
    -->
    <!-- after                  runs when the page is over
    CODE
    -->
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(r"(?:^<!-- (?P<comment>[^\n]*) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
_HIDDEN = r"^<!-- {}\n(.*?)^-->$"


@dataclass(frozen=True)
class Block:
    """A fenced block: what language it is in, and the line that its text begins on."""

    language: str
    text: str
    line: int
    comment: str

    @property
    def runs(self) -> bool:
        return not self.comment.startswith("not run: ")

    @property
    def is_printed(self) -> bool:
        return self.comment == "printed"

    @property
    def commands(self) -> list[list[str]]:
        """Return the words of each command of a console block."""
        return [line[2:].split() for line in self.text.splitlines() if line.startswith("$ ")]


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["language"], found["text"], text.count("\n", 0, found.start("text")), found["comment"] or "")
        for found in _BLOCK.finditer(text)
    ]


def hidden_code(page: Path, name: str) -> str:
    """Return the code of a page's comment `prelude` or `after`; nothing where it has none."""
    found = re.search(_HIDDEN.format(name), page.read_text(encoding="utf-8"), re.M | re.S)
    return found[1] if found else ""


def code_spans(page: Path) -> list[str]:
    """Return what stands between backticks in a page's prose and tables."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.findall(r"`([^`\n]+)`", prose)


def links(page: Path) -> list[str]:
    """Return the targets of a page's links into the repository."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]
