"""Random programs of one device, trained for ten steps with and without each overlap pass, under random prices."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from torch.fx import GraphModule

from autoshard.debug.rank_interpreter import run_ranks
from passes.base import Pass, PassContext
from passes.bucket_collectives import BucketCollectives
from passes.cost.build_program import program_of_graph
from passes.cost.scheduling.best_schedule import schedule
from passes.cost.simulate import simulate
from passes.decompose_matmuls import DecomposeMatmuls
from passes.hardware.hardware import Hardware, hardware_named
from passes.ir.graph import InputRole, copy_graph, input_of, outputs_of, placeholders, tensor_of
from passes.ir.mesh import Mesh
from passes.ir.text import parse_graph
from passes.manager import PassManager
from passes.matmul_ways import trials
from passes.observers import Verifier
from passes.schedule_overlap import ScheduleOverlap

AXES = "dp=2,tp=2"
STEPS, RATE = 10, 0.1
ROOM = 1 << 40
PASSES: dict[str, tuple[Pass, ...]] = {
    "decompose_matmuls": (DecomposeMatmuls(ROOM),),
    "bucket_collectives": (BucketCollectives(1 << 12, ROOM),),
    "schedule_overlap": (ScheduleOverlap(ROOM),),
}
PASSES["all"] = tuple(one for each in PASSES.values() for one in each)


def _group(axis: str) -> str:
    return f'"autoshard:{AXES}:{axis}"'


def _random_step(random: Random) -> GraphModule:
    """Return a step: weights gathered over dp, products of a value that is gathered or summed over tp, all gradients."""
    rows = random.choice([4, 8])
    lines = [f"mesh {AXES}", "stage LOCAL"]
    depth = random.randint(2, 4)
    lines += [f'%w{n}: f32[4, 8] = parameter("w{n}")' for n in range(depth)]
    lines += [f'%x: f32[{rows}, 8] = saved("x")', f'%t: f32[{rows}, 8] = tangent("0")']
    value, gradients = "t", []
    for n in range(depth):
        lines += [
            f"%g{n}: f32[8, 8] = _c10d_functional.all_gather_into_tensor(%w{n}, 2, {_group('dp')})",
            f"%v{n}: f32[8, 8] = _c10d_functional.wait_tensor(%g{n})",
        ]
        match random.choice(["gathered", "scattered", "reduced"]):
            case "gathered":  # rows over tp are gathered, and each rank takes the sum over tp of its own
                lines += [
                    f"%r{n}: f32[{2 * rows}, 8] = _c10d_functional.all_gather_into_tensor(%{value}, 2, {_group('tp')})",
                    f"%s{n}: f32[{2 * rows}, 8] = _c10d_functional.wait_tensor(%r{n})",
                    f"%m{n}: f32[{2 * rows}, 8] = mm(%s{n}, %v{n})",
                    f"%a{n}: f32[{rows}, 8] = slice.Tensor(%m{n}, 0, 0, {rows})",
                ]
            case "scattered":
                lines += [
                    f"%c{n}: f32[{2 * rows}, 8] = cat([%{value}, %x])",
                    f"%m{n}: f32[{2 * rows}, 8] = mm(%c{n}, %v{n})",
                    f'%r{n}: f32[{rows}, 8] = _c10d_functional.reduce_scatter_tensor(%m{n}, "sum", 2, {_group("tp")})',
                    f"%a{n}: f32[{rows}, 8] = _c10d_functional.wait_tensor(%r{n})",
                ]
            case "reduced":
                lines += [
                    f"%m{n}: f32[{rows}, 8] = mm(%{value}, %v{n})",
                    f'%r{n}: f32[{rows}, 8] = _c10d_functional.all_reduce(%m{n}, "sum", {_group("tp")})',
                    f"%a{n}: f32[{rows}, 8] = _c10d_functional.wait_tensor(%r{n})",
                ]
        lines += [
            f"%sin{n}: f32[{rows}, 8] = sin(%a{n})",
            f"%p{n}: f32[8, {rows}]<1, 8> = permute(%x, [1, 0])",
            f"%d{n}: f32[8, 8] = mm(%p{n}, %sin{n})",
            f'%e{n}: f32[4, 8] = _c10d_functional.reduce_scatter_tensor(%d{n}, "sum", 2, {_group("dp")})',
            f"%f{n}: f32[4, 8] = _c10d_functional.wait_tensor(%e{n})",
        ]
        gradients.append(f'gradient("w{n}") %f{n}')
        value = random.choice([f"sin{n}", "t"])
    return parse_graph("\n".join([*lines, f"return {', '.join(gradients)}"]))[0]


def _random_prices(random: Random, late: float) -> Hardware:
    """Return a device slow enough for chunks of a few rows, with slow links; 10 ** `late` is about their latency in seconds."""
    h100 = hardware_named("h100")
    link = replace(
        h100.inside,
        bandwidth=10 ** random.uniform(3, 6),
        latency=10 ** (late + random.uniform(-1, 1)),
        setup=0.0,
        reduces=0.0,
    )
    rates = tuple((name, 10 ** random.uniform(5, 8)) for name, _ in h100.flops)
    figures = {"flops": rates, "launch": 1e-7, "tile": 1, "units": 1, "spread": 0.0, "contention": 0.0}
    return replace(h100, name=f"random {random.random()}", **figures, inside=link, across=link)


def _trained(gm: GraphModule, mesh: Mesh, seed: int) -> list[torch.Tensor]:
    """Return all weights of all ranks after ten steps."""
    generator = torch.Generator().manual_seed(seed)
    nodes = placeholders(gm.graph)
    given = [[torch.randn(tensor_of(node).shape, generator=generator) for node in nodes] for _ in range(mesh.size)]
    places = {input_of(node).name: at for at, node in enumerate(nodes) if input_of(node).role is InputRole.PARAMETER}
    for _ in range(STEPS):
        for values, results in zip(given, run_ranks(gm, mesh, given), strict=True):
            for output, gradient in zip(outputs_of(gm.graph), results, strict=True):
                at = places[output.name]
                values[at] = values[at] - RATE * gradient
    return [values[at] for values in given for at in places.values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "late", "programs"),
    [("decompose_matmuls", -6, 5), ("bucket_collectives", -2.5, 10), ("schedule_overlap", -4, 10), ("all", -5, 5)],
)
def test_ten_steps_of_random_programs_are_the_same(
    name: str, late: float, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "WORTH", -1.0)  # chunks wherever they are faster by themselves
    changed = 0
    for seed in range(programs):
        random = Random(seed)
        gm, mesh = _random_step(random), Mesh(AXES).on(_random_prices(random, late))
        other = copy_graph(gm)
        PassManager(PASSES[name], (Verifier(),)).run(other, PassContext(mesh))
        changed += [str(node) for node in gm.graph.nodes] != [str(node) for node in other.graph.nodes]
        for mine, theirs in zip(_trained(gm, mesh, seed), _trained(other, mesh, seed), strict=True):
            if name in ("bucket_collectives", "schedule_overlap"):
                assert torch.equal(mine, theirs), seed  # in the same order of addition
            else:
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert 2 * changed >= programs, "too few programs are changed to say anything"


def test_buckets_are_never_predicted_to_be_slower() -> None:
    joined = 0
    for seed in range(24):
        random = Random(seed)
        gm, mesh = _random_step(random), Mesh(AXES).on(_random_prices(random, -3))
        before = _seconds(gm, mesh)
        joined += BucketCollectives(1 << 12, ROOM).run(gm, PassContext(mesh))
        assert _seconds(gm, mesh) <= before, seed
    assert joined >= 4


def test_buckets_that_turn_out_slower_are_taken_apart() -> None:
    random = Random(24)
    gm, mesh = _random_step(random), Mesh(AXES).on(_random_prices(random, -3))
    text, ctx = str(gm.graph), PassContext(mesh)
    limit = int(1.3 * simulate(program_of_graph(gm, mesh)).peak_memory)
    assert not BucketCollectives(1 << 12, limit).run(gm, ctx)
    assert str(gm.graph) == text
    assert [str(remark) for remark in ctx.remarks] == [
        "bucket_collectives: not joined: predicted to take 0.012595 s, and 0.012601 s and 2816 of 2995 bytes in buckets "
        "[%output]"
    ]


def _seconds(gm: GraphModule, mesh: Mesh) -> float:
    return schedule(program_of_graph(gm, mesh), memory_limit=ROOM).timeline.step_time
