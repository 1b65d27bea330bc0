"""What solving decides, on the smallest programs that show it, and that it computes what one device does."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

import passes.rules  # registers the rules
from autoshard.config.options import Options
from autoshard.phases import Phases
from passes.base import PassContext
from passes.errors import ConstraintError, MemoryLimitError, UserError
from passes.insert_reshards import InsertReshards
from passes.ir.graph import InputRole, input_of, layout_of, needs_of, output_node, placeholders
from passes.ir.layout import Shard
from passes.ir.mesh import Mesh
from passes.ir.text import format_graph, parse_graph
from passes.manager import PassManager
from passes.observers import Verifier
from passes.search.goal import Goal
from passes.seed import Constraint, Seed
from passes.solve import Solve
from tests.models import build
from tests.spmd.oracle import check_step

assert passes.rules


def solved(text: str, seed: Seed | None = None, goal: Goal | None = None, hardware: str | None = "h100"):  # type: ignore[no-untyped-def]
    gm, parsed = parse_graph(text)
    mesh = Mesh(parsed.names, parsed.sizes, hardware=hardware)
    PassManager((seed or Seed(), Solve(goal or Goal()), InsertReshards()), (Verifier(),)).run(gm, PassContext(mesh))
    return gm, mesh


def stored(gm: GraphModule, mesh: Mesh) -> dict[str, str]:
    return {input_of(node).name: layout_of(node).format(mesh) for node in placeholders(gm.graph, InputRole.PARAMETER)}


def mlp(mesh: str, rows: int, hidden: int) -> str:
    return f"""mesh {mesh}
stage CAPTURED
%up: f32[2048, {hidden}] = parameter("up")
%down: f32[{hidden}, 2048] = parameter("down")
%x: f32[{rows}, 2048] = input("x")
%mm: f32[{rows}, {hidden}] = mm(%x, %up)
%relu: f32[{rows}, {hidden}] = relu(%mm)
%mm_1: f32[{rows}, 2048] = mm(%relu, %down)
return output("output") %mm_1
"""


def test_large_parameters_stay_where_they_are_and_activations_move() -> None:
    gm, mesh = solved(mlp("tp=8", 64, 65536), goal=Goal(memory_limit=0.4e9))
    assert stored(gm, mesh) == {"up": "{tp:S(1)}", "down": "{tp:S(0)}"}


def test_small_parameters_are_everywhere_and_the_batch_is_split() -> None:
    gm, mesh = solved(mlp("tp=8", 65536, 256))
    x = placeholders(gm.graph, InputRole.INPUT)[0]
    assert layout_of(x).format(mesh) == "{tp:S(0)}"


def test_less_memory_shards_parameters() -> None:
    rich, mesh = solved(mlp("dp=4", 16384, 8192), goal=Goal(memory_limit=80e9))
    poor, _ = solved(mlp("dp=4", 16384, 8192), goal=Goal(memory_limit=0.36e9))
    assert set(stored(rich, mesh).values()) == {"{dp:R}"}
    assert "S" in "".join(stored(poor, mesh).values())


def test_too_little_memory_says_what_the_smallest_plan_needs() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        solved(mlp("dp=2", 4096, 8192), goal=Goal(memory_limit=1e6))
    assert str(caught.value) == (
        "no layouts were found that fit 976.6 KiB per device; the smallest plan found needs 208.0 MiB: give more memory, more "
        "devices, or a smaller batch"
    )


def test_pins_that_no_layout_meets_are_named() -> None:
    seed = Seed(params=(Constraint("up", "dp", Shard(1, 3)),))
    with pytest.raises(ConstraintError, match=r"up of shape .* cannot meet its constraints: dp:S\(1/3\) \(options\)"):
        solved(mlp("dp=2", 64, 256), seed=seed)


def test_pins_are_kept() -> None:
    seed = Seed(params=(Constraint("up", "dp", Shard(0)),), inputs=(Constraint("x", "dp", Shard(1)),))
    gm, mesh = solved(mlp("dp=2", 65536, 256), seed=seed)
    assert stored(gm, mesh)["up"] == "{dp:S(0)}"
    assert layout_of(placeholders(gm.graph, InputRole.INPUT)[0]).format(mesh) == "{dp:S(1)}"


ALIKE = """mesh dp=2
stage CAPTURED
%w: f32[8] pinned(dp:{w} "options") = parameter("b.weight")
%x: f32[8] pinned(dp:{x} "options") = input("b.weight")
%mul: f32[8] = mul(%x, %w)
return output("output") %mul, gradient("b.weight") %mul, gradient("input:b.weight") %mul
"""


@pytest.mark.parametrize(("w", "x"), [("R", "S(0)"), ("S(0)", "R")])
def test_an_input_may_have_the_name_of_a_parameter(w: str, x: str) -> None:
    gm, mesh = solved(ALIKE.format(w=w, x=x))
    needs = [need.format(mesh) for need in needs_of(output_node(gm.graph))]
    assert needs[1:] == [f"{{dp:{w}}}", f"{{dp:{x}}}"]


def test_hardware_is_asked_for() -> None:
    with pytest.raises(UserError, match="does not say on what hardware it is"):
        solved(mlp("dp=2", 64, 256), hardware=None)


def test_the_same_graph_gives_the_same_layouts() -> None:
    first, second = (format_graph(*solved(mlp("dp=2,tp=4", 8192, 8192))) for _ in range(2))
    assert first == second


def pipeline(goal: Goal):  # type: ignore[no-untyped-def]
    return Phases(choose=Solve(goal)).passes


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize("name", ["mlp"])
def test_a_step_of_a_solved_program_equals_one_device(name: str, mesh: str) -> None:
    options = Options(recipe=None, passes=pipeline(Goal(gap=0.05, time_limit=20)), compile="eager")
    check_step(build(name, dtype=torch.float64), Mesh(mesh, hardware="h100"), options)
