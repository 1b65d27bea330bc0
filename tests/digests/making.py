"""From a case to its texts and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoshard import AutoshardError, ShardingPlan, plan
from tests.digests.access import Around, make_program, run_program
from tests.digests.cases import Case
from tests.digests.digest import (
    Record,
    Texts,
    canonical,
    plan_figures,
    plan_texts,
    program_texts,
    report_texts,
    value_texts,
)


def make(case: Case) -> tuple[Texts, Record]:
    """Return all texts of a case, and its figures."""
    with torch.random.fork_rng(), torch.set_grad_enabled(case.training):
        torch.manual_seed(0)
        model, args, kwargs = case.build()
        made = plan(model, case.where(), args, kwargs, options=case.options)
        texts, figures = _planned(case, made)
        if case.program or case.step:
            texts |= _programmed(case, made)
    return texts, figures


def _planned(case: Case, made: ShardingPlan) -> tuple[Texts, Record]:
    texts, figures = plan_texts(made) | report_texts(made), plan_figures(made)
    figures["plan file"] = "gives the plan" if _reread(made) == made else "gives another plan"
    for number, change in enumerate(case.changes):
        more, figured = _changed(made, change)
        texts |= _named(f"what if {number}", more)
        figures |= _named(f"what if {number}", figured)
    return texts, figures


def _reread(made: ShardingPlan) -> ShardingPlan:
    return ShardingPlan.from_json(made.to_json())


def _named(what: str, given: Record) -> Record:
    return {f"{what}: {kind}": value for kind, value in given.items()}


def _changed(made: ShardingPlan, change: Mapping[str, Any]) -> tuple[Texts, Record]:
    """Return what `replan` gives, or the error that it raises."""
    try:
        other = made.replan(**change)
    except AutoshardError as error:
        return {"error": canonical(str(error))}, {}
    return plan_texts(other) | {"difference": canonical(str(made.diff(other)))}, plan_figures(other)


def _programmed(case: Case, made: ShardingPlan) -> Texts:
    """Return what would be compiled of a case, the numbers of a step of it, and what would be compiled for an evaluation."""
    call = case.build()
    around = Around(case.batch_axes, _reread(made) if case.follows else None)
    program = make_program(*call, case.where(), case.options, around, training=case.training)
    texts = program_texts(program)
    if case.step:
        texts |= value_texts(run_program(*call, program))
    if case.evaluation:
        around = Around(case.batch_axes, stored_as=program.plan)
        with torch.no_grad():
            program = make_program(*call, case.where(), case.options, around, training=False)
        texts |= _named("evaluation", program_texts(program))
    return texts
