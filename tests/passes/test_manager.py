"""Pipelines run in order, hold passes to their stages, and say where one failed; observers see every pass."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from passes.base import Observer, Pass, PassContext, Remark
from passes.errors import ConstraintError, PassError, UserError, VerifyError
from passes.ir.graph import Origin, Stage, set_layouts, set_needs, set_origin, stage_of
from passes.ir.layout import replicated
from passes.ir.mesh import Mesh
from passes.ir.text import parse_graph
from passes.manager import PassManager
from passes.observers import Dumper, OpDiff, Timer, Verifier

TEXT = """
mesh tp=2
stage CAPTURED
%x: f32[4] = input("x")
%relu: f32[4] = relu(%x)
%relu_1: f32[4] = relu(%relu)
return output("output") %relu_1
"""


@dataclass(frozen=True)
class Sigmoid(Pass):
    """relu -> sigmoid, the first one."""

    name: ClassVar[str] = "sigmoid"
    takes: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage] = Stage.CAPTURED

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        for node in gm.graph.nodes:
            if node.target is torch.ops.aten.relu.default:
                ctx.remark(self, node, "smoother")
                node.target = torch.ops.aten.sigmoid.default
                return True
        return False


@dataclass(frozen=True)
class Replicate(Pass):
    """Everything is whole on every rank."""

    name: ClassVar[str] = "replicate"
    takes: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage] = Stage.PLACED

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        whole = replicated(ctx.mesh)
        for node in gm.graph.nodes:
            if node.op != "output":
                set_layouts(node, whole)
            if node.op != "placeholder":
                set_needs(node, (whole,))
        return True


@dataclass(frozen=True)
class Idle(Pass):
    name: ClassVar[str] = "idle"
    takes: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage] = Stage.CAPTURED

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        return False


@dataclass(frozen=True)
class Broken(Pass):
    """Says PLACED and places nothing; or raises `error` at the last call."""

    name: ClassVar[str] = "broken"
    takes: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage] = Stage.PLACED
    error: Exception | None = None

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        for node in gm.graph.nodes:
            if node.name == "relu_1" and self.error is not None:
                raise self.error
        return True


def graph() -> tuple[GraphModule, PassContext]:
    gm, mesh = parse_graph(TEXT)
    return gm, PassContext(mesh)


def test_passes_run_in_order_and_set_the_stage() -> None:
    gm, ctx = graph()
    PassManager((Sigmoid(), Sigmoid(), Replicate()), (Verifier(),)).run(gm, ctx)
    assert stage_of(gm) is Stage.PLACED
    x = torch.randn(4)
    assert torch.equal(gm(x)[0], x.sigmoid().sigmoid())


def test_a_pipeline_in_the_wrong_order_is_refused_before_anything_runs() -> None:
    gm, ctx = graph()
    with pytest.raises(UserError) as error:
        PassManager((Sigmoid(), Replicate(), Sigmoid())).run(gm, ctx)
    assert_expected_inline(
        str(error.value),
        """pass 'sigmoid' takes a graph that is CAPTURED, but after 'replicate' it is PLACED; move 'sigmoid' after a pass that gives CAPTURED, or leave it out""",  # noqa: E501
    )
    assert ctx.remarks == []


def test_a_failing_pass_is_named_with_node_and_source_line() -> None:
    gm, ctx = graph()
    node = next(node for node in gm.graph.nodes if node.name == "relu_1")
    set_origin(node, Origin("layers.0", "/home/me/mlp.py", 14, "    return relu(x)"))
    with pytest.raises(PassError) as error:
        PassManager((Sigmoid(), Idle(), Broken(ZeroDivisionError("by zero")))).run(gm, ctx)
    assert_expected_inline(
        str(error.value),
        """\
pass 'broken' failed at stage CAPTURED: ZeroDivisionError: by zero
  node: %relu_1, call_function aten.relu.default
  from: mlp.py:14 layers.0
        return relu(x)
  passes run before it: sigmoid, idle""",
    )
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_what_the_user_got_wrong_goes_through() -> None:
    gm, ctx = graph()
    with pytest.raises(ConstraintError, match=r"^glob$"):
        PassManager((Broken(ConstraintError("glob")),)).run(gm, ctx)


def test_the_verifier_names_the_pass_that_broke_the_graph() -> None:
    gm, ctx = graph()
    with pytest.raises(VerifyError) as error:
        PassManager((Idle(), Broken()), (Verifier(),)).run(gm, ctx)
    assert_expected_inline(
        str(error.value),
        """\
after pass 'broken': at stage PLACED, %x is not valid: it has 1 results and 0 layouts
    %x: f32[4] = input("x")
  passes run before it: idle""",
    )


def test_the_verifier_looks_at_the_graph_before_the_first_pass() -> None:
    gm, ctx = graph()
    gm.graph.output_node().meta.clear()
    with pytest.raises(VerifyError, match="the outputs are not valid: they are not described"):
        PassManager((Idle(),), (Verifier(),)).run(gm, ctx)


def test_dumps_are_one_file_per_pass_that_changed_the_graph(tmp_path: Path) -> None:
    gm, ctx = graph()
    PassManager((Idle(), Sigmoid(), Replicate()), (Dumper(tmp_path, rank=3),)).run(gm, ctx)
    folder = tmp_path / "rank3"
    assert sorted(file.name for file in folder.iterdir()) == ["00_capture.txt", "02_sigmoid.txt", "03_replicate.txt"]
    assert_expected_inline(
        (folder / "03_replicate.txt").read_text(),
        """\
mesh tp=2
stage PLACED
%x: f32[4] {tp:R} = input("x")
%relu: f32[4] {tp:R} = sigmoid(%x)
%relu_1: f32[4] {tp:R} = relu(%relu)
return output("output") %relu_1
""",
    )


def test_dumps_as_differences(tmp_path: Path) -> None:
    gm, ctx = graph()
    PassManager((Sigmoid(),), (Dumper(tmp_path, mode="diff"),)).run(gm, ctx)
    assert (tmp_path / "00_capture.txt").read_text() == TEXT.lstrip()
    assert_expected_inline(
        (tmp_path / "01_sigmoid.txt").read_text(),
        """\
@@ -2,5 +2,5 @@
 stage CAPTURED
 %x: f32[4] = input("x")
-%relu: f32[4] = relu(%x)
+%relu: f32[4] = sigmoid(%x)
 %relu_1: f32[4] = relu(%relu)
 return output("output") %relu_1
""",
    )


def test_dumps_go_to_the_structured_trace(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [logging.NullHandler()])
    gm, ctx = graph()
    with caplog.at_level(logging.DEBUG, logger="torch.__trace"):
        PassManager((Sigmoid(),), (Dumper(None),)).run(gm, ctx)
    metadata = [vars(record)["metadata"] for record in caplog.records]
    artifacts = [said["artifact"]["name"] for said in metadata if "artifact" in said]
    assert artifacts == ["autoshard_00_capture", "autoshard_01_sigmoid"]


def test_the_timer_adds_up_passes_of_one_name() -> None:
    gm, ctx = graph()
    timer = Timer()
    PassManager((Sigmoid(), Sigmoid(), Idle()), (timer,)).run(gm, ctx)
    assert list(timer.seconds) == ["sigmoid", "idle"]
    assert all(seconds > 0 for seconds in timer.seconds.values())


def test_op_counts_say_what_a_pass_added_and_removed() -> None:
    gm, ctx = graph()
    counts = OpDiff()
    PassManager((Sigmoid(), Idle()), (counts,)).run(gm, ctx)
    assert counts.changes == {"sigmoid": {"relu": -1, "sigmoid": 1}, "idle": {}}


def test_observers_are_called_around_every_pass() -> None:
    seen: list[str] = []

    class Recorder(Observer):
        def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
            seen.append(f"before {pass_.name} {stage_of(gm).name}")

        def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
            seen.append(f"after {pass_.name} {stage_of(gm).name} {changed}")

    gm, ctx = graph()
    PassManager((Idle(), Replicate()), (Recorder(),)).run(gm, ctx)
    assert seen == [
        "before idle CAPTURED",
        "after idle CAPTURED False",
        "before replicate CAPTURED",
        "after replicate PLACED True",
    ]


def test_remarks_name_pass_node_and_place() -> None:
    remark = Remark("bucket", "not bucketed: 8 B over 4 B", Origin("layers.0", "/home/me/mlp.py", 14), "mm_1")
    assert str(remark) == "bucket: not bucketed: 8 B over 4 B [%mm_1, mlp.py:14 layers.0]"
    ctx = PassContext(Mesh("tp=2"))
    gm, _ = graph()
    ctx.remark(Idle(), next(iter(gm.graph.nodes)), "nothing to do")
    assert [str(one) for one in ctx.remarks] == ["idle: nothing to do [%x]"]
