"""What a plan and its program are, as short records that two versions of the library can be compared by.

A record holds a digest of each kind of text, and figures as they are. It knows no name of the library's own code but
those that its texts say: names of passes in remarks and reasons.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoshard import ShardingPlan
from tests.digests.access import Program, layout_text, table_text

Texts = dict[str, str]  # by kind: "LOCAL program text", ...
Record = dict[str, str]  # by kind: a digest of a text, or a figure

LINE = re.compile(r"[\w./-]+\.py:\d+")  # of the model's code: it may move
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")
SEARCHED_FOR = re.compile(r"(?<=[;\d%]) \d+(\.\d+)? (s|ms|us|min)$", re.MULTILINE)  # how long a search took
DIGITS = 12  # of the largest number of a tensor that count


def digest_of(text: str) -> str:
    """Return the first 16 hex digits of SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def canonical(text: str) -> str:
    """Return `text` without lines and files of the model's code or addresses."""
    return ADDRESS.sub("<address>", LINE.sub("<line>", text))


def word_by_word(text: str) -> str:
    """Return `text` with a word on each line: where its lines are broken depends on what `canonical` leaves out."""
    return "\n".join(text.split())


def plan_texts(plan: ShardingPlan) -> Texts:
    """Return all that a plan decides, as text by kind."""
    texts = {
        "mesh and recipes": f"{plan.mesh} {plan.recipes}",
        "layouts of parameters": _values(plan.parameters),
        "layouts of inputs": _values(plan.inputs),
        "layouts of outputs": _values(plan.outputs),
        "layouts of values": "\n".join(f"{name}: {layout_text(one)}" for name, one in plan.layouts.items()),
        "collectives": "\n".join(map(_collective, plan.collectives)),
        "times of collectives": "\n".join(f"{one.id} {one.seconds!r} {one.exposed!r}" for one in plan.collectives),
        "remarks": "\n".join(f"{one} {one.routine}" for one in plan.remarks),
        "candidates": "\n".join(_candidates(plan)),
        "recomputation": repr_of(plan.recomputation),
        "placements' edges": str(len(plan.edges)),
        **{f"{stage} program text": plan.graph(stage) for stage in plan.graphs},
    }
    return {kind: canonical(text) for kind, text in texts.items()}


def report_texts(plan: ShardingPlan) -> Texts:
    """Return what a user reads of a plan: its table, its timeline, and of a searched one why some values are as they are."""
    asked = [*list(plan.parameters)[:2], *list(plan.inputs)[:1], *(f"%{one.id}" for one in plan.collectives[:1])]
    texts = {"table": SEARCHED_FOR.sub(" <time>", table_text(plan))}
    if plan.search is not None:  # of others it would have to state a search first
        texts["explanations"] = "\n".join(str(plan.explain(what)) for what in asked)
    if plan.cost is not None:
        texts["timeline"] = _trace(plan)
    return {kind: word_by_word(canonical(text)) for kind, text in texts.items()}


def program_texts(program: Program) -> Texts:
    """Return what would be compiled, and the plan that says so."""
    texts = {f"program's plan: {kind}": text for kind, text in plan_texts(program.plan).items()}
    texts |= {
        "compiled forward": canonical(program.forward),
        "compiled backward": canonical(program.backward),
        "compiled ends": program.ends,
        "compiled remarks": canonical("\n".join(program.remarks)),
    }
    return texts


def plan_figures(plan: ShardingPlan) -> Record:
    """Return what a step of a plan costs and how it was chosen, digit by digit."""
    figures: dict[str, object] = {}
    if plan.cost is not None:
        names = ("step_time", "compute", "communication", "exposed_comm", "peak_memory", "memory")
        figures |= {name: repr_of(getattr(plan.cost, name)) for name in names}
    if plan.search is not None:
        found = ("chosen", "memory_limit", "objective", "bound", "least", "gap")
        figures |= {f"search's {name}": repr_of(getattr(plan.search, name)) for name in found}
    return {name: str(figure) for name, figure in figures.items()}


def value_text(value: Tensor) -> str:
    """Return the numbers of a tensor, rounded to `DIGITS` digits of its largest, with dtype and shape."""
    head = f"{value.dtype} {list(value.shape)}"
    numbers = value.detach().double().flatten()
    largest = float(numbers.abs().max()) if numbers.numel() else 0.0
    if not largest or largest != largest or largest == float("inf"):
        return f"{head} {numbers.tolist()}"
    quantum = 10.0 ** (_exponent(largest) - DIGITS)
    return f"{head} {quantum!r} {torch.round(numbers / quantum).to(torch.int64).tolist()}"


def value_texts(values: Mapping[str, Tensor]) -> Texts:
    """Return the `value_text` of each value, by name."""
    return {f"number of {name}": value_text(value) for name, value in values.items()}


def repr_of(value: object) -> str:
    """Return `repr` without the names of the library's classes."""
    return re.sub(r"\b[A-Z]\w*\(", "(", repr(value))


def record_of(texts: Texts, figures: Record) -> Record:
    """Return the digests of all texts, and figures as they are."""
    return {kind: digest_of(text) for kind, text in texts.items()} | figures


def _exponent(number: float) -> int:
    return int(f"{number:e}".partition("e")[2])


def _values(values: Mapping[str, Any]) -> str:
    rows = (f"{name}: {one.name} {one.dtype}{list(one.shape)} {layout_text(one.layout)}" for name, one in values.items())
    return "\n".join(rows)


def _collective(one: Any) -> str:
    sent = one.id, one.kind, one.axes, one.bytes, one.backward, one.recomputed, one.bucket, one.chunks
    return f"{sent} {one.reason} | {one.what} | {one.origin.fqn}"


def _candidates(plan: ShardingPlan) -> Iterator[str]:
    for one in () if plan.search is None else plan.search.candidates:
        yield f"{one.name}: {repr_of(one.cost)} {one.fits} {one.note}"


def _trace(plan: ShardingPlan) -> str:
    with tempfile.TemporaryDirectory() as folder:
        plan.to_trace(Path(folder) / "trace.json")
        return json.dumps(json.loads((Path(folder) / "trace.json").read_text()), indent=0)
