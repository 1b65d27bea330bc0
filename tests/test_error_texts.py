"""Every message that autoshard raises on purpose is compared with its text by some test, as is read off the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx import Graph, GraphModule, Node

import passes.errors
from autoshard import AutoshardError, Bucket, Mesh, Options, autoshard, plan
from autoshard.capture.capture import capture
from autoshard.capture.capture_errors import _message
from autoshard.capture.flat_call import _check_read
from autoshard.cli.main import main
from autoshard.compile.compiled import Program, Split
from autoshard.config.constraints import constraints_on
from autoshard.debug.bisection import bisect
from autoshard.debug.rank_interpreter import _callable
from autoshard.measure.calibrate import calibrate
from autoshard.planner.prediction import memory_of
from autoshard.plans.codec import decode
from autoshard.runtime.execution import Slot
from autoshard.runtime.parameters import lay_out, place_of
from autoshard.runtime.placements import dtensor_placements, layout_of_placements
from passes._torch import TraceFailure
from passes._torch.supported import release
from passes.base import PassContext
from passes.cost.build_program import program_of
from passes.hardware.hardware import Hardware
from passes.ir.graph import Stage, layout_of, set_layouts, set_stage, set_value, tensor_of
from passes.ir.layout import Layout, R, parse_layout
from passes.ir.routes import plan_steps
from passes.ir.text.printer import _format_argument, _format_call, format_target
from passes.seed import Constraint
from passes.solve import Solve
from passes.verify import verify

ROOT = Path(__file__).parents[1]
LONG = 12  # characters of a text that has to be compared
ERRORS = {name for name, kind in vars(passes.errors).items() if isinstance(kind, type)}
@cache
def sources() -> dict[str, ast.Module]:
    paths = [path for folder in ("autoshard", "passes") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


@cache
def compared() -> str:
    """Return all text in tests, without what regular expressions add to it."""
    found: list[str] = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        strings = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant | ast.JoinedStr))
        found += map(_text, strings)
    return "\n".join(map(_plain, found))


def _text(node: ast.expr) -> str:
    """Return a string's own text; a gap where something is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "\0" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("\\", ""))


@cache
def _definitions(module: ast.Module) -> tuple[dict[str, ast.FunctionDef], dict[str, ast.expr]]:
    """Return the functions and the constants of a module, by name."""
    functions = {one.name: one for one in ast.walk(module) if isinstance(one, ast.FunctionDef)}
    return functions, {ast.unparse(one.targets[0]): one.value for one in module.body if isinstance(one, ast.Assign)}


def _strings(node: ast.AST, module: ast.Module) -> Iterator[str]:
    """Return the texts in an expression, in the functions of its module that it calls, and in the constants that it names."""
    functions, constants = _definitions(module)
    patterns = {id(one.args[0]) for one in ast.walk(node) if isinstance(one, ast.Call) and ast.unparse(one.func) == "re.search"}
    patterns |= {id(one.left) for one in ast.walk(node) if isinstance(one, ast.Compare)}
    for part in ast.walk(node):
        if isinstance(part, ast.JoinedStr | ast.Constant) and id(part) not in patterns:
            yield _text(part)
        elif isinstance(part, ast.Name) and part.id in constants:
            yield _text(constants[part.id])
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id in functions:
            for statement in functions[part.func.id].body[1:]:
                yield from _strings(statement, ast.Module([], []))


@cache
def _makers() -> set[str]:
    """Return functions that give or raise an error with a text that they are given."""
    functions = (one for module in sources().values() for one in ast.walk(module) if isinstance(one, ast.FunctionDef))
    return {one.name for one in functions if one.returns is not None and ast.unparse(one.returns) in ERRORS | {"NoReturn"}}


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _raised() -> Iterator[tuple[str, str]]:
    """Return where an error is made, and each text of its message between what is filled in; of short ones the longest."""
    for path, module in sources().items():
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and node.args and _called(node) in ERRORS | _makers():
                given = node.args[:1] if _called(node) in ERRORS else node.args
                texts = (text for one in given for text in _strings(one, module))
                parts = [_plain(part).strip() for text in texts for part in text.split("\0")]
                for part in dict.fromkeys(parts):
                    if len(part) >= LONG or part == max(parts, key=len):
                        yield f"{path}:{node.lineno}", part


def test_every_message_is_compared_with_its_text() -> None:
    raised = list(_raised())
    found = {text for _, text in raised}
    assert "does not divide; shard another dim, or change the size to a multiple of" in found and len(found) > 100
    missing = [f"{where}: {text}" for where, text in raised if text not in compared()]
    assert not missing, "no test compares these messages:\n" + "\n".join(missing)


# --- those that no other test comes by


def node(op: str = "call_function", target: Any = torch.neg, value: Any = None) -> Node:
    graph = Graph()
    made = graph.create_node(op, target, (graph.placeholder("x"),) if op == "call_function" else (), name="one")
    set_value(made, value)
    return made


def broken() -> GraphModule:
    """Return a graph that reads a value before it is made."""
    graph = Graph()
    first = graph.call_function(torch.neg, (graph.placeholder("x"),))
    second = graph.call_function(torch.neg, (first,))
    graph.output(second)
    gm = GraphModule(nn.Module(), graph)
    set_stage(gm, Stage.CAPTURED)
    second.append(first)
    return gm


MESH, MIXED = Mesh("dp=2,tp=2"), Options(mixed_precision=MixedPrecisionPolicy())
DRAWN = "aten.rand.default float32[4]" if release() >= (2, 14) else "aten.uniform.default float32[2, 2]"  # of a decomposed rrelu


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        (
            lambda: Options(time_limit=-1),
            "UserError: Options(time_limit=-1): give seconds, 0 or more, or leave it out for no limit",
        ),
        (
            lambda: Options(mixed_precision=MixedPrecisionPolicy(torch.int8)),
            "UserError: MixedPrecisionPolicy(param_dtype=torch.int8): give a floating point dtype such as torch.bfloat16, or "
            "None",
        ),
        (
            lambda: Options(mixed_precision=MixedPrecisionPolicy(reduce_dtype="float32")),
            "UserError: MixedPrecisionPolicy(reduce_dtype='float32'): give a floating point dtype such as torch.bfloat16, or "
            "None",
        ),
        (
            lambda: plan(nn.Linear(4, 4), "dp=2", (torch.ones(4, 4),), options=Options(buckets={"z": Bucket(0, (4,), fill=0)})),
            "InputError: Options(buckets=...): 'z' matches no argument of Linear.forward; names look like 'input'",
        ),
        (
            lambda: plan(nn.Linear(4, 4), "dp=2", (torch.ones(4, 4),)).diff("plan.json"),
            "UserError: plan.diff takes a plan, not str; ShardingPlan.load(path) reads a saved one",
        ),
        (
            lambda: plan(nn.Linear(4, 4), "dp=2", (torch.ones(4, 4),)).count("allgather"),
            "UserError: plan.count(kind='allgather'): choose 'all_gather' or 'all_reduce' or 'all_to_all' or 'reduce_scatter' or "
            "'send'",
        ),
        (
            lambda: plan(nn.Linear(4, 4), "dp=2", (torch.ones(4, 4),)).explain(""),
            "UserError: explain takes the name of a parameter, module, value, collective or source line, not ''",
        ),
        (
            lambda: Mesh("dp=99999999999"),
            "MeshError: a mesh of 99,999,999,999 ranks is larger than 1,048,576; give smaller sizes",
        ),
        (
            lambda: Options(memory_limit="60"),
            "UserError: Options(memory_limit='60'): give bytes above 0, or text such as '60GB' or '60GiB'",
        ),
        (lambda: Mesh("dp=2", (2,)), "MeshError: give a mesh as 'dp=2,tp=4', or as names and sizes, not both"),
        (lambda: Mesh(("dp", "tp"), (2,)), "MeshError: mesh axes ('dp', 'tp') need as many sizes, got (2,)"),
        (lambda: Mesh("d p=2"), "MeshError: mesh axis 'd p' is not a name; use letters, digits and '_'"),
        (lambda: Mesh("dp=2", ranks=(0, 1, 2)), "MeshError: a mesh of 2 places needs 2 ranks, got 3"),
        (
            lambda: dtensor_placements(parse_layout("{dp:S(0~)}", MESH), MESH),
            "ConstraintError: S(0~) on axis 'dp' is no placement of DTensor's: give a plain tensor",
        ),
        (
            lambda: layout_of_placements([Replicate()], MESH),
            "ConstraintError: mesh dp=2,tp=2 needs 2 placements, got (Replicate(),)",
        ),
        (
            lambda: layout_of_placements([Replicate(), 3], MESH),  # type: ignore[list-item]
            "ConstraintError: placement 3 is none of Replicate(), Shard(dim) and Partial()",
        ),
        (
            lambda: layout_of_placements([_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)], MESH),
            "ConstraintError: placement _S(0, 3) of axis 'tp' cuts through that of another",
        ),
        (
            lambda: Hardware.from_json("{", where="mine.json"),
            "UserError: mine.json is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); "
            "write it with `python -m autoshard calibrate`",
        ),
        (
            lambda: constraints_on({"*": {}}, "inputs", {}, MESH),
            "ConstraintError: Options(inputs=...): '*' matches none of the 0 inputs of the model; names look like nothing: there "
            "are none",
        ),
        (
            lambda: decode(Constraint, {"name": "w", "axis": "tp", "placement": "half"}),
            "PlanError: placement is 'half', not a placement such as 'S(0)'",
        ),
        (
            lambda: memory_of(MESH),
            "UserError: the figures of this device are not known, so that no step can be predicted: give "
            "Options(hardware='h100') or another preset, measure it with `python -m autoshard calibrate`, or choose a recipe",
        ),
        (
            lambda: program_of(broken(), None, MESH, outputs=(), gradients=(), optimizer=None),
            "UserError: mesh dp=2,tp=2 does not say what its devices are, so nothing on it can be priced; name them, as in "
            "Mesh('dp=2,tp=2', hardware='h100')",
        ),
        (
            lambda: Solve().run(broken(), PassContext(MESH)),
            "UserError: the mesh dp=2,tp=2 does not say on what hardware it is, and a search goes by cost; give "
            "Mesh('dp=2,tp=2', hardware='h100'), or choose a recipe",
        ),
        (
            lambda: bisect(nn.Linear(2, 2), "dp=2", (torch.ones(2, 2),), options=MIXED),
            "UserError: with mixed precision the numbers are not the model's after any pass; bisect without",
        ),
        (
            lambda: bisect(nn.Sequential(nn.Linear(2, 2), nn.RReLU()), "dp=2", (torch.ones(2, 2),)),
            "UserError: the model's random numbers cannot be made those of a mesh: its draw 1 is "
            f"aten.rrelu_with_noise.default float32[2, 2], that of the program is {DRAWN}; bisect model.eval()",
        ),
        (
            lambda: capture(nn.GRU(2, 2, num_layers=2, dropout=0.3), (torch.ones(2, 2),), training=True),
            "CaptureError: torch loses the dropout between the layers of gru (dropout=0.3) when it traces a model; set "
            "dropout=0, or use one-layer modules with nn.Dropout between them",
        ),
        (
            lambda: _check_read(node(), 3.5, {}, "self.rate"),
            "CaptureError: the model reads self.rate, a float that is not known before it runs; pass it as an argument",
        ),
        (lambda: Slot({"w": None}, "w").read(), "CompilerError: the module has lost its tensor 'w'"),
        (lambda: lay_out(nn.Linear(2, 2), None, {}), "CompilerError: parameter weight is a Parameter, not a DTensor"),
        (lambda: layout_of(laid_out(2)), "CompilerError: %one has 2 results; ask for layouts_of"),
        (lambda: layout_of(node()), "CompilerError: %one has no layout; it was not placed"),
        (lambda: tensor_of(node(value=[1])), "CompilerError: %one is not a tensor but list"),
        (
            lambda: plan_steps(Layout((R,)), parse_layout("{dp:S(0/3)}", Mesh("dp=2")), (4,), Mesh("dp=2")),
            "CompilerError: {dp:S(0/3)} does not split a tensor of shape (4,)",
        ),
        (
            lambda: format_target(len),
            "CompilerError: a graph calls <built-in function len>, which is neither an op nor in passes/ir/text/lexer.py",
        ),
        (
            lambda: _format_call(node("call_method", "neg"), MESH),
            "CompilerError: %one is a call_method; a graph has placeholders, calls of functions and one output",
        ),
        (lambda: _format_argument({1}), "CompilerError: cannot write {1}, a set, as an argument in graph text"),
        (
            lambda: _callable(node(target=torch.ops._c10d_functional.broadcast.default)),
            "CompilerError: %one: _c10d_functional.broadcast.default cannot be run on simulated ranks",
        ),
        (
            lambda: verify(broken(), MESH),
            "VerifyError: at stage CAPTURED, the graph is broken: Argument 'neg' of Node 'neg_1' was used before it has been "
            "defined! Please check that Nodes in the graph are topologically ordered",
        ),
    ],
)
def test_a_message(attempt: Callable[[], object], expected: str) -> None:
    with pytest.raises(AutoshardError) as caught:
        attempt()
    text = f"{type(caught.value).__name__}: {caught.value}"
    assert text.partition("\ngraph():")[0] == expected


def laid_out(count: int) -> Node:
    made = node()
    set_layouts(made, *(Layout((R,)),) * count)
    return made


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AutoshardError) as caught:
        calibrate(device="cuda")
    assert str(caught.value) == "device='cuda': this process sees no CUDA device; choose cpu"


def test_a_trace_that_fails_for_a_reason_of_its_own() -> None:
    assert _message(TraceFailure("Odd", "Explanation: nobody knows\nand more", "")) == (
        "the model cannot be captured as one graph: Odd: nobody knows"
    )


def test_a_program_without_a_backward() -> None:
    gm = broken()
    with pytest.raises(AutoshardError) as caught:
        Program(Split(gm, None, (), (), (), (), (), ()), lambda _: [], None).backward([], [])
    assert str(caught.value) == "this program was captured without gradients"


def small() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Linear(4, 4), (torch.empty(6, 4),)


def test_recipes_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "tests/test_error_texts.py:small", "--mesh", "dp=1", "--hardware", "h100"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "autoshard: there is nothing to compare on a mesh of dp=1; give one of more than one device"
    )


def test_a_rank_that_is_not_in_the_mesh(one_rank: DeviceMesh) -> None:
    mesh = DeviceMesh("cpu", torch.arange(1, 2), mesh_dim_names=("dp",), _init_backend=False, _rank=0)
    with pytest.raises(AutoshardError) as caught:
        place_of(mesh)
    assert str(caught.value) == "this rank is not in the mesh dp=1 of ranks [1]; call autoshard on those"


def test_what_a_module_on_a_mesh_is_asked_amiss(one_rank: DeviceMesh) -> None:
    options = Options(recipe="ddp", compile="eager", hardware=None)
    model = autoshard(nn.Linear(4, 4), one_rank, (torch.randn(6, 4),), options=options)
    with pytest.raises(AutoshardError) as caught:
        model.profile(torch.randn(6, 4))
    assert str(caught.value) == (
        "a profile compares with what is predicted, and the figures of this device are not known: give "
        "Options(hardware='h100') or another preset, or measure it with `python -m autoshard calibrate`"
    )


def test_a_model_that_is_sharded_already(one_rank: DeviceMesh) -> None:
    model = autoshard(nn.Sequential(nn.Linear(4, 4)), one_rank, options=Options(recipe="ddp", compile="eager"))
    for args in (None, (torch.randn(6, 4),)):
        for given, which in ((model, "the model"), (nn.Sequential(nn.ReLU(), model), "1 of Sequential")):
            with pytest.raises(AutoshardError) as caught:
                autoshard(given, one_rank, args)
            assert str(caught.value) == (
                f"{which} is sharded already: autoshard(...) returned it; use it as it is, or give the module that it was made "
                "from, after loading its full state dict"
            )
        distributed = nn.Linear(4, 4)
        distributed.weight = nn.Parameter(distribute_tensor(distributed.weight, one_rank, [Shard(0)]))
        with pytest.raises(AutoshardError) as caught:
            autoshard(distributed, one_rank, args)
        assert str(caught.value) == (
            "parameter weight is a DTensor: the module is sharded already, as by autoshard, fully_shard or parallelize_module; "
            "give it as it is on one device, with plain tensors as parameters"
        )


def test_a_parameter_of_another_class_of_tensors(one_rank: DeviceMesh) -> None:
    class Quantized(torch.Tensor):
        """A tensor of a library."""

    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(model.weight.detach().as_subclass(Quantized))
    with pytest.raises(AutoshardError) as caught:
        autoshard(model, one_rank)
    assert str(caught.value) == (
        "parameter weight is a Quantized; give the module as it is on one device, with plain tensors as parameters"
    )


def test_a_parameter_that_is_stored_otherwise(one_rank: DeviceMesh) -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight, one_rank, [Shard(0)]))
    with pytest.raises(AutoshardError) as caught:
        lay_out(model, place_of(one_rank), {"weight": Layout((R,))})
    assert str(caught.value) == "parameter weight is stored as (Shard(dim=0),) and cannot change that"
