"""From which size on sharding pays: against trying every size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard import UserError
from autoshard.measure.crossover import LARGEST, Question, crossovers, format_crossovers
from passes.cost.collective_time import collective_seconds
from passes.cost.kernel_time import Product, product_seconds
from passes.hardware.hardware import hardware_named

H100, CPU = hardware_named("h100"), hardware_named("cpu")


def product(rows: float, columns: float, terms: float, question: Question) -> float:
    nbytes = 2.0 * (rows * columns + columns * terms + rows * terms)
    shape = Product(1, rows, columns, terms)
    return product_seconds(shape, nbytes, "bf16", question.hardware)


def tried(question: Question, size: int) -> tuple[float, dict[str, float]]:
    """Return the seconds on one device and of each way, from the cost functions: no formulas, no solving."""
    tokens, hidden = question.tokens or size, question.hidden or size
    k, group = question.devices, question.group

    def sent(kind: str, elements: int) -> float:
        return collective_seconds(kind, 2 * elements, group, question.hardware)

    if not question.is_training:
        gather, reduce = (sent(kind, 4 * tokens * hidden) for kind in ("all_gather", "all_reduce"))
        return product(tokens, 4 * hidden, hidden, question), {
            "tokens": product(tokens / k, 4 * hidden, hidden, question) + gather,
            "columns": product(tokens, 4 * hidden / k, hidden, question) + gather,
            "rows": product(tokens, 4 * hidden, hidden / k, question) + reduce,
        }

    def step(t: float, h: float, wide: float) -> float:
        return product(t, wide, h, question) + product(t, h, wide, question) + product(h, wide, t, question)

    return step(tokens, hidden, 4 * hidden), {
        "tokens": step(tokens / k, hidden, 4 * hidden) + sent("all_reduce", 4 * hidden * hidden),
        "columns": step(tokens, hidden, 4 * hidden / k) + sent("all_reduce", tokens * hidden),
        "rows": step(tokens, hidden / k, 4 * hidden) + sent("all_reduce", 4 * tokens * hidden),
    }


def gain(question: Question, size: int, way: str) -> float:
    alone, ways = tried(question, size)
    return alone - ways[way]


@pytest.mark.parametrize(
    "question",
    [
        Question(8, H100, tokens=8192),
        Question(8, H100, tokens=8192, is_training=True),
        Question(8, H100, hidden=4096),
        Question(8, H100, hidden=1024, is_training=True),
        Question(8, H100, tokens=2048, link="across"),
        Question(64, H100, tokens=16384),
        Question(4, CPU, tokens=512, is_training=True),
    ],
)
def test_the_answer_is_the_size_that_trying_finds(question: Question) -> None:
    for crossing in crossovers(question):
        size, way = crossing.size, crossing.way.name
        if size is None:
            assert gain(question, LARGEST, way) <= 0
            continue
        assert size == 1 or gain(question, size - 1, way) <= 0
        larger = [*range(size, size + 200), *(size << i for i in range(1, 12))]
        assert all(gain(question, each, way) > 0 for each in larger)


def test_the_formulas_meet_where_sympy_says() -> None:
    question = Question(8, H100, tokens=8192)
    for crossing in crossovers(question):
        assert crossing.exact is not None and crossing.size is not None
        assert crossing.size - 1 <= crossing.exact <= crossing.size
        one, sharded = crossing.seconds
        assert one == pytest.approx(sharded, rel=1e-3) and sharded < one


def test_a_slower_link_asks_for_a_larger_size() -> None:
    inside, across = (crossovers(Question(8, H100, tokens=8192, link=link)) for link in ("inside", "across"))
    for near, far in zip(inside, across, strict=True):
        assert near.size is not None and far.size is not None and near.size < far.size / 2


def test_a_short_row_never_pays_for_its_gather() -> None:
    question = Question(8, H100, hidden=256)
    assert [crossing.size for crossing in crossovers(question)] == [None] * 3
    assert f"never (to {LARGEST})" in format_crossovers(question, crossovers(question))


def test_the_answer_reads_with_its_formulas() -> None:
    question = Question(8, H100, tokens=8192)
    text = format_crossovers(question, crossovers(question))
    assert text.startswith("From which H on are 8 h100 on 1 node faster than one?\n\n")
    assert "\nthe product [T, H] x [H, 4H], bf16, T = 8192\n" in text
    assert "tokens      [T/k, H] x [H, 4H]      all_gather of the result (4*H*T)  2322" in text
    assert "  one device: launch + (2*H + 3*t)*(3*t**2*u/10 + (4*H + t/8)*(T + t/8))/(e*f)\n" in text
    assert "  k = 8: ranks\n" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "a crossover has one unknown: give the tokens or the hidden size, not both or neither"),
        ({"hidden": 5}, "a crossover has one unknown: give the tokens or the hidden size, not both or neither"),
        ({"devices": 1}, "a crossover between one device and 1: give 2 devices or more, at most 1e+15"),
        ({"devices": 10**400}, f"a crossover between one device and {10**400}: give 2 devices or more, at most 1e+15"),
        ({"dtype": "int4"}, "unknown dtype 'int4'; choose one of "),
        ({"tokens": 0}, "tokens=0: give 1 or more, at most 1e+15"),
        ({"link": "wifi"}, "link='wifi': choose inside or across"),
        (
            {"link": "inside", "devices": 9},
            "9 devices are not inside a node of h100, which has 8; give fewer, or leave the link to be filled",
        ),
    ],
)
def test_a_question_that_cannot_be_answered(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        replace(Question(8, H100, tokens=8192), **changes)
    assert str(caught.value).startswith(message)
