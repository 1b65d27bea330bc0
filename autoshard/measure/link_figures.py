"""Measure the links of a world of processes: each collective over each mesh axis, and how much overlapping costs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoshard.measure.clocks import KIB, Effort, clock_of
from autoshard.measure.fit_hardware import TransferTime
from passes.hardware.hardware import Hardware
from passes.ir.collectives import ALL_GATHER, KINDS, REDUCE_SCATTER, Kind
from passes.ir.mesh import Mesh

c10d = torch.ops._c10d_functional

SMALL, REPEATS_OF_SMALL, REPEATS = 64 * KIB, 20, 3  # bytes of the largest short message; calls per round
LONGER = 1.5  # how much longer the one that outlasts takes alone: enough to cover all of the other when both are slowed
MOST_LOST = 0.9  # largest part of the hidden time that hiding may cost; above it, contentions would multiply to 1 or more


def measure_links(machine: Hardware, axes: Mesh, devices: DeviceMesh, effort: Effort) -> tuple[TransferTime, ...]:
    """Time every kind of collective over every axis; all groups of an axis send at the same time, as in training."""
    clock, placed = clock_of(devices.device_type, effort), Mesh(str(axes), hardware=machine)
    found = []
    for axis, ranks in zip(axes.names, axes.sizes, strict=True):
        for kind in timed_kinds() if ranks > 1 else ():
            for nbytes in effort.sent:
                start = _collective(kind, devices, axis, nbytes)
                call = _waited(start)
                call()
                repeats = REPEATS_OF_SMALL if nbytes <= SMALL else REPEATS
                seconds = clock.repeated(call, repeats)
                found.append(TransferTime(kind.name, (axis,), placed.group_shape((axis,)), nbytes, seconds))
    return tuple(found)


def timed_kinds() -> tuple[Kind, ...]:
    """Return the kinds of collectives that calibration can call."""
    return tuple(kind for kind in KINDS.values() if kind.timed is not None)


def measure_contention(axes: Mesh, devices: DeviceMesh, effort: Effort) -> tuple[float, float]:
    """Return `contention` and `link_contention`, measured on the largest axis.

    Products run concurrently with a gather and with a reduction of the largest message.
    """
    device, clock = devices.device_type, clock_of(devices.device_type, effort)
    edge, nbytes = effort.edges[-3], effort.sent[-1]
    left, right = (torch.randn(edge, edge, device=device) for _ in range(2))
    axis = max(zip(axes.sizes, axes.names, strict=True))[1]

    def multiply() -> None:
        left @ right

    once = clock.seconds(multiply)
    added, hidden = [0.0, 0.0], [0.0, 0.0]  # s: when products outlast messages, and vice versa
    for kind in (ALL_GATHER, REDUCE_SCATTER):
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
    """Return `contention` c and `link_contention` d, given what hiding costs as a part of what is hidden.

    Products that outlast messages take longer by A = c (1 + d) / (1 + c) of what the messages take alone, and messages
    that outlast products by B = d (1 + c) / (1 + d) of what the products take: `passes/cost/contention.py`.
    """
    a, b = (min(max(0.0, part), MOST_LOST) for part in (of_messages, of_products))
    return a * (1 - b) / (1 - a), b * (1 - a) / (1 - b)


def _waited(start: Callable[[], torch.Tensor]) -> Callable[[], object]:
    return lambda: c10d.wait_tensor(start())


def _collective(kind: Kind, devices: DeviceMesh, axis: str, nbytes: int) -> Callable[[], torch.Tensor]:
    """Return the call that a compiled graph makes."""
    device, group = devices.device_type, devices.get_group(axis)
    name, ranks = group.group_name, group.size()
    part = torch.zeros(max(1, nbytes // (4 * ranks)), device=device)
    whole = torch.zeros(part.numel() * ranks, device=device)
    timed = kind.timed
    assert timed is not None
    return lambda: timed(part, whole, ranks, name)
