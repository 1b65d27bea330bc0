"""Measure this machine: what it computes, holds and moves, in the form of the presets.

    python -m autoshard calibrate -o machine.json                                  # one process: no links
    torchrun --nproc-per-node 8 -m autoshard calibrate --mesh dp=2,tp=4 -o machine.json

Products over sizes and dtypes, a copy, small kernels, attention; under torchrun each collective over each axis of the
mesh, over sizes, gloo on CPU and NCCL on CUDA, and products and collectives beside each other. A link that no axis uses
keeps the figures of the preset of this device.
"""

from __future__ import annotations

import abc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.config.topology import hardware_of
from autoshard.measure.fit_hardware import ProductTime, TransferTime, fit_links, fit_products
from passes.cost.collective_time import collective_seconds
from passes.cost.kernel_time import Product, product_seconds
from passes.errors import UserError
from passes.hardware.hardware import Hardware, hardware_named
from passes.ir.mesh import Mesh
from passes.ir.text import DTYPES
from passes.ir.units import format_bytes, format_seconds

c10d = torch.ops._c10d_functional

KIB, MIB = 1 << 10, 1 << 20
LEAST = 1e-6  # s, that a call takes: one that a clock finds no time for
LONGER = 1.5  # times as long takes, alone, what is to outlast the other beside it
MOST_LOST = 0.9  # part of what is hidden, that it costs: of more, nothing is gained by hiding it
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True)
class Effort:
    """How much is measured: sizes, and how often each."""

    edges: tuple[int, ...]  # of square products
    copied: int  # bytes
    attended: int  # positions
    sent: tuple[int, ...]  # bytes
    rounds: int
    round: float  # s, of calls on the device at least


# Where processes share a core each has it for a tick of the system, 4 to 10 ms: a round on CPU is of many.
QUICK = Effort((32, 64, 128), 32 * MIB, 64, (4 * KIB, 1 * MIB), 3, 2e-3)
CPU = Effort((32, 64, 128, 256, 512, 1024), 256 * MIB, 512, (4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB), 7, 50e-3)
CUDA = Effort(
    (128, 256, 512, 1024, 2048, 4096, 8192), 1024 * MIB, 4096, (4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB), 11, 2e-3
)


@dataclass(frozen=True)
class Calibration:
    """The figures of a machine, and the times that they were fitted to."""

    hardware: Hardware
    products: tuple[ProductTime, ...]
    transfers: tuple[TransferTime, ...]


def calibrate(mesh: str | None = None, *, device: str | None = None, is_quick: bool = False) -> Calibration:
    """Measure the device of this process, and in a world of several the links over each axis of `mesh`.

    `mesh` is as `"dp=2,tp=4"`, by default one axis of all ranks; `device` is "cuda" where there is one, else "cpu".
    Every rank of a world has to call it, and gets the same figures: those of the slowest rank, while all do the same, as in
    training. Raises UserError for a mesh that is not of the world's size.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise UserError(f"device={device!r}: choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device='cuda': this process sees no CUDA device; choose cpu")
    effort = QUICK if is_quick else CUDA if device == "cuda" else CPU
    with _world(device) as size:
        axes = Mesh(mesh or f"all={size}")
        if axes.size != size:
            raise UserError(
                f"mesh {axes} has {axes.size} ranks but the world has {size}; start as many processes "
                f"(torchrun --nproc-per-node {axes.size} ...)"
            )
        machine, products = _agreed(_measure_device(device, effort))
        transfers: tuple[TransferTime, ...] = ()
        if size > 1:
            devices = init_device_mesh(device, axes.sizes, mesh_dim_names=axes.names)
            transfers = _measure_links(machine, axes, devices, effort)
            contention, link_contention = _measure_contention(axes, devices, effort)
            machine = replace(machine, contention=contention, link_contention=link_contention)
    machine = replace(fit_links(machine, transfers), sources=_sources(device, axes, transfers))
    return Calibration(machine, products, transfers)


@contextmanager
def _world(device: str) -> Iterator[int]:
    """The world that there is, or that torchrun asks for while this lasts; its size."""
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
    """What rank 0 measured."""
    held = [measured]
    if _ranks() > 1:
        dist.broadcast_object_list(held, src=0)
    return held[0]


# One device -------------------------------------------------------------------------------------------------------


def _measure_device(device: str, effort: Effort) -> tuple[Hardware, tuple[ProductTime, ...]]:
    clock, machine = _clock(device, effort), _blank(device)
    one = torch.zeros(1, device=device)
    machine = replace(machine, launch=clock.seconds(lambda: one.add(1.0)))
    source = torch.empty(effort.copied, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    machine = replace(machine, memory_bandwidth=2 * effort.copied / clock.seconds(lambda: copy.copy_(source)))
    products = tuple(_measure_products(device, effort, clock))
    machine = fit_products(machine, products)
    return replace(machine, attention=_measure_attention(device, effort, clock, machine)), products


def _blank(device: str) -> Hardware:
    """What is known of the device without measuring; the rest is the preset's, or the nearest one's."""
    known = hardware_of(device)
    machine = known or hardware_named("a100")
    if device == "cuda":
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        memory, units = int(found.total_memory), int(found.multi_processor_count)
        machine = replace(machine, name=found.name, memory_bytes=memory, units=units)
        return machine if known else replace(machine, node_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    size = dist.get_world_size() if dist.is_initialized() else 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes
    node_size = processes if processes < size else machine.node_size
    return replace(machine, memory_bytes=memory, units=torch.get_num_threads(), node_size=node_size)


def _measure_products(device: str, effort: Effort, clock: Clock) -> Iterator[ProductTime]:
    dtypes = ("bf16", "f16", "f32", "f64") if device == "cuda" else ("bf16", "f32", "f64")
    for name in dtypes:
        for edge in effort.edges:
            for shape in ((edge, edge, edge), (4 * edge, edge, edge // 4), (edge // 4, edge, 4 * edge)):
                rows, columns, terms = shape
                left = torch.randn(rows, terms, device=device).to(DTYPES[name])
                right = torch.randn(terms, columns, device=device).to(DTYPES[name])
                seconds = clock.seconds(lambda left=left, right=right: left @ right)  # type: ignore[misc]
                yield ProductTime(Product(1, *shape), name, left.element_size(), seconds)


def _measure_attention(device: str, effort: Effort, clock: Clock, machine: Hardware) -> float:
    """Part of the rate that a causal attention forward reaches, as `passes.cost.kernel_time.ATTENTION` counts it."""
    heads, width, positions = 8, 64, effort.attended
    dtype = "bf16" if device == "cuda" else "f32"
    query = torch.randn(1, heads, positions, width, device=device).to(DTYPES[dtype])
    seconds = clock.seconds(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True))
    flops = 4 * heads * width * positions * (positions + 1) / 2
    waste = 1 + machine.units * machine.tile / (2 * heads * positions)
    return min(1.0, flops * waste / (machine.rate(dtype) * max(seconds - machine.launch, seconds / 10)))


class Clock(abc.ABC):
    """Seconds of a call on the slowest of all ranks while all make it: the least of some rounds, each long enough to be
    measured; what else runs only adds. (On one rank it may be less than its share of a core gives it: others had more.)"""

    def __init__(self, device: str, effort: Effort) -> None:
        self._device, self._effort = device, effort

    def seconds(self, call: Callable[[], object]) -> float:
        call()
        once = max(self._together(call, 1), LEAST)
        return self.repeated(call, max(1, int(self._effort.round / once)))

    def repeated(
        self, call: Callable[[], object], repeats: int, *, beside: Callable[[], torch.Tensor] | None = None
    ) -> float:
        """As `seconds`, with so many calls a round; with what starts a collective `beside`, until that has ended."""
        return min(self._together(call, repeats, beside) for _ in range(self._effort.rounds)) / repeats

    def _together(self, call: Callable[[], object], repeats: int, beside: Callable[[], torch.Tensor] | None = None) -> float:
        if _ranks() == 1:
            return self._round(call, repeats, beside)
        dist.barrier()
        seconds = torch.tensor([self._round(call, repeats, beside)], dtype=torch.float64, device=self._device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds.item())

    @abc.abstractmethod
    def _round(self, call: Callable[[], object], repeats: int, beside: Callable[[], torch.Tensor] | None) -> float:
        """Seconds of all."""


def _clock(device: str, effort: Effort) -> Clock:
    return _CudaClock(device, effort) if device == "cuda" else _CpuClock(device, effort)


class _CpuClock(Clock):
    def _round(self, call: Callable[[], object], repeats: int, beside: Callable[[], torch.Tensor] | None) -> float:
        began = time.perf_counter()
        sent = beside and beside()
        for _ in range(repeats):
            call()
        if sent is not None:
            c10d.wait_tensor(sent)
        return time.perf_counter() - began


class _CudaClock(Clock):
    def _round(self, call: Callable[[], object], repeats: int, beside: Callable[[], torch.Tensor] | None) -> float:
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        began.record()
        sent = beside and beside()
        for _ in range(repeats):
            call()
        if sent is not None:
            c10d.wait_tensor(sent)
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# Links ------------------------------------------------------------------------------------------------------------


def _measure_links(machine: Hardware, axes: Mesh, devices: DeviceMesh, effort: Effort) -> tuple[TransferTime, ...]:
    """Every kind of collective over every axis; the groups of an axis send side by side, as they do in training."""
    clock, placed = _clock(devices.device_type, effort), Mesh(str(axes), hardware=machine)
    found = []
    for axis, ranks in zip(axes.names, axes.sizes, strict=True):
        for kind in KINDS if ranks > 1 else ():
            for nbytes in effort.sent:
                start = _collective(kind, devices, axis, nbytes)
                call = _waited(start)
                call()
                repeats = 20 if nbytes <= 64 * KIB else 3
                seconds = clock.repeated(call, repeats)
                found.append(TransferTime(kind, (axis,), placed.group_shape((axis,)), nbytes, seconds))
    return tuple(found)


def _measure_contention(axes: Mesh, devices: DeviceMesh, effort: Effort) -> tuple[float, float]:
    """`contention` and `link_contention`, of products beside a gather and a reduction of the largest message, over the axis
    of most ranks."""
    device, clock = devices.device_type, _clock(devices.device_type, effort)
    edge, nbytes = effort.edges[-3], effort.sent[-1]
    left, right = (torch.randn(edge, edge, device=device) for _ in range(2))
    axis = max(zip(axes.sizes, axes.names, strict=True))[1]

    def multiply() -> None:
        left @ right

    once = clock.seconds(multiply)
    added, hidden = [0.0, 0.0], [0.0, 0.0]  # s: where products outlast messages, and the other way round
    for kind in ("all_gather", "reduce_scatter"):
        start = _collective(kind, devices, axis, nbytes)
        sent = clock.repeated(_waited(start), 1)
        for number, part in enumerate((LONGER, 1 / LONGER)):
            repeats = max(1, round(part * sent / once))
            computed = repeats * clock.repeated(multiply, repeats)
            both = repeats * clock.repeated(multiply, repeats, beside=start)
            added[number] += both - max(computed, sent)
            hidden[number] += min(computed, sent)
    return contention_of(added[0] / hidden[0], added[1] / hidden[1])


def contention_of(of_messages: float, of_products: float) -> tuple[float, float]:
    """`contention` c and `link_contention` d of what hiding costs, as a part of what is hidden.

    Products that outlast messages take longer by A = c (1 + d) / (1 + c) of what the messages take alone, and messages that
    outlast products by B = d (1 + c) / (1 + d) of what the products take: `passes/cost/contention.py`.
    """
    a, b = (min(max(0.0, part), MOST_LOST) for part in (of_messages, of_products))
    return a * (1 - b) / (1 - a), b * (1 - a) / (1 - b)


def _waited(start: Callable[[], torch.Tensor]) -> Callable[[], object]:
    return lambda: c10d.wait_tensor(start())


def _collective(kind: str, devices: DeviceMesh, axis: str, nbytes: int) -> Callable[[], torch.Tensor]:
    """The call that a compiled graph makes."""
    device, group = devices.device_type, devices.get_group(axis)
    name, ranks = group.group_name, group.size()
    part = torch.zeros(max(1, nbytes // (4 * ranks)), device=device)
    whole = torch.zeros(part.numel() * ranks, device=device)
    even = [part.numel()] * ranks
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "all_gather": lambda: c10d.all_gather_into_tensor(part, ranks, name),
        "reduce_scatter": lambda: c10d.reduce_scatter_tensor(whole, "sum", ranks, name),
        "all_reduce": lambda: c10d.all_reduce(whole, "sum", name),
        "all_to_all": lambda: c10d.all_to_all_single(whole, even, even, name),
    }
    return calls[kind]


# Report -----------------------------------------------------------------------------------------------------------


def _sources(device: str, axes: Mesh, transfers: tuple[TransferTime, ...]) -> tuple[tuple[str, str], ...]:
    by = f"measured by calibrate on {device} with torch {torch.__version__}"
    links = {"inside" if time.group.nodes == 1 else "across" for time in transfers}
    sources = [(name, by) for name in ("flops", "memory_bandwidth", "launch", "tile", "attention")]
    sources += [("memory_bytes", "as the device or the system says, divided among the node's processes")]
    sources += [("efficiency", "1: the rates are what products reach")]
    for link in ("inside", "across"):
        sources.append((link, f"{by}, over {axes}" if link in links else "not measured: that of the preset"))
    for name in ("contention", "link_contention"):
        sources.append((name, f"{by}, over {axes}" if transfers else "not measured: that of the preset"))
    return tuple(sources)


def format_calibration(calibration: Calibration) -> str:
    """The figures, and beside each measured time what the planner's formulas now make of it."""
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
