"""From a case to its texts and figures."""

from __future__ import annotations

import torch

from autoshard import AutoshardError, Options, ShardingPlan, plan
from tests.digests.access import make_program, run_program
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
    """All texts of a case, and its figures."""
    with torch.random.fork_rng(), torch.set_grad_enabled(case.training):
        torch.manual_seed(0)
        texts, figures = _planned(case)
        if case.program or case.step:
            texts |= _programmed(case)
    return texts, figures


def _planned(case: Case) -> tuple[Texts, Record]:
    model, args, kwargs = case.build()
    made = plan(model, case.where(), args, kwargs, options=case.options)
    texts, figures = plan_texts(made) | report_texts(made), plan_figures(made)
    figures["plan file"] = "gives the plan" if ShardingPlan.from_json(made.to_json()) == made else "gives another plan"
    for number, change in enumerate(case.changes):
        more, figured = _changed(made, change)
        texts |= {f"what if {number}: {kind}": text for kind, text in more.items()}
        figures |= {f"what if {number}: {kind}": figure for kind, figure in figured.items()}
    return texts, figures


def _changed(made: ShardingPlan, change: dict[str, object]) -> tuple[Texts, Record]:
    """What `replan` gives, or the error that it raises."""
    try:
        other = made.replan(**change)
    except AutoshardError as error:
        return {"error": canonical(str(error))}, {}
    return plan_texts(other) | {"difference": canonical(str(made.diff(other)))}, plan_figures(other)


def _programmed(case: Case) -> Texts:
    model, args, kwargs = case.build()
    options: Options = case.options
    program = make_program(model, args, kwargs, case.where(), options, training=case.training)
    texts = program_texts(program)
    if case.step:
        texts |= value_texts(run_program(model, args, kwargs, program))
    return texts
