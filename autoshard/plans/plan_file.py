"""Save a plan as a JSON file with a schema and a version, one line per decision, without pickle.

    {"schema": "autoshard.plan", "version": 10, "fingerprint": "...", "checksum": "...", "mesh": {...}, "parameters": {...}, ...}

The fingerprint identifies what the plan was made for: mesh, model, settings. The checksum covers all members after it, so that
a file that was edited is refused: a layout that is changed in one place contradicts the program and its cost. Graphs and the
simulated step are compressed: they are the bulk of a plan, and `plan.graph(stage)` and the report read them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from autoshard.plans.codec import decode, encode
from autoshard.plans.record import PlanRecord
from passes.errors import PlanError

Plan = TypeVar("Plan", bound=PlanRecord)

SCHEMA, VERSION = "autoshard.plan", 10

_HEAD = "schema", "version", "fingerprint", "checksum"

_AGAIN = "make the plan again with `python -m autoshard plan ...` or plan(...).save(path)"


def dump_plan(plan: PlanRecord) -> str:
    """Return the plan as JSON text, which `parse_plan` reads back."""
    body = encode(plan)
    body["graphs"] = {stage: _pack(text) for stage, text in plan.graphs.items()}
    body["timeline"] = None if plan.timeline is None else _pack(_compact(body["timeline"]))
    data = dict(zip(_HEAD, (SCHEMA, VERSION, plan.fingerprint, _checksum(body)), strict=True)) | body
    members = (f"{json.dumps(name)}: {_lines(value)}" for name, value in data.items())
    return "{\n" + ",\n".join(members) + "\n}\n"


def parse_plan(kind: type[Plan], text: str, *, source: str = "the plan") -> Plan:
    """Parse the text of `dump_plan`. Raises PlanError that says which part of `source` is damaged and what to do."""
    try:
        return _parse(kind, text)
    except PlanError as error:
        raise PlanError(f"{source} cannot be read: {error}; {_AGAIN}") from error.__cause__


def write_text(path: Path, text: str) -> None:
    """Write a file atomically; one that a link leads to is written, and a device or a pipe is written into.

    Raises PlanError if it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path.resolve(), text)
    except OSError as error:
        raise PlanError(f"the plan cannot be written to {path}: {error.strerror}; give a path that can be") from error


def _replace(path: Path, text: str) -> None:
    """Write a file beside `path`, and put it in its place once it is whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def read_text(path: Path) -> str:
    """Return the text of a plan file. Raises PlanError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"the plan {path} cannot be read: {error.strerror}; give the path that it was saved to") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} cannot be read: it is no text, so not a plan; {_AGAIN}") from error


def _parse(kind: type[Plan], text: str) -> Plan:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise PlanError(f"it is not JSON, or was cut off ({place}: {error.msg})") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise PlanError(f"it is JSON, but not a plan: its schema is not {SCHEMA!r}")
    if data.get("version") != VERSION:
        raise PlanError(f"it has version {data.get('version')!r} of the format, and this autoshard reads {VERSION}")
    body = {name: value for name, value in data.items() if name not in _HEAD}
    checksum = _checksum(body)
    body["graphs"] = _unpack(body.get("graphs"))
    body["timeline"] = _unpack_timeline(body.get("timeline"))
    plan = decode(kind, body)
    _check_axes(plan)
    if data.get("fingerprint") != plan.fingerprint:
        raise PlanError(
            "its mesh, settings, names or shapes are not those that it was saved with (the fingerprint differs)"
        )
    if data.get("checksum") != checksum:
        raise PlanError("it is not what was saved, and a plan cannot be edited (the checksum differs)")
    return plan


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def _check_axes(plan: PlanRecord) -> None:
    """Raise PlanError if a layout does not have one placement per axis of the mesh."""
    if len(plan.recipes) != plan.mesh.ndim:
        raise PlanError(f"recipes has {len(plan.recipes)} entries for a mesh of {plan.mesh.ndim} axes")
    for section, values in (("parameters", plan.parameters), ("inputs", plan.inputs), ("outputs", plan.outputs)):
        for name, value in values.items():
            _check_layout(f"{section}.{name}", len(value.layout.placements), plan.mesh.ndim)
    for name, layout in plan.layouts.items():
        _check_layout(f"layouts.{name}", len(layout.placements), plan.mesh.ndim)


def _check_layout(where: str, found: int, axes: int) -> None:
    if found != axes:
        raise PlanError(f"{where} has {found} placements for a mesh of {axes} axes")


def _pack(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _unpack(packed: object) -> dict[str, str]:
    texts = decode(Mapping[str, str], packed, "graphs")  # type: ignore[type-abstract]
    try:
        return {stage: zlib.decompress(base64.b64decode(text, validate=True)).decode() for stage, text in texts.items()}
    except (binascii.Error, zlib.error, UnicodeDecodeError) as error:
        raise PlanError(f"graphs cannot be unpacked ({error})") from error


def _unpack_timeline(packed: object) -> Any:
    if packed is None:
        return None
    text = decode(str, packed, "timeline")
    try:
        return json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
    except (ValueError, zlib.error) as error:
        raise PlanError(f"timeline cannot be unpacked ({error})") from error


def _lines(value: Any) -> str:
    """Return JSON with a line per element of the outermost list or object."""
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"  {json.dumps(name)}: {_compact(one)}" for name, one in value.items()) + "\n}"
    if isinstance(value, list) and value and not isinstance(value[0], str):
        return "[\n" + ",\n".join(f"  {_compact(one)}" for one in value) + "\n]"
    return _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
