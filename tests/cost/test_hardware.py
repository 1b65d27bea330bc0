"""What machines are known, how a file of figures reads back, and which ranks of a mesh share a node."""

from __future__ import annotations

import pickle
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import Mesh, Options, UserError
from passes.hardware.hardware import Group, Hardware, Link, hardware_named, preset_names

PRESETS = ("a100", "a100-pcie", "b200", "cpu", "gb200", "h100", "h100-500w", "h200")
LINKS = ("inside", "across")
FIGURES = {field.name for field in fields(Hardware)} - {"name", "sources", *LINKS}
FIGURES |= {f"{link}.{field.name}" for link in LINKS for field in fields(Link) if field.name != "name"}


def test_the_presets_that_there_are() -> None:
    assert preset_names() == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_every_figure_of_a_preset_has_a_source(name: str) -> None:
    sources = dict(hardware_named(name).sources)
    assert set(sources) == FIGURES and all(sources.values())


def test_a_preset_says_what_is_assumed() -> None:
    assert set(hardware_named("h100").assumed) == {"launch", "link_contention", "across.reduces"}
    assert "attention" in hardware_named("h100-500w").assumed


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_reads_back_from_json(name: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(hardware_named(name).to_json())
    assert hardware_named(str(path)) == hardware_named(name)


def test_published_figures() -> None:
    h100, a100 = hardware_named("H100"), hardware_named("a100")
    assert h100.rate("bf16") == 989e12 and h100.rate("f8e4m3fn") == 1979e12
    assert h100.rate("f32") < h100.rate("tf32"), "f32 is f32: torch multiplies in tf32 only where it is told to"
    assert h100.inside.bandwidth == 450e9, "900 GB/s is both directions"
    assert a100.memory_bytes == 80e9 and a100.rate("bf16") == 312e12
    assert hardware_named("b200").memory_bytes == 180e9, "180 to 192 GB: the lower"
    assert hardware_named("a100-pcie").inside.bandwidth == 24e9
    assert hardware_named("gb200").node_size == 72
    assert h100.rate("i64") == h100.rate("f32")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "h1000",
            "unknown hardware 'h1000' (did you mean 'h100'?); choose one of a100, a100-pcie, b200, cpu, gb200, h100, "
            "h100-500w, h200, or give the path of a .json that `python -m autoshard calibrate` wrote",
        ),
        ("no/such.json", "hardware='no/such.json': there is no such file; calibrate writes one"),
    ],
)
def test_unknown_hardware(given: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        Mesh("dp=2", hardware=given)
    assert str(caught.value) == message
    with pytest.raises(UserError) as caught:
        Options(hardware=given)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("mesh", "hardware", "axes", "group"),
    [
        ("dp=100,tp=8", "h100", ("tp",), Group(8, 1, 8)),
        ("dp=100,tp=8", "h100", ("dp",), Group(100, 100, 1)),
        ("dp=100,tp=8", "h100", ("dp", "tp"), Group(800, 100, 8)),
        ("a=2,b=2,c=4", "h100", ("a", "c"), Group(8, 2, 4)),
        ("a=2,b=2,c=4", "h100", ("c", "a"), Group(8, 2, 4)),
        ("a=3,b=6", "h100", ("b",), Group(6, 2, 2)),
        ("a=8", "h100", (), Group(1, 1, 1)),
        ("dp=9,tp=8", "gb200", ("dp",), Group(9, 1, 9)),
        ("dp=100,tp=8", None, ("dp",), Group(100, 1, 100)),
    ],
)
def test_the_nodes_of_a_group(mesh: str, hardware: str | None, axes: tuple[str, ...], group: Group) -> None:
    assert Mesh(mesh, hardware=hardware).group_shape(axes) == group


def test_the_nodes_of_ranks_that_are_given() -> None:
    ranks = (0, 8, 16, 24, 1, 9, 17, 25)  # the last axis runs over nodes
    assert Mesh("a=2,b=4", ranks=ranks, hardware="h100").group_shape(("a",)) == Group(2, 1, 2)
    assert Mesh("a=2,b=4", ranks=ranks, hardware="h100").group_shape(("b",)) == Group(4, 4, 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.sampled_from([2, 3, 8]), st.data())
def test_the_worst_group_is_reported(sizes: list[int], node_size: int, data: st.DataObject) -> None:
    names = "abc"[: len(sizes)]
    axes = tuple(data.draw(st.sets(st.sampled_from(names))))
    machine = replace(hardware_named("h100"), node_size=node_size)
    mesh = Mesh(tuple(names), tuple(sizes), hardware=machine)
    shapes = []
    for group in mesh.groups(axes):
        nodes = [mesh.ranks[place] // node_size for place in group]
        shapes.append((len(set(nodes)), -min(map(nodes.count, nodes))))
    spread, fewest = max(shapes)
    assert mesh.group_shape(axes) == Group(len(mesh.groups(axes)[0]), spread, -fewest)


def test_the_machine_is_part_of_a_mesh_but_not_of_its_names() -> None:
    mesh, other, bare = Mesh("dp=4", hardware="h100"), Mesh("dp=4", hardware="a100"), Mesh("dp=4")
    assert mesh == Mesh("dp=4", hardware=hardware_named("h100")) and mesh != other and mesh != bare
    assert len({mesh, other, bare, Mesh("dp=4", hardware="h100")}) == 3
    assert str(mesh) == str(bare) and mesh.group_name(("dp",)) == bare.group_name(("dp",))
    mesh.group_shape(("dp",))
    assert pickle.loads(pickle.dumps(mesh)) == mesh


def test_thousands_of_ranks_take_no_time() -> None:
    start = time.process_time()
    mesh = Mesh("dp=256,tp=8", hardware="h100")
    for _ in range(10_000):
        mesh.group_shape(("dp",))
    assert time.process_time() - start < 5
