"""Random programs of resharded values, lowered with and without what makes their messages fewer and smaller: equal bits.

Values are small whole numbers, of which every sum is exact in every dtype, in whatever order.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule, Node

from autoshard.debug.rank_interpreter import run_ranks
from passes.base import Pass, PassContext
from passes.cancel_reshards import CancelReshards
from passes.fuse_collectives import FuseCollectives
from passes.hardware.hardware import Hardware, hardware_named
from passes.ir.graph import InputRole, input_of, layout_of, origin_of, placeholders, tensor_of, transfer_of
from passes.ir.layout import local_part
from passes.ir.mesh import Mesh
from passes.ir.text import DTYPE_NAMES, parse_graph
from passes.localize import Localize
from passes.lower_reshards import LowerReshards
from passes.manager import PassManager
from passes.observers import Verifier

AXES = "dp=2,tp=2"
PROGRAMS, DRAWS = 20, 2
FUSED: tuple[Pass, ...] = (FuseCollectives(), CancelReshards())

# What stands in a program, as its own module; {n} numbers it, {s} is how a sum is stored. %x and %y are rows over dp and
# columns over tp, %a @ %v is a sum over tp; %c @ %w one over dp; %h and %u are as %a and %v in bf16.
A = "{dp:S(0), tp:S(1)}"
SUM = "{dp:S(0), tp:P(sum)}"
SEGMENTS = {
    "two sums": [
        f"%p{{n}}: f32[8, 4] {SUM} = mm(%a, %v)",
        f"%q{{n}}: f32[8, 4] {SUM} = neg(%p{{n}})",
        f"%s{{n}}: f32[8, 4] {SUM} = mul.Tensor(%p{{n}}, 2)",
        "%i{n}: f32[8, 4] {s} = reshard(%q{n})",
        "%j{n}: f32[8, 4] {s} = reshard(%s{n})",
        "%o{n}: f32[8, 4] {s} = add.Tensor(%i{n}, %j{n})",
    ],
    "a sum in a sum": [
        f"%p{{n}}: f32[8, 4] {SUM} = mm(%a, %v)",
        f"%q{{n}}: f32[8, 4] {SUM} = mul.Tensor(%p{{n}}, 3)",
        "%z{n}: f32[8, 4] {s} = reshard(%x)",
        "%i{n}: f32[8, 4] {s} = reshard(%p{n})",
        "%k{n}: f32[8, 4] {s} = add.Tensor(%z{n}, %i{n})",
        "%j{n}: f32[8, 4] {s} = reshard(%q{n})",
        "%o{n}: f32[8, 4] {s} = add.Tensor(%k{n}, %j{n})",
    ],
    "narrowed after a gather": [
        f"%i{{n}}: f32[8, 4] {A} = sub.Tensor(%x, %y)",
        "%j{n}: f32[8, 4] {dp:S(0), tp:R} = reshard(%i{n})",
        "%o{n}: bf16[8, 4] {dp:S(0), tp:R} = prims.convert_element_type(%j{n}, bf16)",
    ],
    "narrowed after a sum": [
        f"%p{{n}}: f32[8, 4] {SUM} = mm(%a, %v)",
        "%j{n}: f32[8, 4] {dp:S(0), tp:R} = reshard(%p{n})",
        "%o{n}: bf16[8, 4] {dp:S(0), tp:R} = prims.convert_element_type(%j{n}, bf16)",
    ],
    "widened before a sum": [
        f"%p{{n}}: bf16[8, 4] {SUM} = mm(%h, %u)",
        f"%i{{n}}: f32[8, 4] {SUM} = prims.convert_element_type(%p{{n}}, f32)",
        "%o{n}: f32[8, 4] {s} = reshard(%i{n})",
    ],
    "widened before a gather": [
        f"%i{{n}}: f32[8, 4] {A} = prims.convert_element_type(%h, f32)",
        "%o{n}: f32[8, 4] {dp:S(0), tp:R} = reshard(%i{n})",
    ],
    "sums over two axes": [  # not one
        f"%p{{n}}: f32[8, 4] {SUM} = mm(%a, %v)",
        "%q{n}: f32[8, 4] {dp:P(sum), tp:S(1)} = mm(%c, %w)",
        f"%i{{n}}: f32[8, 4] {A} = reshard(%p{{n}})",
        f"%j{{n}}: f32[8, 4] {A} = reshard(%q{{n}})",
        f"%o{{n}}: f32[8, 4] {A} = add.Tensor(%i{{n}}, %j{{n}})",
    ],
    "narrowed, and wide": [  # stays wide
        f"%p{{n}}: f32[8, 4] {A} = exp(%x)",
        "%i{n}: f32[8, 4] {dp:S(0), tp:R} = reshard(%p{n})",
        "%j{n}: bf16[8, 4] {dp:S(0), tp:R} = prims.convert_element_type(%i{n}, bf16)",
        "%k{n}: f32[8, 4] {dp:S(0), tp:R} = prims.convert_element_type(%j{n}, f32)",
        "%o{n}: f32[8, 4] {dp:S(0), tp:R} = sub.Tensor(%i{n}, %k{n})",
    ],
    "a part of a sum": [
        f"%p{{n}}: f32[8, 4] {SUM} = mm(%a, %v)",
        "%i{n}: f32[8, 4] {dp:S(0), tp:R} = reshard(%p{n})",
        "%j{n}: f32[8, 4] {dp:S(0), tp:R} = relu(%i{n})",
        f"%o{{n}}: f32[8, 4] {A} = reshard(%j{{n}})",
    ],
    "equal gathers": [
        f"%p{{n}}: f32[8, 4] {A} = add.Tensor(%x, %y)",
        "%i{n}: f32[8, 4] {dp:S(0), tp:R} = reshard(%p{n})",
        "%j{n}: f32[8, 4] {dp:S(0), tp:R} = reshard(%p{n})",
        "%k{n}: f32[8, 4] {dp:S(0), tp:R} = neg(%j{n})",
        "%o{n}: f32[8, 4] {dp:S(0), tp:R} = mul.Tensor(%i{n}, %k{n})",
    ],
    "a gather after another": [
        f"%p{{n}}: f32[8, 4] {A} = relu(%y)",
        "%i{n}: f32[8, 4] {dp:S(0), tp:R} = reshard(%p{n})",
        "%o{n}: f32[8, 4] {dp:R, tp:R} = reshard(%i{n})",
    ],
    "a gather for nobody": [
        f"%o{{n}}: f32[8, 4] {A} = neg(%y)",
        "%i{n}: f32[8, 4] {dp:R, tp:S(1)} = reshard(%o{n})",
    ],
}
INPUTS = f"""
mesh {AXES}
stage EXPLICIT
%x: f32[8, 4] {A} = input("x")
%y: f32[8, 4] {A} = input("y")
%a: f32[8, 4] {A} = input("a")
%v: f32[4, 4] {{dp:R, tp:S(0)}} = input("v")
%c: f32[8, 4] {{dp:S(1), tp:R}} = input("c")
%w: f32[4, 4] {{dp:S(0), tp:S(1)}} = input("w")
%h: bf16[8, 4] {A} = input("h")
%u: bf16[4, 4] {{dp:R, tp:S(0)}} = input("u")
"""


_RESULT = re.compile(r"%(o\d+): (f32)\[8, 4\] (\{.*?\}) =")


def _random_program(random: Random) -> str:
    """Return some of the segments; here and there what an earlier one gave is added, wherever that is stored."""
    names, lines, results = random.sample(list(SEGMENTS), random.randint(4, 7)), INPUTS.strip().splitlines(), list[str]()
    before: re.Match[str] | None = None
    for n, name in enumerate(names):
        origin = f"      # model.py:{n + 1} {name.replace(' ', '_')}"
        stored = random.choice(["{dp:S(0), tp:R}", A])
        segment = [line.replace("{n}", str(n)).replace("{s}", stored) for line in SEGMENTS[name]]
        lines += [line + origin for line in segment]
        found = next((match for line in segment if (match := _RESULT.match(line))), None)
        if before is not None and found is not None and random.random() < 0.5:
            layout, value = found[3], before[1]
            if before[3] != layout:
                lines.append(f"%moved{n}: f32[8, 4] {layout} = reshard(%{value})")
                value = f"moved{n}"
            lines.append(f"%total{n}: f32[8, 4] {layout} = add.Tensor(%{found[1]}, %{value})")
            results.append(f"total{n}")
        else:
            results.append(f"o{n}")
        before = found
    returned = ", ".join(f'output("{n}") %{result}' for n, result in enumerate(results))
    return "\n".join([*lines, f"return {returned}"])


def _lowered(text: str, first: tuple[Pass, ...], mesh: Mesh) -> GraphModule:
    gm = parse_graph(text)[0]
    PassManager((*first, LowerReshards(), Localize()), (Verifier(),)).run(gm, PassContext(mesh))
    return gm


def _messages(gm: GraphModule) -> dict[str, list[str]]:
    """Return what is sent, by segment: "all_gather tp bf16"."""
    found: dict[str, list[str]] = {}
    for node in gm.graph.nodes:
        if (transfer := transfer_of(node)) is not None:
            what = f"{transfer.kind} {'.'.join(transfer.axes)} {DTYPE_NAMES[tensor_of(node).dtype]}"
            found.setdefault(origin_of(node).fqn.replace("_", " "), []).append(what)
    return found


def _changes(before: dict[str, list[str]], after: dict[str, list[str]]) -> list[str]:
    """Return the segments that send something else, and what: "equal gathers: all_gather tp f32, ... -> ..."."""
    ends = ((name, before[name], after.get(name, [])) for name in before)
    return [f"{name}: {', '.join(old)} -> {', '.join(new) or 'nothing'}" for name, old, new in ends if old != new]


def _drawn(gm: GraphModule, mesh: Mesh, generator: torch.Generator) -> list[list[torch.Tensor]]:
    """Return small whole numbers for each rank of what it is given, and its place on the axes."""
    whole = {
        node.name: torch.randint(-1, 2, shape, generator=generator)
        for node, shape in ((node, _SHAPES[input_of(node).name]) for node in placeholders(gm.graph) if _is_given(node))
    }
    return [
        [
            local_part(whole[node.name].to(tensor_of(node).dtype), layout_of(node), mesh, at)
            if _is_given(node)
            else torch.tensor([at[mesh.index(input_of(node).name)]])
            for node in placeholders(gm.graph)
        ]
        for at in mesh.coordinates()
    ]


_SHAPES = dict.fromkeys("vwu", (4, 4)) | dict.fromkeys("xyach", (8, 4))


def _is_given(node: Node) -> bool:
    return input_of(node).role is InputRole.INPUT


def _hardware(random: Random) -> Hardware:
    """Return links on which the bytes are what costs, or the messages."""
    h100 = hardware_named("h100")
    link = replace(h100.inside, bandwidth=1e3, latency=random.choice([1e-9, 1.0]), setup=0.0, reduces=0.0)
    return replace(h100, name=f"random {random.random()}", inside=link, across=link)


@pytest.mark.slow
def test_random_programs_have_the_same_bits_and_every_rewrite_is_among_them() -> None:
    hit = Counter[str]()
    for seed in range(PROGRAMS):
        random = Random(seed)
        text, mesh = _random_program(random), Mesh(AXES).on(_hardware(random))
        plain, fused = _lowered(text, (), mesh), _lowered(text, FUSED, mesh)
        hit.update(_changes(_messages(plain), _messages(fused)))
        generator = torch.Generator().manual_seed(seed)
        for _ in range(DRAWS):
            state = generator.get_state()
            mine = run_ranks(plain, mesh, _drawn(plain, mesh, generator))
            generator.set_state(state)
            theirs = run_ranks(fused, mesh, _drawn(fused, mesh, generator))
            for one, other in zip(mine, theirs, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), seed
    assert_expected_inline("\n".join(sorted(hit)), """\
a gather after another: all_gather tp f32, all_gather dp f32 -> all_gather dp.tp f32
a gather for nobody: all_gather dp f32 -> nothing
a part of a sum: all_reduce tp f32 -> reduce_scatter tp f32
a sum in a sum: all_reduce tp f32, all_gather tp f32, all_reduce tp f32 -> all_reduce tp f32, all_gather tp f32
a sum in a sum: reduce_scatter tp f32, reduce_scatter tp f32 -> reduce_scatter tp f32
equal gathers: all_gather tp f32, all_gather tp f32 -> all_gather tp f32
narrowed after a gather: all_gather tp f32 -> all_gather tp bf16
narrowed after a sum: all_reduce tp f32 -> reduce_scatter tp f32, all_gather tp bf16
two sums: all_reduce tp f32, all_reduce tp f32 -> all_reduce tp f32
two sums: reduce_scatter tp f32, reduce_scatter tp f32 -> reduce_scatter tp f32
widened before a gather: all_gather tp f32 -> all_gather tp bf16
widened before a sum: all_reduce tp f32 -> all_reduce tp bf16
widened before a sum: reduce_scatter tp f32 -> reduce_scatter tp bf16""")
    assert min(hit.values()) >= 2
