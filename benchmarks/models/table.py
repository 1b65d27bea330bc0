"""Put rows into a table of docs/models.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
END = "<!-- end -->\n"
Cells = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table of the page, after a line that names the command that made it; the first two cells of a row are its key."""

    command: str
    header: Cells

    def write(self, rows: Iterable[Cells], order: Sequence[Cells]) -> None:
        """Put rows into the table in place of those of the same keys; rows whose keys are not in `order` go."""
        begin = f"<!-- made by {self.command} -->\n"
        before, found, rest = PAGE.read_text().partition(begin)
        if not found:
            raise ValueError(f"{PAGE} has no line {begin.strip()}")
        table, _, after = rest.partition(END)
        old = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in table.splitlines()[2:]]
        by_key = {cells[:2]: cells for cells in (*old, *rows)}
        ordered = [by_key[key] for key in order if key in by_key]
        lines = map(_line, (self.header, ("---",) * len(self.header), *ordered))
        PAGE.write_text(before + begin + "".join(f"{line}\n" for line in lines) + END + after)


def _line(cells: Cells) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
