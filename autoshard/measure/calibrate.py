"""Measure this machine and write its figures in the form of the presets.

    python -m autoshard calibrate -o machine.json                                  # one process: no links
    torchrun --nproc-per-node 8 -m autoshard calibrate --mesh dp=2,tp=4 -o machine.json

On one device: matrix products over sizes and dtypes, a copy, small kernels, attention (`device_figures`). Under torchrun
also each collective over each mesh axis and size, gloo on CPU and NCCL on CUDA, and products and collectives at the same
time (`link_figures`). The figures are fitted by the planner's own formulas (`fit_hardware`). A link that no axis uses keeps
the figures of this device's preset.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.config.topology import mesh_of
from autoshard.measure.clocks import CPU, CUDA, QUICK, world_size
from autoshard.measure.device_figures import measure_device
from autoshard.measure.fit_hardware import ProductTime, TransferTime, fit_links
from autoshard.measure.link_figures import measure_contention, measure_links
from passes.cost.collective_time import collective_seconds
from passes.cost.kernel_time import product_seconds
from passes.errors import UserError
from passes.hardware.hardware import Hardware
from passes.ir.mesh import Mesh
from passes.ir.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Calibration:
    """The figures of a machine, and the times that they were fitted to."""

    hardware: Hardware
    products: tuple[ProductTime, ...]
    transfers: tuple[TransferTime, ...]


def calibrate(mesh: str | DeviceMesh | None = None, *, device: str | None = None, is_quick: bool = False) -> Calibration:
    """Measure the device of this process, and in a world of several the links over each axis of `mesh`.

    `mesh` is as `"dp=2,tp=4"`, or a DeviceMesh, whose groups are then measured; by default one axis of all ranks. `device` is
    "cuda" if there is one, else "cpu".
    Every rank of a world has to call it, and gets the same figures: those of the slowest rank while all ranks do the same,
    as in training. Raises UserError for a mesh that does not have the world's size.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise UserError(f"device={device!r}: choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device='cuda': this process sees no CUDA device; choose cpu")
    effort = QUICK if is_quick else CUDA if device == "cuda" else CPU
    with _world(device) as size:
        axes = mesh_of(mesh or f"all={size}", hardware=None)
        if axes.size != size:
            raise UserError(
                f"mesh {axes} has {axes.size} ranks but the world has {size}; start as many processes "
                f"(torchrun --nproc-per-node {axes.size} ...)"
            )
        machine, products = _agreed(measure_device(device, effort))
        transfers: tuple[TransferTime, ...] = ()
        if size > 1:
            devices = mesh if isinstance(mesh, DeviceMesh) else init_device_mesh(device, axes.sizes, mesh_dim_names=axes.names)
            transfers = measure_links(machine, axes, devices, effort)
            contention, link_contention = measure_contention(axes, devices, effort)
            machine = replace(machine, contention=contention, link_contention=link_contention)
    machine = replace(fit_links(machine, transfers), sources=_sources(device, axes, transfers))
    return Calibration(machine, products, transfers)


@contextmanager
def _world(device: str) -> Iterator[int]:
    """Yield the size of the existing world, or of one that torchrun asks for, which is closed at the end."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized() or "TORCHELASTIC_RUN_ID" not in os.environ:
        yield dist.get_world_size() if dist.is_initialized() else 1
        return
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield dist.get_world_size()
    finally:
        dist.destroy_process_group()


def _agreed(measured: tuple[Hardware, tuple[ProductTime, ...]]) -> tuple[Hardware, tuple[ProductTime, ...]]:
    """Return what rank 0 measured, on every rank."""
    held = [measured]
    if world_size() > 1:
        dist.broadcast_object_list(held, src=0)
    return held[0]


def _sources(device: str, axes: Mesh, transfers: tuple[TransferTime, ...]) -> tuple[tuple[str, str], ...]:
    by = f"measured by calibrate on {device} with torch {torch.__version__}"
    links = {"inside" if time.group.nodes == 1 else "across" for time in transfers}
    sources = [(name, by) for name in ("flops", "memory_bandwidth", "launch", "tile", "attention")]
    sources += [("memory_bytes", "measured: as the device or the system says, divided among the node's processes")]
    sources += [("efficiency", "measured: 1, the rates are what products reach")]
    for link in ("inside", "across"):
        sources.append((link, f"{by}, over {axes}" if link in links else "not measured: that of the preset"))
    for name in ("contention", "link_contention"):
        sources.append((name, f"{by}, over {axes}" if transfers else "not measured: that of the preset"))
    return tuple(sources)


def format_calibration(calibration: Calibration) -> str:
    """Return the figures as text, and next to each measured time what the planner's formulas now predict."""
    machine = calibration.hardware
    inside, across = machine.inside, machine.across
    lines = [
        f"{machine.name}: {format_bytes(machine.memory_bytes)} at {machine.memory_bandwidth / 1e9:.1f} GB/s, "
        f"launch {format_seconds(machine.launch)}, tile {machine.tile} x {machine.units}, "
        f"attention {machine.attention:.0%}",
        "rates: " + ", ".join(f"{dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in machine.flops),
        *(
            f"{where}: {link.bandwidth / 1e9:.2f} GB/s, {format_seconds(link.latency)} a step, "
            f"{format_seconds(link.setup)} setup"
            for where, link in (("inside", inside), ("across", across))
        ),
        *([_format_contention(machine)] if calibration.transfers else ()),
        "",
        f"{'':<34} {'measured':>10} {'formula':>10}",
    ]
    for product in calibration.products:
        shape = product.product
        formula = product_seconds(shape, product.nbytes, product.dtype, machine)
        what = f"{product.dtype} [{shape.m}, {shape.k}] x [{shape.k}, {shape.n}]"
        lines.append(f"{what:<34} {format_seconds(product.seconds):>10} {format_seconds(formula):>10}")
    for sent in calibration.transfers:
        formula = collective_seconds(sent.kind, sent.nbytes, sent.group, machine)
        what = f"{sent.kind} {'.'.join(sent.axes)} {format_bytes(sent.nbytes)}"
        lines.append(f"{what:<34} {format_seconds(sent.seconds):>10} {format_seconds(formula):>10}")
    return "\n".join(lines)


def _format_contention(machine: Hardware) -> str:
    return f"beside each other: kernels take {machine.contention:.0%} longer, collectives {machine.link_contention:.0%}"
