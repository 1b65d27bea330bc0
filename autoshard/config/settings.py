"""Store the options that a plan was made with as data for its file; a plan only runs with the same options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.config.options import Options, Overlap, Placements


@dataclass(frozen=True)
class Settings:
    """Options that a plan depends on, by name, and the mode, device and torch version of its capture."""

    options: Mapping[str, object]  # JSON values
    training: bool  # forward and backward, or the forward alone
    device: str  # of the captured graph: "cpu" or "cuda"; some ops differ
    torch: str  # version


def settings_of(options: Options, *, training: bool, device: str) -> Settings:
    """Return what a plan made with these options depends on."""
    policy = options.mixed_precision
    described: dict[str, object] = {
        "recipe": dict(options.recipe) if isinstance(options.recipe, Mapping) else options.recipe,
        "params": _placements(options.params),
        "inputs": _placements(options.inputs),
        "outputs": _placements(options.outputs),
        "mixed_precision": None if policy is None else _policy(policy),
        "reshard_after_forward": options.reshard_after_forward,
        "recompute": options.recompute,
        "loss": options.loss,
        "overlap": _overlap(options),
        "passes": None if options.passes is None else [one.name for one in options.passes],
    }
    return Settings(described, training, device, torch.__version__)


def options_of(settings: Settings) -> Options:
    """Return options that make the same plan again; the user's own pipeline is not saved and becomes the default."""
    given: dict[str, Any] = {name: value for name, value in settings.options.items() if name != "passes"}
    policy: Mapping[str, Any] | None = given["mixed_precision"]
    if policy is not None:
        dtypes = {name: getattr(torch, value) if isinstance(value, str) else value for name, value in policy.items()}
        given["mixed_precision"] = MixedPrecisionPolicy(**dtypes)
    if isinstance(given["overlap"], Mapping):
        given["overlap"] = Overlap(**given["overlap"])
    return Options(**given)


def _overlap(options: Options) -> object:
    """Return True for the default `Overlap`, False for none, else the fields that differ from the defaults, by name."""
    given = options.hiding
    if given is None:
        return False
    default = asdict(Overlap())
    return {name: value for name, value in asdict(given).items() if value != default[name]} or True


def _placements(given: Placements | None) -> object:
    if given is None:
        return None
    return {name: {axis: str(placement) for axis, placement in axes.items()} for name, axes in given.items()}


def _policy(policy: MixedPrecisionPolicy) -> object:
    return {
        "param_dtype": _dtype(policy.param_dtype),
        "reduce_dtype": _dtype(policy.reduce_dtype),
        "output_dtype": _dtype(policy.output_dtype),
        "cast_forward_inputs": policy.cast_forward_inputs,
    }


def _dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
