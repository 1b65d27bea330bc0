"""An index that names no element is an error on ranks too, also where each rank holds a part of what is looked up."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Options, autoshard
from tests.spawn import run_on_ranks

ROWS = 4  # of the batch, and of what rows are looked up in


class Lookups(nn.Module):
    """Looks up in a table of a vocabulary and in logits, or writes into these."""

    def __init__(self, vocabulary: int, way: str) -> None:
        super().__init__()
        self.table, self.head, self.way = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary), way

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        logits, rows = self.head(self.table(tokens)), torch.arange(ROWS)
        match self.way:
            case "loss":
                return F.cross_entropy(logits, numbers)
            case "gather":
                return logits.gather(1, numbers[:, None]).mean()
            case "index":
                return logits[rows, numbers].mean()
            case "index_select":
                return logits.mean() + self.table.weight.index_select(0, numbers).mean()
            case "index_put":
                return logits.index_put((rows, numbers), rows.to(logits.dtype)).square().mean()
            case "scatter":
                return logits.scatter(1, numbers[:, None].expand(-1, 2), logits[:, :2] + 1).square().mean()
            case "rows":
                return logits[numbers].mean()
        raise AssertionError(self.way)


Call = tuple[list[int], list[int]]


def outcomes(rank: int, vocabulary: int, cases: list[tuple[str, str, list[Call]]]) -> list[list[tuple[str, str]]]:
    """Return what one device and the mesh make of each call of each case: a loss in text, or that an error was raised."""
    return [_outcomes(vocabulary, *case) for case in cases]


def _outcomes(vocabulary: int, recipe: str, way: str, calls: list[Call]) -> list[tuple[str, str]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp" if recipe == "fsdp" else "tp",))
    given = [tuple(map(torch.tensor, call)) for call in calls]
    torch.manual_seed(0)
    model = Lookups(vocabulary, way).double()
    sharded = autoshard(model, mesh, args=given[0], options=Options(recipe=recipe, compile="eager", hardware=None))
    return [(_outcome(model, call), _outcome(sharded, sharded.shard(*call))) for call in given]


def _outcome(model: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    try:
        loss = model(*inputs)
    except (IndexError, RuntimeError) as error:
        assert "out of" in str(error), error
        return "error"
    loss.backward()
    return f"{loss.item():.12f}"


WAYS = [("megatron", way) for way in ("loss", "gather", "index", "index_select", "index_put", "scatter")] + [("fsdp", "rows")]


@pytest.mark.parametrize("vocabulary", [16, 15])
def test_what_is_an_error_on_one_device_is_one_on_every_rank(vocabulary: int) -> None:
    tokens = [0, 3, vocabulary - 1, 7]
    cases = []
    for recipe, way in WAYS:
        most = ROWS if way == "rows" else vocabulary
        numbers, astray = [most - 1, 0, 2, 3], [[most] * ROWS, [-most - 1] * ROWS, [-1] * ROWS]
        cases.append((recipe, way, [(tokens, numbers), ([vocabulary] * ROWS, numbers), *((tokens, one) for one in astray)]))
    for found in run_on_ranks(outcomes, 2, vocabulary, cases):
        for (_, way), ends in zip(WAYS, found, strict=True):
            alone, sharded = zip(*ends, strict=True)
            if way == "index_select":  # torch decomposes it to an index, in which -1 is the last element
                alone, sharded = alone[:4], sharded[:4]
            assert alone == sharded, way
            assert alone[0] != "error" and alone[1:4] == ("error",) * 3


def test_a_label_that_is_ignored_is_no_error() -> None:
    calls = [([1, 2, 3, 4], [5, 2, 1, 0]), ([1, 2, 3, 4], [-100, 2, -100, 0])]
    for (ends,) in run_on_ranks(outcomes, 2, 15, [("megatron", "loss", calls)]):
        assert all(alone == sharded != "error" for alone, sharded in ends)


class Counts(nn.Module):
    """Weighs logits by how often each class is there."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        return (self.head(x) * numbers.bincount(minlength=6)).mean()


def counted(rank: int) -> list[list[str]]:
    """Return what one device and the mesh make of numbers, of one that is too large, and of one below 0."""
    mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), torch.ones(ROWS, 8).double()
    calls = [(x, torch.tensor(numbers)) for numbers in ([5, 0, 5, 2], [0, 6, 6, 0], [-1, 0, 0, -1])]
    found = []
    for compile_with in ("eager", "inductor"):
        torch.manual_seed(0)
        model = Counts().double()
        options = Options(recipe="fsdp", compile=compile_with, hardware=None)
        sharded = autoshard(model, mesh, args=calls[0], options=options)
        found += [[_counted(model, call), _counted(sharded, sharded.shard(*call))] for call in calls]
    return found


def _counted(model: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    try:
        return f"{model(*inputs).item():.12f}"
    except (IndexError, RuntimeError):
        return "error"


def test_a_number_that_bincount_has_no_place_for_is_an_error() -> None:
    for ends in run_on_ranks(counted, 2):
        assert all(alone == sharded for alone, sharded in ends)
        assert [alone == "error" for alone, _ in ends] == [False, True, True] * 2
