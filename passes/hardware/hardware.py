"""The figures of a machine: what one device computes, stores and moves, and the links between devices.

A preset holds figures from datasheets and published measurements, each with its source. `python -m autoshard calibrate`
measures a machine and writes a file of the same form; `hardware_named` reads both.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from passes.errors import UserError

SCHEMA = "autoshard.hardware/1"
PRESETS = files("passes.hardware") / "presets"  # a JSON file each, with a source for every figure
SHOWN_CHARACTERS = 60  # of a wrong entry, in a message


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
        except ValueError as error:  # a JSONDecodeError, or a number of thousands of digits
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


def hardware_named(name: str) -> Hardware:
    """Return the preset of that name, or the hardware in the JSON file at that path, as it is now.

    Raises UserError for a name that is neither, and lists the presets.
    """
    key, presets = name.lower(), preset_names()
    if key in presets:
        return _preset(key)
    if Path(name).suffix == ".json":
        return Hardware.from_json(_text_of(name), where=name)
    close = difflib.get_close_matches(key, presets, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UserError(
        f"unknown hardware {name!r}{hint}; choose one of {', '.join(presets)}, "
        "or give the path of a .json that `python -m autoshard calibrate` wrote"
    )


@cache
def _preset(key: str) -> Hardware:
    file = PRESETS / f"{key}.json"
    return Hardware.from_json(file.read_text(encoding="utf-8"), where=str(file))


def _text_of(file: str) -> str:
    if not Path(file).is_file():
        raise UserError(f"hardware={file!r}: there is no such file; calibrate writes one")
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not JSON: it is not text; write it with `python -m autoshard calibrate`") from error


def _parse(found: Mapping[str, Any], where: str) -> Hardware:
    entries = _Entries({name: value for name, value in found.items() if name != "schema"}, where)
    entries.check_names(Hardware)
    flops, sources = entries.inside("flops"), entries.inside("sources")
    machine = Hardware(
        name=entries.text("name"),
        flops=tuple((dtype, flops.figure(dtype)) for dtype in flops.found),
        memory_bytes=entries.count("memory_bytes"),
        memory_bandwidth=entries.figure("memory_bandwidth"),
        launch=entries.figure("launch", or_zero=True),
        node_size=entries.count("node_size"),
        inside=_parse_link(entries.inside("inside")),
        across=_parse_link(entries.inside("across")),
        efficiency=entries.part("efficiency"),
        attention=entries.figure("attention"),
        tile=entries.count("tile"),
        units=entries.count("units"),
        spread=entries.figure("spread", or_zero=True),
        contention=entries.figure("contention", or_zero=True),
        link_contention=entries.figure("link_contention", or_zero=True),
        scatter_sends_all=entries.flag("scatter_sends_all"),
        sources=tuple((field, sources.text(field)) for field in sources.found),
    )
    _check_together(machine, where)
    return machine


def _parse_link(entries: _Entries) -> Link:
    entries.check_names(Link)
    return Link(
        name=entries.text("name"),
        bandwidth=entries.figure("bandwidth"),
        latency=entries.figure("latency", or_zero=True),
        setup=entries.figure("setup", or_zero=True),
        reduces=entries.figure("reduces", or_zero=True),
    )


def _check_together(machine: Hardware, where: str) -> None:
    if "f32" not in dict(machine.flops):
        raise UserError(f"{where} lacks 'flops.f32', the rate of every dtype without one of its own; calibrate anew")
    if machine.contention * machine.link_contention >= 1:
        raise UserError(
            f"{where}: contention is {machine.contention} and link_contention {machine.link_contention}; give figures whose "
            "product is below 1, or calibrate anew"
        )


@dataclass(frozen=True)
class _Entries:
    """The entries of a hardware file, or of an object in it. Its methods raise UserError that names the file and the entry."""

    found: Mapping[str, Any]
    where: str
    prefix: str = ""

    def check_names(self, kind: type[Hardware | Link]) -> None:
        """Raise UserError for an entry that is no field of `kind`."""
        known = [field.name for field in fields(kind)]
        for name in self.found:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise UserError(f"{self.where} has an unknown entry {self.prefix + name!r}{hint}; known are {', '.join(known)}")

    def inside(self, name: str) -> _Entries:
        """Return the entries of the object of that name."""
        value = self._get(name)
        if not isinstance(value, dict):
            raise UserError(f"{self.where}: {self._shown(name)}; give an object: {{...}}")
        return _Entries(value, self.where, f"{self.prefix}{name}.")

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise UserError(f"{self.where}: {self._shown(name)}; give text")
        return value

    def flag(self, name: str) -> bool:
        value = self._get(name)
        if not isinstance(value, bool):
            raise UserError(f"{self.where}: {self._shown(name)}; give true or false")
        return value

    def figure(self, name: str, *, or_zero: bool = False) -> float:
        """Return a finite number above 0, or 0 where that is allowed."""
        value = self._get(name)
        if not _is_number(value) or value < 0 or (value == 0 and not or_zero):
            least = "of 0 or more" if or_zero else "above 0"
            raise UserError(f"{self.where}: {self._shown(name)}; give a finite number {least}, or calibrate anew")
        return float(value)

    def part(self, name: str) -> float:
        """Return a number above 0, up to 1."""
        value = self._get(name)
        if not _is_number(value) or not 0 < value <= 1:
            raise UserError(f"{self.where}: {self._shown(name)}; give a number above 0, up to 1, or calibrate anew")
        return float(value)

    def count(self, name: str) -> int:
        """Return a whole number above 0, which may be written as 80e9."""
        value = self._get(name)
        if not _is_number(value) or value < 1 or value != int(value):
            raise UserError(f"{self.where}: {self._shown(name)}; give a whole number above 0, or calibrate anew")
        return int(value)

    def _get(self, name: str) -> Any:
        if name not in self.found:
            raise UserError(f"{self.where} lacks {self.prefix + name!r}; calibrate anew")
        return self.found[name]

    def _shown(self, name: str) -> str:
        text = json.dumps(self.found[name])
        return f"{self.prefix}{name} is {text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + '...'}"


def _is_number(value: object) -> bool:
    """Return whether it is a finite number that a float can hold; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
