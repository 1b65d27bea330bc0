"""A dump says what each pass did, reads back, and runs again; a wrong pass is found by its numbers."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import GraphModule

import tests.debug.test_checking
from autoshard import Dump, Options, Overlap, UserError, autoshard, plan
from autoshard.cli.main import main
from autoshard.debug.bisection import bisect
from autoshard.debug.replay import replay
from autoshard.dumps import graph_dump
from autoshard.phases import Phases, default_passes, inserted
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from passes import observers
from passes.base import Pass, PassContext
from passes.cancel_reshards import CancelReshards
from passes.errors import VerifyError
from passes.ir.graph import Stage
from passes.ir.mesh import Mesh
from passes.seed import Seed
from passes.solve import Solve


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).sum()


OPTIONS = Options(  # of what a graph's text does not say: recipes, a constraint, dtypes, a policy for ops, what is kept
    recipe="fsdp+megatron",
    params={"down.weight": {"dp": "R"}},
    mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    unknown_ops="error",
    recompute="block",
)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    make_plan(PlanRequest(Model(), (torch.randn(4, 6),), {}, Mesh("dp=2,tp=2"), replace(OPTIONS, dump=folder)))
    return folder


def unnamed(text: str) -> str:
    """Return the text with names in order of appearance: a graph that was read does not remember names that were given up."""
    names: dict[str, str] = {}
    return re.sub(r"%\w+", lambda match: names.setdefault(match[0], f"%{len(names)}"), text)


def replayed_as_it_was(files: list[Path], folder: Path) -> None:
    """Check that each file, run again, gives all those after it, headers included."""
    for path in files:
        place = folder / path.stem
        place.mkdir()
        replayed = replay(path, folder=place)
        later = [one for one in files if one.name > path.name]
        assert [one.name for one in sorted(place.iterdir())] == [one.name for one in later]
        for one in later:
            assert unnamed((place / one.name).read_text()) == unnamed(one.read_text()), f"{path.name} -> {one.name}"
        if later:
            assert unnamed(later[-1].read_text()).endswith(unnamed(replayed.text))


def test_every_dump_runs_again_to_the_same_graphs(dump: Path, tmp_path: Path) -> None:
    files = sorted(dump.iterdir())
    assert files[0].name == "00_capture.txt" and files[-1].name == "12_rematerialize.txt" and len(files) == 10
    replayed_as_it_was(files, tmp_path)
    header = files[0].read_text().partition("mesh ")[0]
    assert_expected_inline(header, """\
# unknown_ops error
# pass normalize {"parts": 2}
# pass pad {"parts": 2}
# pass seed {"recipes": ["fsdp", "megatron"], "params": [{"name": "down.weight", "axis": "dp", "placement": "R"}]}
# pass cast_parameters {"stored": [["up.weight", "f32"], ["down.weight", "f32"]], "inputs": [["x", "f32"]], "reduce": "f32"}
# pass propagate
# pass insert_reshards
# pass fuse_collectives
# pass cancel_reshards
# pass lower_reshards
# pass localize
# pass decompose
# pass rematerialize {"kept": []}
""")


def test_a_dump_of_a_search_runs_again_from_after_the_search(tmp_path: Path) -> None:
    options = Options(passes=Phases(choose=Solve()).passes, dump=tmp_path / "dump", recompute="block")
    make_plan(PlanRequest(Model(), (torch.randn(4, 6),), {}, Mesh("dp=2,tp=2", hardware="h100"), options))
    files = sorted((tmp_path / "dump").iterdir())
    first = next(place for place, path in enumerate(files) if path.name == "05_solve.txt")
    replayed_as_it_was(files[first:], tmp_path)
    with pytest.raises(UserError, match="'seed' is not enough to run solve: what the user set, what a search found"):
        replay(files[first - 1])
    assert replay(files[first - 1], recipe="fsdp+megatron").ran[1] == "propagate"


def test_replay_on_the_command_line(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dump / "06_insert_reshards.txt"
    assert main(["replay", str(path), "--after", "insert_reshards"]) == 0
    out = capsys.readouterr().out
    passes = "fuse_collectives, cancel_reshards, lower_reshards, localize, decompose, rematerialize"
    assert out.startswith("mesh dp=2,tp=2\nstage LOCAL\n") and out.endswith(f"# ran {passes}\n")


def test_a_graph_before_the_seeds_is_placed_by_a_recipe(dump: Path) -> None:
    found = replay(dump / "01_normalize.txt", recipe="fsdp+megatron")
    pinned = 'pinned(tp:S(1) "megatron: row-parallel", dp:S(0) "fsdp: stored sharded") = parameter("down.weight")'
    assert pinned in found.text and pinned not in max(dump.iterdir()).read_text()


def test_a_padded_batch_is_padded_for_another_recipe(tmp_path: Path) -> None:
    options = Options(recipe="fsdp", dump=tmp_path / "dump")
    plan(Model(), Mesh("dp=2", hardware="h100"), (torch.randn(3, 6),), options=options)
    (tmp_path / "ddp").mkdir()
    replay(tmp_path / "dump" / "00_capture.txt", recipe="ddp", folder=tmp_path / "ddp")
    text = (tmp_path / "ddp" / "03_seed.txt").read_text()
    assert '%x: f32[3, 6] pinned(dp:R "options") = input("x")' in text and 'pinned(dp:S(0) "padded batch")' in text


def test_a_plan_is_dumped_as_well(dump: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, dump=tmp_path, overlap=Overlap(bucket_bytes=0))
    made = plan(Model(), Mesh("dp=2,tp=2", hardware="h100"), (torch.randn(4, 6),), options=options)
    made.replan(recipe="ddp")  # is not dumped over it
    for path in sorted(tmp_path.iterdir())[1:]:
        assert unnamed(path.read_text()) == unnamed((dump / path.name).read_text()), path.name
    assert (tmp_path / "10_localize.txt").exists()
    made.replan(recipe="ddp", dump=tmp_path / "other")
    assert "ddp" in (tmp_path / "other" / "03_seed.txt").read_text()


def test_a_structured_trace_has_the_graphs_without_a_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(observers, "trace_artifact", lambda name, text: said.append(name))
    monkeypatch.setattr(graph_dump, "is_traced", lambda: True)
    plan(Model(), Mesh("dp=2", hardware="h100"), (torch.randn(4, 6),), options=Options(recipe="fsdp"))
    assert said[0] == "autoshard_00_capture" and "autoshard_10_localize" in said


def test_what_cannot_be_replayed(dump: Path, tmp_path: Path) -> None:
    (tmp_path / "graph.txt").touch()
    captured = (dump / "01_normalize.txt").read_text()
    (tmp_path / "01_normalize.txt").write_text(captured[captured.index("mesh ") :])
    (tmp_path / "03_seed.txt").write_text('# pass seed {"recipes": }\n')
    (tmp_path / "04_cast_parameters.txt").write_text('# pass cast_parameters {"reduce": "f31"}\n')
    for path, after, expected in (
        (
            tmp_path / "01_normalize.txt",
            None,
            "the graph after 'normalize' is not enough to run seed and cast_parameters: what the user set, what a search "
            "found and passes of your own are not in the file; give a recipe to place it by, replay a later dump, or plan "
            "the model again",
        ),
        (
            tmp_path / "03_seed.txt",
            None,
            "the dump's line '# pass seed {\"recipes\": }' cannot be read: Expecting value; replay a file as it was written",
        ),
        (tmp_path / "04_cast_parameters.txt", None, "cast_parameters.reduce is 'f31', not a dtype such as 'bf16'"),
        (
            tmp_path / "graph.txt",
            None,
            "graph.txt is not named after a pass, as 06_insert_reshards.txt is; name the pass that wrote it: --after PASS",
        ),
        (
            dump / "06_insert_reshards.txt",
            "insert",
            "there is no pass 'insert'; passes are normalize, pad, seed, cast_parameters, propagate, insert_reshards, "
            "fuse_collectives, cancel_reshards, lower_reshards, localize, decompose, rematerialize",
        ),
        (dump / "06_insert_reshards.txt", "lower_reshards", "pass 'localize' takes a graph that is COLLECTIVE, but at the"),
    ):
        with pytest.raises(UserError) as caught:
            replay(path, after=after)
        assert str(caught.value).startswith(expected)
    taken = tmp_path / "graph.txt"
    with pytest.raises(UserError) as caught:
        replay(dump / "06_insert_reshards.txt", folder=taken)
    assert str(caught.value) == f"the graph cannot be written to {taken}: File exists; give a folder"


def test_an_edited_graph_that_is_not_valid_is_the_users_fault(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited, text = tmp_path / "06_insert_reshards.txt", (dump / "06_insert_reshards.txt").read_text()
    edited.write_text(text.replace("tp:S(1)", "tp:S(7)"))
    assert main(["replay", str(edited)]) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith(f"autoshard: {edited} has no valid graph; correct it: at stage EXPLICIT, %down_weight is not valid: ")
    assert "tp:S(7)" in first and first.endswith(" does not split f32[4, 8]") and not any("Traceback" in line for line in rest)


def test_a_graph_that_our_pass_breaks_is_not_the_users_fault(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(self: object, gm: GraphModule, ctx: PassContext) -> bool:
        gm.graph.output_node().args = ((),)
        return True

    monkeypatch.setattr(CancelReshards, "run", spoil)
    with pytest.raises(VerifyError, match="after pass 'cancel_reshards'"):
        replay(dump / "06_insert_reshards.txt")


def test_a_recipe_for_a_graph_that_is_placed(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(dump / "06_insert_reshards.txt"), "--recipe", "ddp"]) == 2
    assert capsys.readouterr().err == (
        "autoshard: --recipe ddp: the graph after 'insert_reshards' is placed already, and no pass after it reads a recipe; "
        "leave it out, or replay a dump from before the values were placed, such as 00_capture.txt\n"
    )


def test_differences_and_a_folder_per_rank(one_rank: DeviceMesh, tmp_path: Path) -> None:
    options = Options(recipe="fsdp", dump=Dump(tmp_path, mode="diff", ranks="all"), compile="eager")
    autoshard(Model(), one_rank, (torch.randn(4, 6),), options=options)
    folder = tmp_path / "rank0"
    assert (folder / "05_propagate.txt").read_text().startswith("@@ -1,22 +1,22 @@\n mesh dp=1\n-stage CAPTURED\n")
    assert "relu" in (folder / "compiled_forward.txt").read_text()
    assert "mm" in (folder / "compiled_backward.txt").read_text()


def test_the_environment_asks_for_a_dump(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOSHARD_DUMP", str(tmp_path))
    monkeypatch.setenv("AUTOSHARD_DUMP_MODE", "diff")
    make_plan(PlanRequest(Model(), (torch.randn(4, 6),), {}, Mesh("dp=2"), Options(recipe="fsdp")))
    assert (tmp_path / "03_seed.txt").read_text().startswith("@@ ")
    monkeypatch.setenv("AUTOSHARD_DUMP_MODE", "some")
    with pytest.raises(UserError, match=r"Dump\(mode='some'\): choose 'full' or 'diff'"):
        make_plan(PlanRequest(Model(), (torch.randn(4, 6),), {}, Mesh("dp=2"), Options(recipe="fsdp")))


def test_the_log_tells_of_passes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="autoshard"):
        make_plan(PlanRequest(Model(), (torch.randn(4, 6),), {}, Mesh("dp=2"), Options(recipe="fsdp")))
    told = [record.getMessage() for record in caplog.records if record.name == "autoshard.passes"]
    assert [text.partition(":")[0] for text in told] == [one.name for one in default_passes()]
    assert next(text for text in told if text.startswith("seed")).endswith(": +2 reshard")


@dataclass(frozen=True)
class Negates(Pass):
    """A wrong pass: relu becomes another op."""

    name: ClassVar[str] = "negates"
    takes: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage] = Stage.CAPTURED

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        node = next(one for one in gm.graph.nodes if str(one.target) == "aten.relu.default")
        node.target = torch.ops.aten.neg.default
        return True


def test_bisect_finds_the_pass_that_changes_the_numbers() -> None:
    wrong = inserted(Phases(Seed(("fsdp", "megatron"))).passes, Negates(), before="seed")
    torch.manual_seed(0)
    found = bisect(Model(), "dp=2,tp=2", (torch.randn(4, 6),), options=Options(passes=wrong))
    assert not found and found.first is not None and found.first.pass_name == "negates"
    assert_expected_inline(str(found), """\
right after capture, normalize; wrong after negates:
  output output is off by 1.2e-01
  gradient up.weight is off by 1.8e+00
  gradient down.weight is off by 1.2e+00""")


def test_bisect_blames_a_rule_where_the_passes_are_right() -> None:
    model, x = tests.debug.test_checking.made()
    found = bisect(model, "tp=2", (x,), options=Options(recipe="megatron"))
    assert found.first is not None and found.first.pass_name == "localize"
    assert "the rule of autoshard_test.centred on tp: S(1) -> S(1)" in str(found)


@pytest.mark.parametrize(("recipe", "code", "told"), [("megatron", 1, "not equal on 2"), ("ddp", 0, "equal on 2")])
def test_check_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, code: int, told: str
) -> None:
    """A rule of the model's op is wrong where `tp` splits its columns."""
    (tmp_path / "model.py").write_text(
        "from tests.debug.test_checking import made\ndef make():\n    model, x = made()\n    return model, (x,)\n"
    )
    assert main(["check", f"{tmp_path}/model.py:make", "--mesh", "tp=2", "--recipe", recipe]) == code
    assert capsys.readouterr().out.startswith(told)


def test_bisect_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\ndef make():\n    torch.manual_seed(0)\n    return torch.nn.Linear(4, 6), (torch.ones(8, 4),)\n"
    )
    assert main(["bisect", f"{tmp_path}/model.py:make", "--mesh", "dp=2", "--recipe", "fsdp"]) == 0
    assert_expected_inline(capsys.readouterr().out.replace(", ", "\n"), """\
the numbers are right after each of capture
normalize
seed
propagate
insert_reshards
cancel_reshards
lower_reshards
localize
partition
bucket_collectives (forward)
schedule_overlap (forward)
bucket_collectives (backward)
schedule_overlap (backward)
""")
