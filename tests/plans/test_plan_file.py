"""A plan is written as JSON and read back equal; a damaged file is refused with the part that is damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from autoshard import Mesh, Options, Overlap, PlanError, ShardingPlan, plan
from autoshard.config.settings import options_of, settings_of
from autoshard.plans.outcome import Candidate, Cost, Memory, Search
from autoshard.plans.plan_file import SCHEMA, VERSION, write_text
from passes.base import Remark
from passes.ir.graph import Origin
from tests.models import build

COST = Cost(0.1, 0.08, 0.03, 0.02, Memory(parameters=10, gradients=20, activations=1 << 34))
TRIED = (Candidate("solved", COST, True), Candidate("hsdp", None, False, "it needs two axes"))


@cache
def made(mesh: str = "dp=2,tp=2") -> ShardingPlan:
    case = build("mlp")
    options = Options(recipe="auto", params={"layers.0.weight": {"tp": Shard(0)}})
    bare = plan(case.model, Mesh(mesh, hardware="h100"), case.args, case.kwargs, options=options)
    remarks = (*bare.remarks, Remark("propagate", 'said "no"\n', Origin("a.b", "é.py", 3, "x = 1"), "mm"))
    return replace(bare, cost=COST, search=Search("solved", TRIED, 80 * 10**9, 0.1, 0.099, 0.08, 2.5), remarks=remarks)


@pytest.mark.slow
def test_a_plan_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made().save(path)
    read = ShardingPlan.load(path)
    assert read == made()
    assert read.to_json() == made().to_json() == path.read_text()
    assert list(read.parameters) == list(made().parameters)
    assert read.mesh.hardware == made().mesh.hardware is not None


def test_a_plan_file_is_json_with_a_schema_and_a_line_per_decision() -> None:
    text = made().to_json()
    data = json.loads(text)
    assert (data["schema"], data["version"]) == (SCHEMA, VERSION)
    assert data["mesh"]["axes"] == "dp=2,tp=2"
    assert data["cost"]["memory"]["activations"] == 1 << 34
    (line,) = (line for line in text.splitlines() if line.startswith('  "layers.0.weight"'))
    assert json.loads(f"{{{line.rstrip(',')}}}")["layers.0.weight"]["layout"] == "R S(0)"


def test_a_mesh_with_other_ranks_reads_back_equal() -> None:
    moved = replace(made(), mesh=Mesh("dp=2,tp=2", ranks=(4, 5, 6, 7)))
    assert ShardingPlan.from_json(moved.to_json()) == moved


def test_a_fingerprint_is_of_what_a_plan_is_for_and_not_of_what_it_decides() -> None:
    first = made()
    same = replace(first, layouts={}, collectives=(), cost=None, search=None, mesh=Mesh("dp=2,tp=2"))
    others = [
        replace(first, mesh=Mesh("dp=4,tp=2")),
        replace(first, parameters=dict(list(first.parameters.items())[1:])),
        replace(first, settings=replace(first.settings, training=False)),
        replace(first, graphs={"CAPTURED": first.graph("captured").replace("relu", "sigmoid")}),
    ]
    assert same.fingerprint == first.fingerprint
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_a_fingerprint_does_not_change_when_a_line_moves() -> None:
    moved = made().graph("captured").replace("models.py:", "models.py:1")
    assert moved != made().graph("captured")
    assert replace(made(), graphs={"CAPTURED": moved}).fingerprint == made().fingerprint


@pytest.mark.parametrize(
    "options",
    [
        Options(recipe={"dp": "fsdp", "tp": None}, overlap=Overlap(bucket_bytes=0), loss="sum"),
        Options(mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
        Options(recipe=None, inputs={"x": {"dp": "S(0)"}}, reshard_after_forward=False),
    ],
    ids=("recipe", "precision", "inputs"),
)
def test_settings_say_the_options_again(options: Options) -> None:
    assert options_of(settings_of(options, training=True, device="cpu")) == options


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("before")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autoshard.plans.plan_file.os.replace", fail)
    assert message(made().save, path) == (
        f"the plan cannot be written to {path}: No space left on device; give a path that can be"
    )
    assert [(file, file.read_text()) for file in tmp_path.iterdir()] == [(path, "before")]


def test_what_a_link_leads_to_is_written(tmp_path: Path) -> None:
    path, link = tmp_path / "plan.json", tmp_path / "latest.json"
    link.symlink_to(path)
    for _ in range(2):  # once where the file is not there yet
        made().save(link)
        assert link.is_symlink()
        assert ShardingPlan.load(path) == made()


def test_a_pipe_is_written_into_and_stays(tmp_path: Path) -> None:
    """So is a device: a user who may write to its folder would lose `/dev/null` otherwise."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    try:
        write_text(pipe, "a plan")
        assert pipe.is_fifo()
        assert os.read(reader, 100) == b"a plan"
    finally:
        os.close(reader)


def message(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(PlanError) as caught:
        function(*args)
    return str(caught.value)


AGAIN = "make the plan again with `python -m autoshard plan ...` or plan(...).save(path)"


def changed(*path: Any, to: Any = None) -> str:
    """Return the text of a plan with one member changed, or removed."""
    data = json.loads(made().to_json())
    *outer, last = path
    inner = data
    for name in outer:
        inner = inner[name]
    if to is None:
        del inner[last]
    else:
        inner[last] = to
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "to", "expected"),
    [
        (("schema",), "html", "it is JSON, but not a plan: its schema is not 'autoshard.plan'"),
        (("version",), VERSION + 1, f"it has version {VERSION + 1} of the format, and this autoshard reads {VERSION}"),
        (("cost", "memory", "inputs"), None, "cost.memory.inputs is missing"),
        (("cost", "step_time"), "fast", "cost.step_time is 'fast', not a number"),
        (("collectives", 0, "axes"), "dp", "collectives[0].axes is 'dp', not a list"),
        (("collectives", 0, "backward"), 1, "collectives[0].backward is 1, not true or false"),
        (("collectives", 0, "bytes"), 1.5, "collectives[0].bytes is 1.5, not a whole number"),
        (("layouts", "mm"), "S(0) Q", "layouts.mm is 'S(0) Q', not a layout such as 'S(0) R'"),
        (("layouts", "mm"), "R", "layouts.mm has 1 placements for a mesh of 2 axes"),
        (("recipes",), [], "recipes has 0 entries for a mesh of 2 axes"),
        (("mesh", "axes"), "dp", "mesh: cannot read 'dp' in mesh 'dp'; write it as 'dp=2,tp=4'"),
        (("parameters",), [1], "parameters is [1], not an object"),
        (("remarks", 0, "spare"), "x", "remarks[0].spare is not known"),
        (("graphs", "LOCAL"), "!", "graphs cannot be unpacked (Only base64 data is allowed)"),
        (("graphs",), None, "graphs is None, not an object"),
        (("timeline",), "!", "timeline cannot be unpacked (Only base64 data is allowed)"),
        (("timeline",), 3, "timeline is 3, not text"),
        (
            ("mesh", "axes"),
            "dp=4,tp=2",
            "its mesh, settings, names or shapes are not those that it was saved with (the fingerprint differs)",
        ),
        (("cost", "step_time"), 1e-9, "it is not what was saved, and a plan cannot be edited (the checksum differs)"),
        (("layouts", "mm"), "S(1) R", "it is not what was saved, and a plan cannot be edited (the checksum differs)"),
        (("checksum",), None, "it is not what was saved, and a plan cannot be edited (the checksum differs)"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else None,
)
def test_a_damaged_file_is_refused(path: Any, to: Any, expected: str) -> None:
    assert message(ShardingPlan.from_json, changed(*path, to=to)) == f"the plan cannot be read: {expected}; {AGAIN}"


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(made().to_json()[:400])
    text = message(ShardingPlan.load, path)
    assert text.startswith(f"the plan {path} cannot be read: it is not JSON, or was cut off (line ")
    assert text.endswith(f"; {AGAIN}")


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert message(ShardingPlan.load, path) == (
        f"the plan {path} cannot be read: No such file or directory; give the path that it was saved to"
    )
    assert message(ShardingPlan.load, "") == "the plan has no path, but an empty text; give the path that it was saved to"
    path.write_bytes(b"\x80\x81\xff")
    assert message(ShardingPlan.load, path) == f"{path} cannot be read: it is no text, so not a plan; {AGAIN}"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none" / "plan.json"
    assert message(made().save, path) == (
        f"the plan cannot be written to {path}: No such file or directory; give a path that can be"
    )
