"""Store a module's parameters as DTensors that hold one rank's part each.

Parameters keep their names, ties and Python attributes. Changing how a parameter is stored keeps the object, so an
optimizer built before the model was captured keeps working.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.capture.held_objects import copies_of_computed, reachable_tensors
from autoshard.config.topology import mesh_of
from autoshard.runtime.placements import Storage, dtensor_placements, layout_of_placements
from passes._torch import (
    Box,
    assign_data,
    correct_wrong_rules,
    draw_whole,
    dtensor_of_local,
    dtensor_spec,
    local_of_dtensor,
    reduce_empty_parts,
    refuse_wrong_views,
    relay_dtensor,
    shard_of,
    teach_checkpoints,
    write_to_parts,
)
from passes.errors import CaptureError, CompilerError, MeshError
from passes.ir.layout import Layout, replicated
from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class Place:
    """This rank's position: the device mesh, its coordinate and its device."""

    device_mesh: DeviceMesh
    mesh: Mesh
    coordinate: tuple[int, ...]
    device: torch.device

    def storage(self, layout: Layout, shape: tuple[int, ...]) -> Storage:
        return Storage(layout, shape, self.mesh, self.coordinate)

    def storage_of(self, tensor: DTensor) -> Storage:
        """Return how this rank stores its part of a DTensor on this mesh."""
        return self.storage(layout_of_placements(tensor.placements, self.mesh), tuple(tensor.shape))


def place_of(device_mesh: DeviceMesh, device: torch.device | None = None) -> Place:
    """Return this rank's place on `device_mesh`. Raises MeshError if it is not part of it."""
    mesh = mesh_of(device_mesh)
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(f"this rank is not in the mesh {mesh} of ranks {list(mesh.ranks)}; call autoshard on those")
    if device is None:
        kind = device_mesh.device_type
        device = torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    return Place(device_mesh, mesh, tuple(coordinate), device)


def distributed_copy(module: nn.Module, place: Place, layouts: Mapping[str, Layout] | None) -> nn.Module:
    """Return a copy of `module` that shares nothing with it; `layouts` are by FQN, None: all parameters replicated.

    Parameters are copied one at a time, and only this rank's part of each is kept. Parameters on meta stay on meta.
    Raises CaptureError if a module holds an object that cannot be copied.
    """
    memo: dict[int, Any] = {**copies_of_computed(module)}
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in memo:
            layout = replicated(place.mesh) if layouts is None else layouts[fqn]
            memo[id(parameter)] = distributed_parameter(parameter, place, layout)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to(_device(buffer, place), copy=True)
    try:
        copied = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, copy.Error) as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be copied: {error}; "
            "keep what cannot be copied (locks, files, process groups) out of the module's attributes"
        ) from error
    teach_checkpoints(_boxes)
    refuse_wrong_views()
    write_to_parts(part_like)
    assign_data(part_like)
    draw_whole(part_like)
    reduce_empty_parts()
    correct_wrong_rules()
    for child in copied.modules():
        child.register_load_state_dict_pre_hook(_take_parts)  # type: ignore[no-untyped-call]
    return copied


def _device(tensor: torch.Tensor, place: Place) -> torch.device:
    return tensor.device if tensor.is_meta else place.device


def distributed_parameter(parameter: nn.Parameter, place: Place, layout: Layout) -> nn.Parameter:
    """Return a parameter that holds this rank's part of `parameter`, with its Python attributes and its gradient's hooks."""
    storage = place.storage(layout, tuple(parameter.shape))
    part = storage.part_of(parameter.detach()).to(_device(parameter, place), copy=True)
    tensor = distributed_tensor(part.contiguous(), storage, place)
    made = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    made.__dict__.update({key: value for key, value in parameter.__dict__.items() if key not in made.__dict__})
    _copy_hooks(parameter, made)
    return made


def _copy_hooks(parameter: nn.Parameter, made: nn.Parameter) -> None:
    """Register the hooks of a parameter's gradient on `made`, also of one that is frozen now."""
    hooks = (*(parameter._backward_hooks or {}).values(),)
    after = (*(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values(),)
    if hooks or after:
        made.requires_grad_(True)
        for hook in hooks:
            made.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in after:
            made.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        made.requires_grad_(parameter.requires_grad)


def distributed_tensor(part: torch.Tensor, storage: Storage, place: Place) -> DTensor:
    """Return a DTensor of this rank's stored part."""
    placements = dtensor_placements(storage.layout, place.mesh)
    return dtensor_of_local(part, dtensor_spec(place.device_mesh, placements, storage.shape, part.dtype))


def plain_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a distributed module with plain parameters of global shape, on meta.

    Buffers and all attributes that are not modules are shared with `module`: the copy can be read, but not run.
    """
    return _with_parameters(module, lambda one: torch.empty(one.shape, dtype=one.dtype, device="meta"))


def whole_copy(module: nn.Module, *, is_kept: bool) -> nn.Module:
    """Return a plain copy with the values of all ranks, on the CPU; where it is not `is_kept`, on meta.

    All ranks call it together.
    """

    def whole(parameter: torch.Tensor) -> torch.Tensor:
        gathered = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        return gathered.detach().to("cpu" if is_kept else "meta")

    return _with_parameters(module, whole)


def _with_parameters(module: nn.Module, value_of: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a copy of `module` that has other parameters; tied ones stay tied."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(value_of(parameter), requires_grad=parameter.requires_grad)
    for tensor in (*module.buffers(), *reachable_tensors(module)):
        memo.setdefault(id(tensor), tensor)  # a list of parameters, as an LSTM has, holds none of its own
    return copy.deepcopy(module, memo)


def lay_out(module: nn.Module, place: Place, layouts: Mapping[str, Layout]) -> None:
    """Store every parameter as `layouts` says, in place and without communication.

    Raises CompilerError for a parameter that is already stored in another way than replicated.
    """
    done: set[int] = set()
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        if not isinstance(parameter, DTensor):
            raise CompilerError(f"parameter {fqn} is a {type(parameter).__name__}, not a DTensor")
        if id(parameter) in done or place.storage_of(parameter).layout == layouts[fqn]:
            continue
        done.add(id(parameter))
        if not place.storage_of(parameter).layout.is_replicated:
            raise CompilerError(f"parameter {fqn} is stored as {parameter.placements} and cannot change that")
        storage = place.storage(layouts[fqn], tuple(parameter.shape))
        part = storage.part_of(local_of_dtensor(parameter)).clone(memory_format=torch.contiguous_format)
        placements = dtensor_placements(storage.layout, place.mesh)
        relay_dtensor(parameter, part, dtensor_spec(place.device_mesh, placements, storage.shape, part.dtype))


def _take_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Cut each whole tensor of a state_dict to this rank's part before it is loaded, without communication."""
    for name, parameter in module._parameters.items():
        key = prefix + name
        given = state_dict.get(key)
        if not isinstance(parameter, DTensor) or not isinstance(given, torch.Tensor):
            continue
        if given.shape == parameter.shape:
            state_dict[key] = part_like(given, parameter)


def _boxes(tensor: DTensor) -> tuple[Box, ...] | None:
    """Return the boxes of a part that consists of several; None if DTensor can compute the part itself."""
    if all((shard_of(placement) or (0, 1))[1] == 1 for placement in tensor.placements):
        return None
    boxes = place_of(tensor.device_mesh).storage_of(tensor).boxes()
    return boxes if len(boxes) > 1 else None


def part_like(given: torch.Tensor, parameter: DTensor) -> DTensor:
    """Return `given`, a whole tensor or a DTensor of any layout, laid out as `parameter` is."""
    place = place_of(parameter.device_mesh, local_of_dtensor(parameter).device)
    storage = place.storage_of(parameter)
    if isinstance(given, DTensor):
        if given.device_mesh == parameter.device_mesh and given.placements == parameter.placements:
            return distributed_tensor(local_of_dtensor(given), storage, place)
        given = given.full_tensor()
    part = storage.part_of(given.detach())
    device = part.device if place.device.type == "meta" else place.device
    part = part.to(device).contiguous()
    is_view = part.numel() < given.numel() and part.untyped_storage().nbytes() > part.nbytes
    return distributed_tensor(part.clone() if is_view else part, storage, place)  # a view would keep all of `given`
