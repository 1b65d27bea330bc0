"""Weights under which the relaxation bounds most, by the plans seen so far (Kelley's cutting planes)."""

from __future__ import annotations

from collections.abc import Sequence

from passes.search.milp import Program
from passes.search.model import SCALE, Plan, freed
from passes.search.relax import Weights
from passes.search.room import Room

SHORT = 4.0  # what a plan of no bytes would save at most, in steps: keeps the price of bytes finite where none fits
GB = 1e9


def weights_of(plans: Sequence[Plan], room: Room | None) -> Weights:
    """Weights under which the best of `plans` costs most: with these plans alone no weights bound more."""
    program = Program()
    parts = [program.column() for _ in plans]
    program.row(parts, [1.0] * len(parts), 1.0, 1.0)
    times = []
    for segment in range(len(plans[0].busy)):
        time = program.column(SCALE, float("inf"))
        times.append(
            [
                program.row([time, *parts], [1.0, *(-float(plan.busy[segment, what]) for plan in plans)], 0.0, float("inf"))
                for what in range(plans[0].busy.shape[1])
            ]
        )
    byte_row = -1
    if room is not None:
        least = min(plan.objective for plan in plans)
        over = program.column(SHORT * least / room.most * GB * SCALE, float("inf"))
        more = [over, *freed(program, room)]
        bytes_ = [-plan.memory / GB for plan in plans]
        byte_row = program.row([*more, *parts], [*(1.0 for _ in more), *bytes_], -room.limit / GB, float("inf"))
    duals = program.duals()
    assert duals is not None, "every plan is an answer"
    segments = []
    for rows in times:
        worth = [max(0.0, float(duals[row])) for row in rows]
        total = sum(worth)
        segments.append((worth[0] / total, worth[1] / total, worth[2] / total) if total else (1.0, 0.0, 0.0))
    byte = max(0.0, float(duals[byte_row])) / SCALE / GB if byte_row >= 0 else 0.0
    return Weights(tuple(segments), byte)
