"""Keep the parts of a large run, each of one commit, as counts that fit in the repository; and write their table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.random_programs.evaluate import GOOD, KINDS, REFUSED
from tests.random_programs.productions import PRODUCTIONS
from tests.random_programs.results import Result

OPENING, CLOSING = "<!-- written by make fuzz-table -->", "<!-- end of what was written -->"
Counts = dict[str, int]


@dataclass(frozen=True)
class Failure:
    """A case that failed when it was first run; `now` is its outcome when it was last run."""

    seed: int
    kind: str
    what: str
    now: str


@dataclass(frozen=True)
class Part:
    """The counts of cases that were run on one commit."""

    first: int  # seed
    last: int
    commit: str
    torch: str
    days: tuple[str, ...]
    seconds: float  # of CPU
    outcomes: dict[str, Counts]  # group of cases -> kind -> cases
    refused: Counts  # by error
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class Parts:
    """All parts, and the ops and productions that they cover together."""

    parts: tuple[Part, ...] = ()
    ops: tuple[str, ...] = field(default=(), repr=False)
    productions: tuple[str, ...] = field(default=(), repr=False)

    def with_results(self, results: Sequence[Result], commit: str) -> Parts:
        """Return these parts and one more; a result of a seed that failed in an earlier part is a rerun of it."""
        failed = {failure.seed for part in self.parts for failure in part.failures}
        new = [one for one in results if one["seed"] not in failed]
        now = {one["seed"]: one["kind"] for one in results if one["seed"] in failed}
        parts = [part for part in self.parts if not new or part.first != min(one["seed"] for one in new)]
        parts = [_rerun(part, now) for part in parts]
        return Parts(
            tuple(sorted([*parts, *([_part(new, commit)] if new else [])], key=lambda part: part.first)),
            tuple(sorted({*self.ops, *(op for one in new for op in one["ops"])})),
            tuple(sorted({*self.productions, *(name for one in new for name in one["productions"])})),
        )

    def save(self, path: Path) -> None:
        """Write them as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Parts:
        """Return the parts of a file, none if there is no file."""
        if not path.exists():
            return Parts()
        given = json.loads(path.read_text(encoding="utf-8"))
        parts = [
            Part(**{**one, "days": tuple(one["days"]), "failures": tuple(Failure(**each) for each in one["failures"])})
            for one in given["parts"]
        ]
        return Parts(tuple(parts), tuple(given["ops"]), tuple(given["productions"]))


def write_table(path: Path, parts: Parts) -> None:
    """Replace the table in a page of the documentation."""
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(OPENING)
    after = rest.partition(CLOSING)[2]
    path.write_text("\n".join([f"{before}{OPENING}", *_table(parts), f"{CLOSING}{after}"]), encoding="utf-8")


def _rerun(part: Part, now: dict[int, str]) -> Part:
    return replace(part, failures=tuple(replace(one, now=now.get(one.seed, one.now)) for one in part.failures))


def _part(results: Sequence[Result], commit: str) -> Part:
    seeds = [one["seed"] for one in results]
    return Part(
        min(seeds),
        max(seeds),
        commit,
        ", ".join(sorted({one["torch"] for one in results})),
        tuple(sorted({one["date"] for one in results})),
        round(sum(one["seconds"] for one in results), 1),
        {name: dict(Counter(one["kind"] for one in group)) for name, group in _groups(results)},
        dict(Counter(one["what"].partition(":")[0] for one in results if one["kind"] == REFUSED)),
        tuple(
            Failure(one["seed"], one["kind"], one["what"], one["kind"]) for one in results if one["kind"] not in GOOD
        ),
    )


def _groups(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    yield "the search", [one for one in results if one["recipe"] == "auto"]
    yield "recipes and constraints", [one for one in results if one["recipe"] != "auto"]
    for mode in ("eager", "inductor"):
        yield f"on gloo ranks, {mode}", [one for one in results if one["ranks"] == mode]
    yield "all", [*results]


def _table(parts: Parts) -> Iterator[str]:
    cases = sum(sum(part.outcomes["all"].values()) for part in parts.parts)
    days = sorted({day for part in parts.parts for day in part.days})
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    yield f"{cases} cases, torch {', '.join(sorted({part.torch for part in parts.parts}))}, {when}, as each first ended:"
    yield ""
    yield "| cases | number | " + " | ".join(KINDS) + " |"
    yield "|---|" + "---|" * (len(KINDS) + 1)
    for name in parts.parts[0].outcomes:
        counts = sum((Counter(part.outcomes[name]) for part in parts.parts), Counter[str]())
        yield f"| {name} | {counts.total()} | " + " | ".join(str(counts[kind]) for kind in KINDS) + " |"
    yield ""
    yield f"Parts: {'; '.join(f'seeds {part.first} to {part.last} on commit {part.commit}' for part in parts.parts)}."
    refused = sum((Counter(part.refused) for part in parts.parts), Counter[str]())
    yield "Refused, by error: " + (", ".join(f"{name} {count}" for name, count in refused.most_common()) or "none") + "."
    drawn = len({*parts.productions} & {*PRODUCTIONS})
    yield f"Ops covered: {len(parts.ops)} overloads of ATen by {drawn} of {len(PRODUCTIONS)} productions."
    yield f"A case takes {sum(part.seconds for part in parts.parts) / cases:.1f} s of CPU in the mean."
    if failures := [one for part in parts.parts for one in part.failures]:
        yield "Failed when first run:"
        yield ""
        for one in failures:
            yield f"- seed {one.seed}: {one.kind}: {one.what}; {'mended' if one.now in GOOD else 'not mended'}"
