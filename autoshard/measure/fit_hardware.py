"""Fit the figures of a machine to measured times, by the formulas in which the planner uses them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.cost.kernel_time import EDGE, FILL, ROUND, Product
from passes.hardware.hardware import Group, Hardware, Link
from passes.ir.collectives import KINDS, Fabric

# Thresholds for noisy times, chosen so that tests/measure/test_figures.py recovers known figures from simulated times.
TILES = (4, 8, 16, 32, 64, 128, 256)  # edges to try: powers of two, from a CPU register block to a large GPU thread block
BOUND_BY_MEMORY = 0.7  # part of a product's time: if memory traffic takes more, the time says little about FLOP/s
LONG = 4  # in launch times: a shorter product says little about FLOP/s
LEAST_WORK = 0.1  # minimum part of a kernel's time that counts as work, even if the launch would explain all of it
SWITCH_GAIN = 0.92  # part of a ring's time per byte: a faster all-reduce was done by the switch (NVLink SHARP)
BYTES_PART = 0.25  # minimum part of the largest message's time that counts as bandwidth, not latency
LEAST_PART = 0.05  # minimum part of a measured time that a link gets, even if the fit leaves nothing for it


@dataclass(frozen=True)
class ProductTime:
    """The seconds that a matrix product took."""

    product: Product
    dtype: str
    itemsize: int
    seconds: float

    @property
    def nbytes(self) -> float:
        """Return the bytes of operands and result."""
        m, n, k = self.product.m, self.product.n, self.product.k
        return float(self.product.batch * self.itemsize * (m * n + n * k + m * k))


@dataclass(frozen=True)
class TransferTime:
    """The seconds that a collective took on the slowest rank; `nbytes` are of the larger side of a rank."""

    kind: str
    axes: tuple[str, ...]
    group: Group
    nbytes: int
    seconds: float


def fit_products(machine: Hardware, times: Sequence[ProductTime]) -> Hardware:
    """Return `machine` with the tile and the rates by dtype that explain the times best; `efficiency` becomes 1.

    By its rate, all products of a dtype together take as long as they took. A dtype that was not measured, or only in
    products that bytes or launches dominate, keeps the rate that `machine` reaches.
    """
    limit = BOUND_BY_MEMORY * machine.memory_bandwidth  # bytes/s
    useful = [one for one in times if one.nbytes < limit * one.seconds and one.seconds > LONG * machine.launch] or times
    works = {tile: _works(useful, machine, tile) for tile in TILES}
    tile = min(TILES, key=lambda tile: sum(map(_spread, works[tile].values())))
    rates = {dtype: rate * machine.efficiency for dtype, rate in machine.flops}
    rates |= {dtype: _rate(measured) for dtype, measured in works[tile].items()}
    return replace(machine, flops=tuple(rates.items()), efficiency=1.0, tile=tile)


def _works(times: Sequence[ProductTime], machine: Hardware, tile: int) -> dict[str, list[tuple[float, float]]]:
    """Return, by dtype, the FLOPs of each product, with what its edges waste, and its seconds without the launch."""
    found: dict[str, list[tuple[float, float]]] = {}
    for time in times:
        product, edge = time.product, EDGE * tile
        squares = product.batch * (product.m + edge) * (product.n + edge) + ROUND * machine.units * tile**2
        seconds = work_seconds(time.seconds, machine)
        found.setdefault(time.dtype, []).append((2 * (product.k + FILL * tile) * squares, seconds))
    return found


def work_seconds(seconds: float, machine: Hardware) -> float:
    """Return the seconds of a measured kernel without its launch."""
    return max(seconds - machine.launch, LEAST_WORK * seconds)


def _rate(works: Sequence[tuple[float, float]]) -> float:
    return sum(flops for flops, _ in works) / sum(seconds for _, seconds in works)


def _spread(works: Sequence[tuple[float, float]]) -> float:
    rates = [math.log(flops / seconds) for flops, seconds in works]
    mean = sum(rates) / len(rates)
    return sum((rate - mean) ** 2 for rate in rates)


def fit_links(machine: Hardware, times: Sequence[TransferTime]) -> Hardware:
    """Return `machine` with the links that explain the times of gathers and reductions; an unused link stays."""
    lines = _lines(machine, times)
    inside = [line for line in lines if line.group.nodes == 1]
    if inside:
        machine = replace(machine, inside=_fit_inside(machine, inside))
    across = [line for line in lines if line.group.nodes > 1]
    if across:
        machine = replace(machine, across=_fit_across(machine, across))
    return machine


@dataclass(frozen=True)
class _Line:
    """A collective's time as a line over bytes."""

    kind: str
    group: Group
    sweeps: int  # around the ring
    start: float  # s
    slope: float  # s/byte


def _lines(machine: Hardware, times: Sequence[TransferTime]) -> list[_Line]:
    of: dict[tuple[str, Group], list[TransferTime]] = {}
    for time in times:
        if KINDS[time.kind].sweeps is not None:
            of.setdefault((time.kind, time.group), []).append(time)
    lines = []
    for (kind, group), measured in of.items():
        small, large = (choose(measured, key=lambda time: time.nbytes) for choose in (min, max))
        # Under load a small message may take as long as a large one; the bytes still cost time.
        least = BYTES_PART * large.seconds / large.nbytes
        slope = max((large.seconds - small.seconds) / (large.nbytes - small.nbytes), least)
        sweeps = KINDS[kind].sweeps
        assert sweeps is not None
        count = sweeps(Fabric(scatter_sends_all=machine.scatter_sends_all))
        lines.append(_Line(kind, group, count, small.seconds, slope))
    return lines


def _fit_inside(machine: Hardware, lines: Sequence[_Line]) -> Link:
    steps = [_steps(machine, line, line.group.ranks) for line in lines]
    setup, latency = _fit_latency(steps, [line.start for line in lines])
    copied = 2 / machine.memory_bandwidth
    rings = _rings(machine, lines)
    per_byte = _fit_slope([_part(line) for line in rings], [line.slope for line in rings], copied)
    # On two ranks a switch saves nothing.
    sums = [line for line in lines if line not in rings and line.group.ranks > 2]
    in_switch = [line for line in sums if line.slope < SWITCH_GAIN * (_part(line) * per_byte + copied)]
    reduces = 1 / max(line.slope for line in in_switch) if in_switch else 0.0
    return replace(machine.inside, bandwidth=1 / per_byte, latency=latency, setup=setup, reduces=reduces)


def _fit_across(machine: Hardware, lines: Sequence[_Line]) -> Link:
    steps = [_steps(machine, line, line.group.nodes) for line in lines]
    in_node = [line.sweeps * (line.group.ranks - line.group.nodes) * machine.inside.latency for line in lines]
    starts = [max(line.start - part, LEAST_PART * line.start) for line, part in zip(lines, in_node, strict=True)]
    setup, latency = _fit_latency(steps, starts)
    rings = _rings(machine, lines)
    parts = [_part(line) / line.group.per_node for line in rings]
    per_byte = _fit_slope(parts, [line.slope for line in rings], 0.0)
    return replace(machine.across, bandwidth=1 / per_byte, latency=latency, setup=setup)


def _steps(machine: Hardware, line: _Line, places: int) -> float:
    """Return the steps of a small message over ranks of a node, or over nodes: a tree's where the library has trees."""
    ring = line.sweeps * (places - 1)
    return ring if machine.scatter_sends_all else min(ring, 2 * math.log2(places))


def _rings(machine: Hardware, lines: Sequence[_Line]) -> Sequence[_Line]:
    """Return the lines of rings: gloo has nothing else; with NCCL an all-reduce may have gone through a tree or a switch."""
    return [line for line in lines if machine.scatter_sends_all or line.sweeps == 1] or lines


def _part(line: _Line) -> float:
    """Return the part of the bytes that each rank sends around the ring."""
    return line.sweeps * (line.group.ranks - 1) / line.group.ranks


def _fit_latency(steps: Sequence[float], starts: Sequence[float]) -> tuple[float, float]:
    """Return setup and seconds per step, neither below 0, with the least relative error over all starts."""
    weights = 1 / np.array(starts)
    counts = np.array(steps)
    if len(set(steps)) > 1:
        rows = np.stack([weights, counts * weights], axis=1)
        setup, latency = np.linalg.lstsq(rows, np.ones(len(starts)), rcond=None)[0]
        if setup >= 0 and latency >= 0:
            return float(setup), float(latency)
    # Noise, or only one number of steps: attribute all to the steps, so that more ranks never seem to cost nothing.
    return 0.0, float((counts * weights).sum() / ((counts * weights) ** 2).sum())


def _fit_slope(parts: Sequence[float], slopes: Sequence[float], copied: float) -> float:
    """Return the link's seconds per byte, besides `copied` seconds per byte of memory, with the least relative error."""
    weights = 1 / np.array(slopes)
    sent, left = np.array(parts) * weights, (np.array(slopes) - copied) * weights
    per_byte = float((sent * left).sum() / (sent**2).sum())
    return max(per_byte, LEAST_PART * float((1 / weights).min()))
