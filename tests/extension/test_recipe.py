"""What a recipe of one's own costs: one record and the function that it decides with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from autoshard import Mesh, Options, RecipeError, check, plan
from passes.ir.graph import InputRole, input_of, operands, placeholders, tensor_of
from passes.ir.layout import Layout, Placement, R, Shard
from passes.ir.mesh import Mesh as PassMesh
from passes.recipes import Decision, Decisions, Recipe, Site, recipe_named, register_recipe, registry
from passes.recipes.fsdp import FSDP
from passes.recipes.storage import first_dim_that_divides

# --- a recipe that decides in the graph: rows of embedding tables are sharded, all else is as it comes


def shard_tables(site: Site) -> Decisions:
    lookups = site.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    tables = [node for node in lookups if operands(node)[0] in placeholders(site.gm.graph, InputRole.PARAMETER)]
    even = [node for node in tables if tensor_of(operands(node)[0]).shape[0] % site.size == 0]
    names = [input_of(operands(node)[0]).name for node in even]
    return Decisions(
        parameters=dict.fromkeys(names, Decision(Shard(0), "tables: rows")),
        values=dict.fromkeys(even, Decision(R, "tables: summed")),
    )


TABLES = Recipe("tables", "rows of embedding tables are sharded", decide=shard_tables)


# --- a recipe that stores: small parameters stay whole, as their gather costs more time than they take memory


def large_only(layout: Layout, axis: int, shape: Sequence[int], mesh: PassMesh) -> Placement | None:
    return first_dim_that_divides(layout, axis, shape, mesh) if torch.Size(shape).numel() > 64 else R


LARGE = Recipe("large", "fsdp of large parameters", carries_batch=True, store=large_only, frees_gathered=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.norm = nn.Embedding(48, 16), nn.Linear(16, 32), nn.LayerNorm(32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.up(self.table(tokens)).relu()).square().mean()


@pytest.fixture(autouse=True)
def recipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register both for one test."""
    with monkeypatch.context() as patched:
        patched.setattr(registry, "_RECIPES", dict(registry._RECIPES))
        register_recipe(TABLES)
        register_recipe(LARGE)
        yield


def made() -> tuple[Model, tuple[Tensor]]:
    torch.manual_seed(0)
    return Model().double(), (torch.randint(48, (8, 6)),)


def stored(recipe: str, mesh: str) -> dict[str, str]:
    model, args = made()
    found = plan(model, Mesh(mesh), args=args, options=Options(recipe=recipe))
    return {name: ", ".join(map(str, one.layout.placements)) for name, one in found.parameters.items()}


def test_a_recipe_that_decides_in_the_graph_shards_what_it_finds() -> None:
    assert stored("tables", "rows=4") == {
        "table.weight": "S(0)", "up.weight": "R", "up.bias": "R", "norm.weight": "R", "norm.bias": "R"
    }  # fmt: skip


def test_a_recipe_that_stores_keeps_whole_what_it_leaves_out() -> None:
    assert stored("large", "dp=4") == {
        "table.weight": "S(0)", "up.weight": "S(0)", "up.bias": "R", "norm.weight": "R", "norm.bias": "R"
    }  # fmt: skip


@pytest.mark.parametrize(("mesh", "recipe"), [("rows=4", "tables"), ("dp=4", "large"), ("dp=2,rows=2", "large+tables")])
def test_a_step_gives_the_numbers_of_one_device(mesh: str, recipe: str) -> None:
    model, args = made()
    checked = check(model, mesh, args, options=Options(recipe=recipe))
    assert checked, str(checked)


@pytest.mark.slow
def test_the_search_enters_a_registered_recipe() -> None:
    model, args = made()
    found = plan(model, Mesh("rows=2", hardware="h100"), args=args, options=Options())
    assert found.search is not None
    assert {"tables", "large"} <= {one.name for one in found.search.candidates}


def test_a_name_is_registered_once() -> None:
    register_recipe(TABLES)
    with pytest.raises(RecipeError) as caught:
        register_recipe(Recipe("fsdp", "another"))
    assert str(caught.value) == f"there is a recipe 'fsdp' already: {FSDP.summary}; choose another name"
    assert recipe_named("fsdp") is FSDP


def test_a_recipe_that_cannot_be_is_refused() -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe("fsdp+tables", "both")
    assert str(caught.value) == (
        "Recipe('fsdp+tables'): a recipe's name is a word such as 'fsdp', and not 'auto' or 'none'"
    )
    with pytest.raises(RecipeError) as caught:
        Recipe("free", "nothing to free", frees_gathered=True)
    assert str(caught.value) == (
        "Recipe('free'): frees_gathered=True, but without store= parameters are never gathered; give "
        "store=first_dim_that_divides, or leave frees_gathered out"
    )
