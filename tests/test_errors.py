"""What a user gets wrong is refused before anything runs, in words that say what to change.

What cannot be captured is in test_capture_errors.py, what a call gets wrong in runtime/test_module.py, and what
ranks disagree on in runtime/test_failures.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Shard

import autoshard as product
from autoshard import Dump, Mesh, Options, Overlap, UserError, autoshard, check, plan, rule
from autoshard.config.axis_names import batch_axes_of
from passes.errors import with_article


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def planned(mesh: str = "dp=2,tp=2", **options: Any) -> Any:
    return plan(Tiny(), Mesh(mesh), (torch.randn(4, 6),), options=Options(**options))


def message(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the class and text of the UserError that a call raises; it has to be one that users can import."""
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    name = type(caught.value).__name__
    assert name in product.__all__, f"{name} cannot be imported from autoshard"
    return f"{name}: {caught.value}"


# --- meshes


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ("dp2", "MeshError: cannot read 'dp2' in mesh 'dp2'; write it as 'dp=2,tp=4'"),
        ("dp=0", "MeshError: mesh axis 'dp' has size 0; it must be 1 or more"),
        ("dp=2,dp=2", "MeshError: mesh axes ('dp', 'dp') are not distinct; rename one of them"),
        (4, "MeshError: a mesh is a DeviceMesh, a Mesh or text such as 'dp=2,tp=4', not 4"),
        ((2, 2), "MeshError: a mesh is a DeviceMesh, a Mesh or text such as 'dp=2,tp=4', not (2, 2)"),
        ({"dp": 2}, "MeshError: a mesh is a DeviceMesh, a Mesh or text such as 'dp=2,tp=4', not {'dp': 2}"),
    ],
)
def test_a_mesh_that_cannot_be_read(mesh: Any, expected: str) -> None:
    assert message(plan, Tiny(), mesh, (torch.randn(4, 6),)) == expected


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (({"dp": 2, "tp": 4},), "MeshError: Mesh({'dp': 2, 'tp': 4}): write axes and sizes as text: Mesh('dp=2,tp=4')"),
        ((4,), "MeshError: Mesh(4): write axes and sizes as text: Mesh('dp=2,tp=4')"),
        ((("dp",), 2), "MeshError: Mesh(('dp',), 2): give one whole number per axis: Mesh(('dp', 'tp'), (2, 4))"),
        ((("dp",), (2.0,)), "MeshError: Mesh(('dp',), (2.0,)): give one whole number per axis: Mesh(('dp', 'tp'), (2, 4))"),
        ((("dp", "dp"), (2, 2)), "MeshError: mesh axes ('dp', 'dp') are not distinct; rename one of them"),
    ],
)
def test_axes_of_another_type(axes: Any, expected: str) -> None:
    assert message(Mesh, *axes) == expected


def test_hardware_of_another_type() -> None:
    assert message(Mesh, "dp=2", hardware=3) == (
        "MeshError: Mesh(..., hardware=3): give a preset such as 'h100', the path of a calibrated .json, or None"
    )


def test_the_hardware_of_this_machine_is_no_hardware_of_a_mesh() -> None:
    assert message(Mesh, "dp=2", hardware="auto") == (
        "MeshError: hardware='auto' is no hardware of a mesh: leave it out for this machine's, which options take by default, or "
        "give a preset such as 'h100'"
    )


@pytest.mark.parametrize("name", ["model", "ep", "x", "sp"])
def test_an_axis_of_which_nothing_says_whether_it_carries_data(name: str) -> None:
    mesh = Mesh(f"dp=2,{name}=4")
    assert message(batch_axes_of, Options(), mesh) == (
        f"MeshError: nothing says whether the batch is split over axis {name!r} of the mesh dp=2,{name}=4; give "
        f"Options(recipe={{'dp': 'fsdp', '{name}': 'fsdp'}}) if it is, Options(recipe={{'dp': 'fsdp', '{name}': 'megatron'}}) "
        f"or Options(inputs={{'*': {{'{name}': 'R'}}}}) if every rank of it has the same batch, or a plan (plan=...), or call "
        "the axis 'dp', 'tp' or, for the sequence, 'cp'"
    )


def test_an_axis_that_says_whether_it_carries_data() -> None:
    assert batch_axes_of(Options(), Mesh("pod=2,dp_replicate=2,tp=2,dp_shard=2,data=2")) == (0, 1, 3, 4)
    assert batch_axes_of(Options(), Mesh("tensor_parallel=2,data_parallel=2")) == (1,)  # as Lightning names them
    assert batch_axes_of(Options(), Mesh("dp=2,x=1")) == (0,)
    assert batch_axes_of(Options(), Mesh("dp=2,cp=2,context=2")) == (0,)
    assert batch_axes_of(Options(inputs={"tokens": {"x": "R"}}), Mesh("dp=2,x=4")) == (0,)


def test_an_axis_is_asked_about_before_the_first_call(one_rank: DeviceMesh) -> None:
    options = Options(recipe="auto")
    with mock.patch("autoshard.api.place_of") as placed, mock.patch("autoshard.api.open_groups"):
        placed.return_value.mesh = Mesh("x=2")
        assert message(autoshard, Tiny(), one_rank, options=options).startswith("MeshError: nothing says whether the batch")


@pytest.mark.parametrize(("named", "asked"), [("h100", "a100"), ("h100", None)])
def test_two_kinds_of_hardware(named: str, asked: str | None) -> None:
    mesh, args, options = Mesh("dp=2", hardware=named), (torch.randn(4, 6),), Options(recipe="ddp", hardware=asked)
    expected = (
        f"MeshError: Mesh(..., hardware='h100') and Options(hardware={asked!r}) name different hardware; remove one: the "
        "mesh's is for planning without devices, the options' for a DeviceMesh or a mesh that names none"
    )
    calls: tuple[Callable[..., Any], ...] = (plan, check)
    for function in calls:
        assert message(function, Tiny(), mesh, args, options=options) == expected
    assert message(planned(recipe="ddp").replan, mesh=mesh, hardware="a100").startswith("MeshError: Mesh(..., hardware='h100')")


def test_one_kind_of_hardware() -> None:
    args, h100 = (torch.randn(4, 6),), Options(recipe="ddp", hardware="h100")
    made = plan(Tiny(), Mesh("dp=2", hardware="h100"), args, options=h100)
    assert made.mesh.hardware == plan(Tiny(), "dp=2", args, options=h100).mesh.hardware
    again = made.replan(mesh=Mesh("dp=2", hardware="a100")).mesh.hardware
    assert again is not None
    assert again.name == "a100"


def test_a_device_mesh_with_an_axis_name_twice(one_rank: DeviceMesh) -> None:
    mesh = DeviceMesh("cpu", torch.arange(1).view(1, 1), mesh_dim_names=("dp", "tp"))
    mesh._mesh_dim_names = ("dp", "dp")
    assert message(autoshard, Tiny(), mesh) == "MeshError: mesh axes ('dp', 'dp') are not distinct; rename one of them"


def test_a_mesh_larger_than_the_world(one_rank: DeviceMesh) -> None:
    # init_device_mesh refuses by itself to make one.
    mesh = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("dp",), _init_backend=False, _rank=0)
    assert message(autoshard, Tiny(), mesh) == (
        "MeshError: the mesh has 4 ranks but the world has 1; start 4 processes (torchrun --nproc-per-node 4 "
        "...), or make the mesh smaller"
    )
    with pytest.raises(RuntimeError, match="bigger than default world size 1, but found 4 ranks"):
        init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))


def test_a_mesh_without_names(one_rank: DeviceMesh) -> None:
    assert message(autoshard, Tiny(), init_device_mesh("cpu", (1,))).replace(", stride=((),)", "") == (
        "MeshError: the axes of DeviceMesh((1,), 'cpu') have no names; give them: "
        "init_device_mesh(device_type, shape, mesh_dim_names=('dp', 'tp'))"
    )


def test_text_where_devices_are_needed() -> None:
    assert message(autoshard, Tiny(), "dp=2") == (
        "MeshError: autoshard runs on a DeviceMesh, not on 'dp=2': use init_device_mesh(...); to plan "
        "without devices, call autoshard.plan"
    )


def test_a_plan_for_another_model(one_rank: DeviceMesh) -> None:
    made = plan(nn.Linear(6, 4), "dp=1", (torch.randn(4, 6),))
    assert message(autoshard, Tiny(), one_rank, (torch.randn(4, 6),), plan=made) == (
        "PlanError: the plan does not fit: parameter 'up.weight' is not in the plan; parameter 'up.bias' is not in the "
        "plan; parameter 'down.weight' is not in the plan; parameter 'down.bias' is not in the plan; the plan has "
        "parameter 'weight', which is not there; and 3 more. Make a plan for this model and these inputs"
    )


def test_a_plan_for_another_mesh(one_rank: DeviceMesh) -> None:
    made = plan(Tiny(), "dp=2", (torch.randn(4, 6),))
    assert message(autoshard, Tiny(), one_rank, plan=made) == (
        "PlanError: the plan does not fit: the mesh is dp=1, the plan's dp=2. Make a plan for this mesh"
    )


@pytest.mark.parametrize(
    "options",
    [
        Options(recipe="fsdp+megatron"),
        Options(recipe={"dp": "fsdp", "tp": "megatron"}),
        Options(recipe=None, params={"up.weight": {"tp": "S(0)"}}),
    ],
)
def test_a_plan_for_another_mesh_on_which_its_options_do_not_work(one_rank: DeviceMesh, options: Options) -> None:
    made = plan(Tiny(), "dp=2,tp=2", (torch.randn(4, 6),), options=options)
    assert message(autoshard, Tiny(), one_rank, plan=made) == (
        "PlanError: the plan does not fit: the mesh is dp=1, the plan's dp=2,tp=2. Make a plan for this mesh"
    )


def test_what_is_no_plan(one_rank: DeviceMesh) -> None:
    assert message(autoshard, Tiny(), one_rank, plan=3) == (
        "PlanError: plan=3: give a ShardingPlan, or the path of a file that one was saved to"
    )
    assert message(autoshard, Tiny(), one_rank, plan="none.json") == (
        "PlanError: the plan none.json cannot be read: No such file or directory; give the path that it was saved to"
    )


def test_no_mesh() -> None:
    assert message(autoshard, Tiny()) == (
        "MeshError: autoshard needs a mesh: autoshard(model, mesh), or @autoshard(mesh=mesh) on a class"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": {"pp": "fsdp"}},
        {"params": {"up.weight": {"pp": Shard(0)}}},
        {"inputs": {"x": {"pp": "S(0)"}}},
        {"outputs": {"output": {"pp": "R"}}},
    ],
    ids=str,
)
def test_an_unknown_axis(options: dict[str, Any]) -> None:
    where = {"params": "Options(params=...): 'up.weight': ", "inputs": "Options(inputs=...): 'x': "}
    where["outputs"] = "Options(outputs=...): 'output': "
    which = where.get(next(iter(options)), "")
    expected = f"MeshError: {which}unknown mesh axis 'pp'; this mesh has dp=2,tp=2: name one of these"
    assert message(planned, **options) == expected


def test_options_are_checked_before_the_first_call(one_rank: DeviceMesh) -> None:
    expected = "MeshError: unknown mesh axis 'tp'; this mesh has dp=1: name one of these"
    assert message(autoshard, Tiny(), one_rank, options=Options(recipe={"tp": "megatron"})) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Tensor", "a Tensor"),
        ("EncoderDecoderCache", "an EncoderDecoderCache"),
        ("ndarray", "an ndarray"),
        ("LSTM", "an LSTM"),
        ("GRU", "a GRU"),
        ("UserDict", "a UserDict"),
        ("object", "an object"),
    ],
)
def test_the_article_of_a_type(name: str, expected: str) -> None:
    assert with_article(name) == expected


# --- models


def test_what_is_no_module() -> None:
    assert message(plan, 3, "dp=2") == "UserError: autoshard.plan takes an nn.Module, not int"
    assert message(autoshard, 3, "dp=2") == "UserError: autoshard takes an nn.Module, not int"


def test_a_decorator_on_a_function() -> None:
    decorate = autoshard(mesh=Mesh("dp=2"))  # type: ignore[call-overload]
    text = message(decorate, Tiny().forward)
    assert text.startswith("UserError: @autoshard(mesh=...) decorates an nn.Module class, not <bound method")


# --- recipes


@pytest.mark.parametrize("recipe", ["fdsp", {"dp": "fdsp"}, "fdsp+megatron"], ids=str)
def test_an_unknown_recipe(recipe: Any) -> None:
    assert message(planned, recipe=recipe) == (
        "RecipeError: unknown recipe 'fdsp'; recipes are fsdp, zero2, ddp, hsdp, megatron, context, context(gather), "
        "context(ring), context(all_to_all), fsdp_context, fsdp_context(gather), fsdp_context(ring), "
        "fsdp_context(all_to_all), or two of them joined, such as 'fsdp+megatron'. Did you mean 'fsdp'?"
    )


@pytest.mark.parametrize(
    ("recipe", "meant"),
    [
        ("FSDP", "'fsdp'"),
        ("Megatron", "'megatron'"),
        ("AUTO", "'auto'"),
        ("none", "None"),
        ({"dp": "DDP"}, "'ddp'"),
        ("ZeRO-3", "'fsdp'"),
    ],
    ids=str,
)
def test_a_recipe_in_other_letters(recipe: Any, meant: str) -> None:
    assert message(planned, recipe=recipe).endswith(f" joined, such as 'fsdp+megatron'. Did you mean {meant}?")


def test_a_recipe_that_is_like_none() -> None:
    assert message(planned, recipe="alpa") == (
        "RecipeError: unknown recipe 'alpa'; recipes are fsdp, zero2, ddp, hsdp, megatron, context, context(gather), "
        "context(ring), context(all_to_all), fsdp_context, fsdp_context(gather), fsdp_context(ring), "
        "fsdp_context(all_to_all), or two of them joined, such as 'fsdp+megatron'."
    )


def test_two_recipes_on_one_axis() -> None:
    assert message(planned, recipe={"dp": "fsdp+megatron"}) == (
        "RecipeError: recipe 'fsdp+megatron' takes an axis for each of its names; give an axis one, such as {'dp': 'fsdp'}"
    )


def test_a_recipe_of_another_type() -> None:
    assert message(planned, recipe=3) == (
        "RecipeError: Options(recipe=3): give a name such as 'fsdp', or a recipe per axis: {'dp': 'fsdp'}"
    )


def test_more_recipes_than_axes() -> None:
    assert message(planned, "dp=2", recipe="fsdp+megatron") == (
        "RecipeError: recipe 'fsdp+megatron' needs 2 axes, but the mesh dp=2 has 1; give one recipe per "
        "axis, such as {'dp': 'fsdp'}"
    )


@pytest.mark.parametrize(("mesh", "recipe"), [("dp=2", "hsdp"), ("dp=2,tp=2", {"dp": "hsdp", "tp": "megatron"})])
def test_hsdp_on_one_axis(mesh: str, recipe: Any) -> None:
    assert message(planned, mesh, recipe=recipe) == (
        "RecipeError: recipe 'hsdp' is on axis 'dp' only; it needs two: the first replicates parameters, the "
        "others shard them. Use a mesh such as 'replicate=2,shard=4', or 'fsdp'"
    )


# --- placements


def test_a_placement_that_cannot_be_read() -> None:
    assert message(planned, params={"up.weight": {"dp": "shard 0"}}) == (
        "ConstraintError: Options(params=...): 'up.weight': cannot read the placement 'shard 0'; use "
        "Shard(dim) or Replicate(), or write 'S(dim)', 'S(dim/outer)', 'S(dim~)' or 'R'"
    )


@pytest.mark.parametrize("placement", ["P(sum)", Partial()], ids=str)
@pytest.mark.parametrize(("what", "name"), [("params", "up.weight"), ("inputs", "x"), ("outputs", "output")])
def test_a_partial_placement(what: str, name: str, placement: Any) -> None:
    expected = (
        f"ConstraintError: Options({what}=...): {name!r} cannot be P(sum); use Shard(dim) or Replicate() "
        "(a value becomes partial by itself where an op makes it so)"
    )
    assert message(planned, **{what: {name: {"dp": placement}}}) == expected


def test_a_placement_on_no_axis() -> None:
    assert message(planned, params={"up.weight": "S(0)"}) == (
        "ConstraintError: Options(params=...): 'up.weight' is given 'S(0)'; say on which axis: {'up.weight': "
        "{'dp': Shard(0)}}"
    )


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("params", "matches none of the 4 params of the model; names look like 'up.weight', 'down.weight'"),
        ("inputs", "matches none of the 1 inputs of the model; names look like 'x'"),
        ("outputs", "matches none of the 1 outputs of the model; names look like 'output'"),
    ],
)
def test_a_glob_that_matches_nothing(what: str, expected: str) -> None:
    pattern = "lup.*weight"
    text = message(planned, **{what: {pattern: {"dp": "S(0)"}}})
    assert text == f"ConstraintError: Options({what}=...): {pattern!r} {expected}"


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_that_a_value_does_not_have(dim: int) -> None:
    text = message(planned, params={"up.weight": {"dp": Shard(dim)}})
    expected = f"'up.weight' of shape [8, 6] has no dim {dim}; its dims are 0 to 1"
    assert text == f"ConstraintError: Options(params=...): {expected}"
    text = message(planned, params={"up.bias": {"dp": Shard(1)}})
    assert text == "ConstraintError: Options(params=...): 'up.bias' of shape [8] has no dim 1; its only dim is 0"


@pytest.mark.parametrize(
    ("mesh", "axes", "expected"),
    [
        (
            "dp=3",
            {"dp": Shard(0)},
            "dim 0 of 'up.weight' has 8 entries, which dp = 3 does not divide; shard another dim, or change the size to "
            "a multiple of 3",
        ),
        (
            "dp=4,tp=4",
            {"dp": "S(0)", "tp": "S(0)"},
            "dim 0 of 'up.weight' has 8 entries, which dp x tp = 16 does not divide; shard another dim, or change the "
            "size to a multiple of 16",
        ),
        (
            "tp=2",
            {"tp": "S(0/3)"},
            "dim 0 of 'up.weight' has 8 entries, which tp = 2 in each of 3 parts does not divide; shard another dim, or "
            "change the size to a multiple of 6",
        ),
    ],
)
def test_a_dim_that_the_axis_does_not_divide(mesh: str, axes: dict[str, Any], expected: str) -> None:
    text = message(planned, mesh, recipe=None, params={"up.weight": axes})
    assert text == f"ConstraintError: Options(params=...): {expected}"


def test_two_names_of_one_parameter_with_different_placements() -> None:
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8, bias=False))
    model[1].weight = model[0].weight
    options = Options(params={"0.weight": {"dp": Shard(0)}, "1.weight": {"dp": Shard(1)}})
    text = message(plan, model, Mesh("dp=2"), (torch.zeros(4, dtype=torch.long),), options=options)
    assert text == (
        "ConstraintError: Options(params=...): '0.weight' and '1.weight' are one parameter, which cannot be both S(0) and "
        "S(1) on axis 'dp'; give it one placement"
    )


def test_placements_that_cut_through_each_other() -> None:
    params = {"up.weight": {"dp": "S(0)", "tp": "S(0/1)"}, "down.weight": {"dp": "S(1)", "tp": "S(1/4)"}}
    assert planned(recipe=None, params=params).parameters["up.weight"].local_shape(Mesh("dp=2,tp=2")) == (2, 6)
    text = message(planned, "dp=4,tp=2", recipe=None, params={"up.weight": {"dp": "S(0)", "tp": "S(0/2)"}})
    assert text == (
        "ConstraintError: Options(params=...): the placements of 'up.weight' cut through each other: {dp:S(0), tp:S(0/2)}; "
        "leave out the second number, as in 'S(0)', and each axis splits what those before it left over"
    )


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"compile": "jit"}, "UserError: Options(compile='jit'): choose 'inductor' or 'eager'"),
        ({"unknown_ops": "skip"}, "UserError: Options(unknown_ops='skip'): choose 'replicate' or 'error'"),
        (
            {"recompute": "all"},
            "UserError: Options(recompute='all'): choose 'auto' or 'none' or 'block'",
        ),
        (
            {"reshard_after_forward": "no"},
            "UserError: Options(reshard_after_forward='no'): choose 'auto' or True or False",
        ),
        ({"loss": "max"}, "UserError: Options(loss='max'): choose 'mean' or 'sum'"),
    ],
)
def test_an_option_of_another_value(option: dict[str, Any], expected: str) -> None:
    assert message(planned, **option) == expected


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"recipe": ["fsdp"]}, "RecipeError: Options(recipe=['fsdp']): give a name such as 'fsdp', or a recipe per axis: "
            "{'dp': 'fsdp'}"),
        ({"recipe": {}}, "RecipeError: Options(recipe={}): name the recipe of an axis, such as {'dp': 'fsdp'}, or give "
         "recipe=None to take only the placements of params=, inputs= and outputs="),
        ({"recipe": {"dp": 3}}, "RecipeError: Options(recipe={'dp': 3}): give each axis the name of a recipe or None: "
            "{'dp': 'fsdp'}"),
        ({"hardware": 3}, "UserError: Options(hardware=3): give a preset such as 'h100', a file that `python -m autoshard "
            "calibrate` wrote, an autoshard.Hardware, 'auto', or None for unknown figures"),
        ({"memory_limit": 1.5}, "UserError: Options(memory_limit=1.5): give bytes above 0, or text such as '60GB' or '60GiB'"),
        ({"recipe": "auto+megatron"}, "RecipeError: Options(recipe='auto+megatron'): 'auto' is for all axes at once; give "
         "Options(recipe='auto'), and fix single placements with params=, inputs= and outputs="),
        ({"recipe": {"dp": "auto"}}, "RecipeError: Options(recipe={'dp': 'auto'}): 'auto' is for all axes at once; give "
         "Options(recipe='auto'), and fix single placements with params=, inputs= and outputs="),
        ({"recipe": "fsdp+"}, "RecipeError: recipe 'fsdp+' lacks a name before or after '+'; join two, such as 'fsdp+megatron'"),
        ({"memory_limit": True}, "UserError: Options(memory_limit=True): give bytes above 0, or text such as '60GB' or "
            "'60GiB'"),
        ({"optimizer": "adam"}, "UserError: Options(optimizer='adam'): choose 'adamw' or 'sgd' or None"),
        ({"time_limit": "1m"}, "UserError: Options(time_limit='1m'): give seconds, 0 or more, or leave it out for no limit"),
        ({"params": Shard(0)}, "ConstraintError: Options(params=Shard(dim=0)): give placements by name and axis: {'name': "
            "{'dp': Shard(0)}}"),
        ({"inputs": {0: {"dp": "R"}}}, "ConstraintError: Options(inputs={0: {'dp': 'R'}}): give placements by name and "
            "axis: {'name': "
            "{'dp': Shard(0)}}"),
        ({"params": {"w": Shard(0)}}, "ConstraintError: Options(params=...): 'w' is given Shard(dim=0); say on which axis: "
            "{'w': {'dp': Shard(0)}}"),
        ({"outputs": {"y": {"dp": 0}}}, "ConstraintError: Options(outputs=...): 'y' is given 0 on 'dp'; use Shard(dim) or "
            "Replicate(), or write 'S(dim)' or 'R'"),
        ({"mixed_precision": torch.bfloat16}, "UserError: Options(mixed_precision=torch.bfloat16): give a policy: "
            "torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32), or None"),
        ({"reshard_after_forward": 1}, "UserError: Options(reshard_after_forward=1): choose 'auto' or True or False"),
        ({"overlap": 1}, "UserError: Options(overlap=1): give True, False, or autoshard.Overlap(...)"),
        ({"passes": []}, "UserError: Options(passes=[]): give a tuple of passes, made as in "
            "(*autoshard.phases.default_passes(), MyPass()), or None for the default"),
        ({"dump": True}, "UserError: Options(dump=True): give a folder, autoshard.Dump(folder, ...), or False"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_option_of_another_type(option: dict[str, Any], expected: str) -> None:
    assert message(planned, **option) == expected


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (Overlap, {"bucket_bytes": "1MB"}, "Overlap(bucket_bytes='1MB'): give bytes, a whole number of 0 or more"),
        (Overlap, {"bucket_bytes": -1}, "Overlap(bucket_bytes=-1): give bytes, a whole number of 0 or more"),
        (Overlap, {"split_matmuls": None}, "Overlap(split_matmuls=None): choose True or False"),
        (Overlap, {"symmetric_memory": "cuda"}, "Overlap(symmetric_memory='cuda'): choose True or False"),
        (Dump, {"folder": None}, "Dump(folder=None): give the path of a folder"),
        (Dump, {"folder": "out", "mode": "some"}, "Dump(mode='some'): choose 'full' or 'diff'"),
        (Dump, {"folder": "out", "ranks": 0}, "Dump(ranks=0): choose 'first' or 'all'"),
    ],
)
def test_a_group_of_options_of_another_type(kind: Any, given: dict[str, Any], expected: str) -> None:
    assert message(kind, **given) == f"UserError: {expected}"


CALLS = [
    ((torch.randn(2),), {}, "args=Tensor: give the arguments of one call as a tuple, such as args=(tokens, labels)"),
    (((), [("x", 1)]), {}, "kwargs=[('x', 1)]: give arguments by name, such as kwargs={'labels': labels}"),
    (((), {1: 2}), {}, "kwargs={1: 2}: give arguments by name, such as kwargs={'labels': labels}"),
    (
        ((), Options()),
        {},
        "kwargs=Options: give arguments by name, such as kwargs={'labels': labels}; give options by name: options=Options(...)",
    ),
    (
        (),
        {"options": {"recipe": "fsdp"}},
        "options={'recipe': 'fsdp'}: give autoshard.Options(...), such as Options(recipe='fsdp')",
    ),
]


@pytest.mark.parametrize(("given", "named", "expected"), CALLS, ids=("args", "kwargs", "names", "options as kwargs", "options"))
def test_arguments_of_another_type(
    one_rank: DeviceMesh, given: tuple[Any, ...], named: dict[str, Any], expected: str
) -> None:
    calls: tuple[Callable[..., Any], ...] = (plan, autoshard, check)
    for function in calls:
        mesh = one_rank if function is autoshard else "dp=2"
        assert message(function, Tiny(), mesh, *given, **named) == f"UserError: {expected}"
    assert message(autoshard, None, one_rank, *given, **named) == f"UserError: {expected}"


def test_a_check_of_another_type() -> None:
    assert message(check, 3, "dp=2") == "UserError: autoshard.check takes an nn.Module, not int"
    assert message(check, Tiny(), "dp=2", (torch.randn(4, 6),), plan=3) == (
        "PlanError: plan=3: give a ShardingPlan, or the path of a file that one was saved to"
    )


def test_a_stage_that_a_plan_does_not_have() -> None:
    expected = "the plan has no graph at stage 'final'; stages are CAPTURED, PLACED, EXPLICIT, COLLECTIVE, LOCAL"
    assert message(planned().graph, "final") == f"UserError: {expected}"


# --- ops without a rule


@torch.library.custom_op("autoshard_tests::mirrored", mutates_args=())
def mirrored(x: Tensor) -> Tensor:
    return x.flip(-1)


@torch.library.custom_op("autoshard_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("autoshard_tests::noisy", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


OPS = {"mirrored": mirrored, "doubled": doubled, "noisy": noisy}
for op in OPS.values():
    op.register_fake(torch.empty_like)


class Calls(nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.op, self.up = op, nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).sum() + OPS[self.op](x)


def calling(op: str, **options: Any) -> Any:
    return plan(Calls(op), "dp=2", (torch.randn(4, 6),), options=Options(recipe="ddp", **options))


def _line() -> str:
    """Return where `Calls` calls its op, as messages end."""
    lines, start = inspect.getsourcelines(Calls.forward)
    return f"\n  {__file__}:{start + 1}: {lines[1].strip()}"


def test_an_op_without_a_rule_on_request() -> None:
    text = message(calling, "mirrored", unknown_ops="error")
    assert text == (
        "UnknownOpError: autoshard_tests.mirrored.default has no sharding rule; register one with "
        'autoshard.rule(op)(...), such as "b d -> b d", or allow it to run replicated with '
        f"Options(unknown_ops='replicate'){_line()}"
    )


def test_an_op_without_a_rule_leaves_a_remark() -> None:
    remarks = [remark for remark in calling("mirrored").remarks if "mirrored" in remark.text]
    assert [(remark.pass_name, remark.text) for remark in remarks] == [
        (
            "propagate",
            "autoshard_tests.mirrored.default has no sharding rule: runs replicated on dp; "
            "96 bytes of operands are gathered",
        )
    ]
    assert not remarks[0].routine
    assert remarks[0].origin.source.strip() in _line()


def test_a_rule_can_be_registered() -> None:
    rule(torch.ops.autoshard_tests.doubled.default)("b d -> b d")
    made = calling("doubled", unknown_ops="error")
    assert not any("doubled" in remark.text for remark in made.remarks)


def test_an_op_that_draws_random_numbers_needs_a_rule() -> None:
    text = message(calling, "noisy")
    assert text == (
        "UnknownOpError: autoshard_tests.noisy.default draws random numbers and has no sharding rule: each rank would "
        "draw its own. Draw with torch.rand or torch.randn, or register a rule with autoshard.rule(op)(...)" + _line()
    )
