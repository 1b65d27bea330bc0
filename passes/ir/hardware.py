"""A machine as figures: what one device computes, holds and moves, and the links between devices.

A preset is what datasheets and published measurements say, each figure with its source; `python -m autoshard
calibrate` measures a machine into the same form, which `hardware_named` reads from its file.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from passes.errors import UserError

SCHEMA = "autoshard.hardware/1"


@dataclass(frozen=True)
class Link:
    """What joins a device to others: those in its node, or those in other nodes."""

    name: str
    bandwidth: float
    """Bytes/s that a device sends on large messages, while it receives as many."""
    latency: float
    """Seconds that one step of a ring takes, with nothing to send."""
    setup: float
    """Seconds before the first step: launch and handshake of a collective."""
    reduces: float = 0.0
    """Bytes/s at which a switch that adds all-reduces a tensor, whatever the number of devices; 0: it cannot."""

    @property
    def joins_memory(self) -> bool:
        """Whether each of the devices that it joins reads and writes the memory of the others: symmetric memory."""
        return self.name in ("NVLink", "NVSwitch")


@dataclass(frozen=True)
class Group:
    """The devices of a collective: how many, on how many nodes, and how many it has on the node with fewest."""

    ranks: int
    nodes: int = 1
    per_node: int = 0  # 0: ranks / nodes

    def __post_init__(self) -> None:
        if self.per_node == 0:
            object.__setattr__(self, "per_node", max(1, self.ranks // self.nodes))


@dataclass(frozen=True)
class Hardware:
    """One device and its links."""

    name: str
    flops: tuple[tuple[str, float], ...]
    """Dense FLOP/s of a matrix product by dtype (`"bf16"`, `"f32"`, ...; all float8 are `"f8"`)."""
    memory_bytes: int
    memory_bandwidth: float
    """Bytes/s, read and written together, that a large copy achieves."""
    launch: float
    """Seconds that every kernel takes beside its work."""
    node_size: int
    """Devices joined by the inside link; rank r is on node r // node_size."""
    inside: Link
    across: Link
    efficiency: float
    """Part of `flops` that a matrix product without edges reaches."""
    attention: float
    """Part of `flops` that a fused attention forward reaches on long sequences."""
    tile: int
    """Edge of the square of results that one unit of a matrix product makes at a time."""
    units: int
    """How many such squares are made at once."""
    contention: float = 0.0
    """Part of its time by which a kernel takes longer while a collective runs beside it."""
    link_contention: float = 0.0
    """Part of its time by which a collective takes longer while kernels run beside it; times `contention` below 1."""
    scatter_sends_all: bool = False
    """A reduce-scatter moves as much as an all-reduce, as gloo's does."""
    sources: tuple[tuple[str, str], ...] = ()
    """Where each figure is from: (field, source)."""

    def __hash__(self) -> int:
        return hash(self.name)  # asked at every look-up of a cost

    def rate(self, dtype: str) -> float:
        """Dense FLOP/s for a dtype; that of f32 for one without a rate of its own."""
        rates = dict(self.flops)
        name = "f8" if dtype.startswith("f8") else dtype
        return rates[name] if name in rates else rates["f32"]

    def to_json(self) -> str:
        """Text that `hardware_named` reads from a file."""
        return json.dumps({"schema": SCHEMA, **asdict(self), "flops": dict(self.flops), "sources": dict(self.sources)})

    @staticmethod
    def from_json(text: str, *, where: str = "hardware") -> Hardware:
        """Inverse of `to_json`. Raises UserError naming what is missing or wrong, and `where` it was read."""
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{where} is not JSON: {error}; write it with `python -m autoshard calibrate`") from error
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise UserError(f"{where} is no hardware file: its schema is not {SCHEMA!r}; calibrate writes one")
        return _parse(found, where)


@cache
def hardware_named(name: str) -> Hardware:
    """The preset of that name, or the hardware in the JSON file of that path.

    Raises UserError for a name that is neither, with the presets there are.
    """
    key = name.lower()
    if key in _PRESETS:
        return _PRESETS[key]
    path = Path(name)
    if path.suffix == ".json":
        if not path.is_file():
            raise UserError(f"hardware={name!r}: there is no such file; calibrate writes one")
        return Hardware.from_json(path.read_text(encoding="utf-8"), where=name)
    close = difflib.get_close_matches(key, _PRESETS, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UserError(
        f"unknown hardware {name!r}{hint}; choose one of {', '.join(_PRESETS)}, "
        "or give the path of a .json that `python -m autoshard calibrate` wrote"
    )


def _parse(found: Mapping[str, Any], where: str) -> Hardware:
    try:
        return Hardware(
            name=str(found["name"]),
            flops=tuple((str(dtype), _positive(rate)) for dtype, rate in found["flops"].items()),
            memory_bytes=int(_positive(found["memory_bytes"])),
            memory_bandwidth=_positive(found["memory_bandwidth"]),
            launch=float(found["launch"]),
            node_size=int(_positive(found["node_size"])),
            inside=_parse_link(found["inside"]),
            across=_parse_link(found["across"]),
            efficiency=_positive(found["efficiency"]),
            attention=_positive(found["attention"]),
            tile=int(found["tile"]),
            units=int(_positive(found["units"])),
            contention=_contention(found),
            link_contention=float(found["link_contention"]),
            scatter_sends_all=bool(found["scatter_sends_all"]),
            sources=tuple((str(field), str(source)) for field, source in found["sources"].items()),
        )
    except KeyError as error:
        raise UserError(f"{where} lacks {error.args[0]!r}; calibrate anew") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{where} holds a figure that cannot be: {error}; correct it or calibrate anew") from error


def _parse_link(found: Mapping[str, Any]) -> Link:
    return Link(
        name=str(found["name"]),
        bandwidth=_positive(found["bandwidth"]),
        latency=float(found["latency"]),
        setup=float(found["setup"]),
        reduces=float(found["reduces"]),
    )


def _contention(found: Mapping[str, Any]) -> float:
    kernels, links = float(found["contention"]), float(found["link_contention"])
    if not (kernels >= 0 and links >= 0 and kernels * links < 1):
        raise ValueError(f"contention {kernels} and link_contention {links}: a product below 1 belongs there")
    return kernels


def _positive(value: Any) -> float:
    if not float(value) > 0:
        raise ValueError(f"{value} where a figure above 0 belongs")
    return float(value)


# Presets --------------------------------------------------------------------------------------------------------

_SHEET = "vendor datasheet, dense, SXM part"
_TABLES = "torch/_inductor/analysis/device_info.py"
_COPY = "0.9 of the datasheet's: a copy on one H200 achieves 4.3 of 4.8 TB/s"
_NCCL = "NCCL 2.27 tests on H100 published in the AutoParallel repository"
_RING = f"{_NCCL}: 22, 106, 442 us for a ring over 2, 8, 32 nodes = 8 + 14 (n - 1)"
_NVLINK = "vendor datasheet, half of what it gives for both directions"
_SIZED = "8192^3 reaches it less the edges: products reach 70-80 % of the dense rate"
_TILE = "128 x 128 results a thread block and one block an SM, as in CUTLASS's default kernels"
_FA2 = "FlashAttention-2 (Dao 2023): 0.50-0.73 of an A100; FlashAttention-3 (Shah 2024): version 2 has 0.35 of an H100"


def _nvlink(bandwidth: float) -> Link:
    # Latency and setup: _NCCL, 8, 17, 30 us for all-gathers over 2, 4, 8 GPUs, and 297, 599, 1204 us over 8, 16, 32
    # nodes of 8, in which 3.4 us is the part of each step inside a node.
    return Link("NVLink", bandwidth, latency=3.4e-6, setup=5.3e-6)


def _switch(bandwidth: float) -> Link:
    # _NCCL: all-reduce over 4 and 8 GPUs of an H100 node at 236 and 267 GB/s, that is 0.56 of the link.
    return Link("NVSwitch", bandwidth, latency=3.4e-6, setup=5.3e-6, reduces=0.56 * bandwidth)


def _network(name: str, rate: float) -> Link:
    # _NCCL: ring all-gathers over 2 to 32 nodes at 48 GB/s per GPU of a 50 GB/s network, that is 0.96 of the rate.
    return Link(name, 0.96 * rate, latency=14e-6, setup=8e-6)


_GPU_SOURCES = (
    ("launch", "2 to 5 us on a GPU kept busy: the lower end, as compiled code launches ahead"),
    ("inside.latency", f"{_NCCL}: 8, 17, 30 us over 2, 4, 8 GPUs; 297, 599, 1204 us over 8, 16, 32 nodes of 8"),
    ("across.bandwidth", f"0.96 of the network's rate: {_NCCL}: 48 of 50 GB/s per GPU"),
    ("across.latency", _RING),
    ("tile", _TILE),
    ("attention", _FA2),
    ("contention", "0: depends on the library's channels, and no published figure was found; calibrate measures it"),
    ("link_contention", "0: as contention"),
)
_HOPPER_RATES = (("bf16", 989e12), ("f16", 989e12), ("f8", 1979e12), ("tf32", 494e12), ("f32", 67e12), ("f64", 67e12))
_BLACKWELL_RATES = (("bf16", 2250e12), ("f16", 2250e12), ("f8", 4500e12), ("tf32", 1100e12), ("f32", 75e12))

_A100 = Hardware(
    name="a100",
    flops=(("bf16", 312e12), ("f16", 312e12), ("tf32", 156e12), ("f32", 19.5e12), ("f64", 19.5e12)),
    memory_bytes=80 * 10**9,
    memory_bandwidth=0.9 * 2.039e12,
    launch=2.5e-6,
    node_size=8,
    inside=_nvlink(300e9),
    across=_network("HDR InfiniBand", 25e9),
    efficiency=0.78,
    attention=0.62,
    tile=128,
    units=108,
    sources=(
        ("flops", f"{_SHEET}; {_TABLES} has 312.5 for bf16: the lower; f32 without tf32"),
        ("memory_bytes", f"{_SHEET}; {_TABLES}"),
        ("memory_bandwidth", _COPY),
        ("node_size", "HGX A100: 8 GPUs"),
        ("inside.bandwidth", _NVLINK),
        ("across", "HDR 200 Gb/s per GPU = 25 GB/s"),
        ("efficiency", _SIZED),
        ("units", "108 SMs"),
        *_GPU_SOURCES,
    ),
)
_A100_PCIE = replace(
    _A100,
    name="a100-pcie",
    inside=Link("PCIe gen4 x16", 24e9, latency=3.4e-6, setup=5.3e-6),
    sources=(
        *(source for source in _A100.sources if source[0] != "inside.bandwidth"),
        ("inside.bandwidth", "PCIe gen4 x16: 24 GB/s; its latency taken to be NVLink's, for want of a figure"),
    ),
)
_H100 = Hardware(
    name="h100",
    flops=_HOPPER_RATES,
    memory_bytes=80 * 10**9,
    memory_bandwidth=0.9 * 3.35e12,
    launch=2.5e-6,
    node_size=8,
    inside=_switch(450e9),
    across=_network("NDR InfiniBand", 50e9),
    efficiency=0.78,
    attention=0.35,
    tile=128,
    units=132,
    sources=(
        ("flops", f"{_SHEET}; {_TABLES}, halved where it counts sparsity; f32 without tf32"),
        ("memory_bytes", f"{_SHEET}; {_TABLES}"),
        ("memory_bandwidth", _COPY),
        ("node_size", "HGX H100: 8 GPUs"),
        ("inside.bandwidth", _NVLINK),
        ("inside.reduces", f"{_NCCL}: all-reduce of 4, 8 GPUs at 236, 267 GB/s"),
        ("across", "NDR / ConnectX-7 400 Gb/s per GPU = 50 GB/s"),
        ("efficiency", _SIZED),
        ("units", "132 SMs"),
        *_GPU_SOURCES,
    ),
)
_H200 = replace(
    _H100,
    name="h200",
    memory_bytes=141 * 10**9,
    memory_bandwidth=4.3e12,
    efficiency=0.81,
    sources=(
        ("memory_bytes", _SHEET),
        ("memory_bandwidth", "measured on one H200: device-to-device copy, read and written"),
        ("efficiency", "measured on one H200: 8192^3 in bf16 at 769-798 TFLOP/s: the lower, less the edges"),
        *(s for s in _H100.sources if s[0] not in ("memory_bytes", "memory_bandwidth", "efficiency")),
    ),
)
_B200 = Hardware(
    name="b200",
    flops=_BLACKWELL_RATES,
    memory_bytes=180 * 10**9,
    memory_bandwidth=0.9 * 7.7e12,
    launch=2.5e-6,
    node_size=8,
    inside=_switch(900e9),
    across=_network("NDR InfiniBand", 50e9),
    efficiency=0.75,
    attention=0.35,
    tile=128,
    units=148,
    sources=(
        ("flops", "vendor datasheet; public comparisons: the lower; f32 without tf32"),
        ("memory_bytes", "vendor datasheet, public comparisons: 180 to 192 GB: the lower"),
        ("memory_bandwidth", f"public comparisons: 7.7 to 8.0 TB/s: the lower; {_COPY}"),
        ("node_size", "HGX B200: 8 GPUs"),
        ("inside.bandwidth", _NVLINK),
        ("inside.reduces", "0.56 of the link, as on H100: no figure for this part"),
        ("across", "NDR / ConnectX-7 400 Gb/s per GPU = 50 GB/s"),
        ("efficiency", "products reach 70-80 % of the dense rate"),
        ("units", "148 SMs"),
        *_GPU_SOURCES,
    ),
)
_GB200 = replace(
    _B200,
    name="gb200",
    node_size=72,
    sources=(
        *(source for source in _B200.sources if source[0] not in ("flops", "node_size")),
        ("flops", "as B200: the vendor's 2.5 PFLOP/s for this part is of a higher power limit; the lower"),
        ("node_size", "GB200 NVL72: 72 GPUs in one NVLink domain; a tray has 4"),
    ),
)
_LOOPBACK = Link("loopback", 0.31e9, latency=0.5e-3, setup=0.0)
_CPU = Hardware(
    name="cpu",
    flops=(("bf16", 127e9), ("f32", 103e9), ("f64", 38e9)),
    memory_bytes=12 * 10**9,
    memory_bandwidth=9.9e9,
    launch=2.7e-6,
    node_size=1024,
    inside=_LOOPBACK,
    across=_LOOPBACK,
    efficiency=1.0,
    attention=0.18,
    tile=32,
    units=1,
    scatter_sends_all=True,
    sources=(
        ("*", "calibrate, 2 gloo ranks of one core each on 2 cores (AMD EPYC) and 23 GiB, torch 2.13, machine in use"),
        ("inside.latency", "1 KiB takes 0.3-0.9 ms over 2 ranks, 2-8 ms over 4 that share 2 cores"),
        ("node_size", "all ranks on one machine: there is no figure for a network"),
        ("scatter_sends_all", "gloo's reduce-scatter moves 2 (k - 1) / k N"),
        ("contention", "0: 0.1 to 0.5 with 2 ranks, a core each, on a loopback of 1 Gbit/s, by its rate; calibrate measures it"),
        ("link_contention", "0: less than 0.05 there; 0.1 to 0.3 with 4 ranks on 2 cores, 3 Gbit/s; calibrate measures it"),
    ),
)
_PRESETS = {preset.name: preset for preset in (_A100, _A100_PCIE, _H100, _H200, _B200, _GB200, _CPU)}
