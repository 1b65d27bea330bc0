"""All models of the table, and the rows of one."""

from __future__ import annotations

import logging
import warnings

import torch

from benchmarks.models import encoders, images, language, others, signals
from benchmarks.models.measure import Recipes, Row, measured

CASES = (*language.CASES, *encoders.CASES, *signals.CASES, *images.CASES, *others.CASES)


def rows_of(name: str, recipes: Recipes) -> tuple[Row, ...]:
    """Return the rows of the model `name`, without the messages of its library."""
    quiet()
    return measured(next(case for case in CASES if case.name == name), recipes)


def quiet() -> None:
    """Leave out the messages of libraries, and run on one thread."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
