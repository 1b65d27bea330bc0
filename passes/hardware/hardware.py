"""The figures of a machine: what one device computes, stores and moves, and the links between devices.

A preset holds figures from datasheets and published measurements, each with its source. `python -m autoshard calibrate`
measures a machine and writes a file of the same form; `hardware_named` reads both.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from passes.errors import UserError

SCHEMA = "autoshard.hardware/1"
PRESETS = files("passes.hardware") / "presets"  # a JSON file each, with a source for every figure


@dataclass(frozen=True)
class Link:
    """A link between devices: in a node, or between nodes."""

    name: str
    bandwidth: float
    """Bytes/s that a device sends in large messages while it receives as many."""
    latency: float
    """Seconds of one step of a ring with an empty message."""
    setup: float
    """Seconds before the first step: launch and handshake of a collective."""
    reduces: float = 0.0
    """Bytes/s at which a switch that reduces all-reduces a tensor, for any number of devices; 0: it cannot reduce. More than the
    bandwidth counts as the bandwidth."""

    @property
    def joins_memory(self) -> bool:
        """Return whether the linked devices can read and write each other's memory (symmetric memory)."""
        return self.name in ("NVLink", "NVSwitch")


@dataclass(frozen=True)
class Group:
    """The devices of a collective: their number, that of their nodes, and the number on the node with fewest."""

    ranks: int
    nodes: int = 1
    per_node: int = 0  # 0: ranks / nodes

    def __post_init__(self) -> None:
        if self.per_node == 0:
            object.__setattr__(self, "per_node", max(1, self.ranks // self.nodes))


@dataclass(frozen=True)
class Hardware:
    """The figures of one device and its links."""

    name: str
    flops: tuple[tuple[str, float], ...]
    """Dense FLOP/s of a matrix product by dtype (`"bf16"`, `"f32"`, ...; all float8 are `"f8"`)."""
    memory_bytes: int
    memory_bandwidth: float
    """Bytes/s that a large copy reads and writes, added."""
    launch: float
    """Seconds that every kernel takes besides its work."""
    node_size: int
    """Devices joined by the inside link; rank r is on node r // node_size."""
    inside: Link
    across: Link
    efficiency: float
    """Part of `flops` that a matrix product reaches, apart from what its edges waste."""
    attention: float
    """Part of `flops` that a fused attention forward reaches on long sequences."""
    tile: int
    """Edge of the square tile of results that one unit of a matrix product computes at a time."""
    units: int
    """Units that compute such tiles at the same time: the multiprocessors of a GPU."""
    spread: float = 0.0
    """Part of its time by which a product or an attention takes longer on the slowest device, for which the others wait."""
    contention: float = 0.0
    """Part of its time by which a kernel takes longer while a collective runs."""
    link_contention: float = 0.0
    """Part of its time by which a collective takes longer while kernels run; its product with `contention` is below 1."""
    scatter_sends_all: bool = False
    """True where a reduce-scatter moves as much as an all-reduce, as in gloo."""
    sources: tuple[tuple[str, str], ...] = ()
    """The source of each figure: (field, source), where a field of a link is "inside.latency"."""

    def __hash__(self) -> int:
        return hash(self.name)  # every cached price looks it up

    def rate(self, dtype: str) -> float:
        """Return the dense FLOP/s for a dtype, those of f32 for a dtype without a rate of its own."""
        rates = dict(self.flops)
        name = "f8" if dtype.startswith("f8") else dtype
        return rates[name] if name in rates else rates["f32"]

    @property
    def assumed(self) -> tuple[str, ...]:
        """Return the figures that are neither measured nor published, by their sources: "inside.latency"."""
        return self.resting_on("assumed")

    def resting_on(self, basis: str) -> tuple[str, ...]:
        """Return the figures that are "measured", "published" or "assumed", by their sources."""
        return tuple(field for field, source in self.sources if _basis(source) == basis)

    def to_json(self) -> str:
        """Return the text of a file that `hardware_named` reads."""
        return json.dumps({"schema": SCHEMA, **asdict(self), "flops": dict(self.flops), "sources": dict(self.sources)})

    @staticmethod
    def from_json(text: str, *, where: str = "hardware") -> Hardware:
        """Read what `to_json` wrote. Raises UserError that names the missing or wrong entry, and the origin `where`."""
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{where} is not JSON: {error}; write it with `python -m autoshard calibrate`") from error
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise UserError(f"{where} is no hardware file: its schema is not {SCHEMA!r}; calibrate writes one")
        return _parse(found, where)


def _basis(source: str) -> str:
    if "assumed" in source or "not measured" in source:
        return "assumed"
    return "measured" if source.startswith("measured") or "calibrate, " in source else "published"


@cache
def preset_names() -> tuple[str, ...]:
    """Return the names of the presets, sorted."""
    return tuple(sorted(file.name.removesuffix(".json") for file in PRESETS.iterdir() if file.name.endswith(".json")))


@cache
def hardware_named(name: str) -> Hardware:
    """Return the preset of that name, or the hardware in the JSON file at that path.

    Raises UserError for a name that is neither, and lists the presets.
    """
    key, presets = name.lower(), preset_names()
    if key in presets:
        file = PRESETS / f"{key}.json"
        return Hardware.from_json(file.read_text(encoding="utf-8"), where=str(file))
    path = Path(name)
    if path.suffix == ".json":
        if not path.is_file():
            raise UserError(f"hardware={name!r}: there is no such file; calibrate writes one")
        return Hardware.from_json(path.read_text(encoding="utf-8"), where=name)
    close = difflib.get_close_matches(key, presets, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UserError(
        f"unknown hardware {name!r}{hint}; choose one of {', '.join(presets)}, "
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
            spread=float(found["spread"]),
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
