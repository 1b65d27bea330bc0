"""A file of a machine's figures is read as it is now; what cannot be is refused, by the name of the file and the entry."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard import Mesh, UserError
from passes.hardware.hardware import Hardware, hardware_named

FIELDS = (
    "name, flops, memory_bytes, memory_bandwidth, launch, node_size, inside, across, efficiency, attention, tile, units, spread, "
    "contention, link_contention, scatter_sends_all, sources"
)
POSITIVE = "; give a finite number above 0, or calibrate anew"
NOT_NEGATIVE = "; give a finite number of 0 or more, or calibrate anew"
WHOLE = "; give a whole number above 0, or calibrate anew"
PART = "; give a number above 0, up to 1, or calibrate anew"


def entries() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hardware_named("h100").to_json())
    return found


def message_of(found: Any) -> str:
    with pytest.raises(UserError) as caught:
        Hardware.from_json(json.dumps(found), where="m")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "m is not JSON: Expecting property name"),
        ("9" * 5000, "m is not JSON: Exceeds the limit (4300 digits) for integer string conversion"),
        ('{"schema": "else"}', "m is no hardware file: its schema is not 'autoshard.hardware/1'; calibrate writes one"),
        ('{"schema": "autoshard.hardware/1", "name": "x"}', "m lacks 'flops'; calibrate anew"),
    ],
)
def test_a_damaged_file(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        Hardware.from_json(text, where="m")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 10**400, True, None, "1e9", [1]])
@pytest.mark.parametrize(
    ("field", "advice"),
    [
        *((name, POSITIVE) for name in ("memory_bandwidth", "attention")),
        ("efficiency", PART),
        *((name, NOT_NEGATIVE) for name in ("launch", "spread", "contention", "link_contention")),
        *((name, WHOLE) for name in ("memory_bytes", "node_size", "tile", "units")),
    ],
)
def test_a_figure_that_cannot_be(field: str, advice: str, value: Any) -> None:
    shown = json.dumps(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    assert message_of(entries() | {field: value}) == f"m: {field} is {shown}{advice}"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bandwidth", 0, f"m: inside.bandwidth is 0{POSITIVE}"),
        ("latency", -1e-6, f"m: inside.latency is -1e-06{NOT_NEGATIVE}"),
        ("setup", True, f"m: inside.setup is true{NOT_NEGATIVE}"),
        ("reduces", float("nan"), f"m: inside.reduces is NaN{NOT_NEGATIVE}"),
        ("name", 3, "m: inside.name is 3; give text"),
        (
            "bandwith",
            1,
            "m has an unknown entry 'inside.bandwith' (did you mean 'bandwidth'?); known are name, bandwidth, latency, setup, "
            "reduces",
        ),
    ],
)
def test_a_link_that_cannot_be(field: str, value: Any, message: str) -> None:
    found = entries()
    found["inside"][field] = value
    assert message_of(found) == message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("memory_bytes", 80.5, f"m: memory_bytes is 80.5{WHOLE}"),
        ("efficiency", 1.5, f"m: efficiency is 1.5{PART}"),
        ("flops", {"bf16": -1}, f"m: flops.bf16 is -1{POSITIVE}"),
        ("flops", {"bf16": 1e12}, "m lacks 'flops.f32', the rate of every dtype without one of its own; calibrate anew"),
        ("flops", 1e12, "m: flops is 1000000000000.0; give an object: {...}"),
        ("scatter_sends_all", 1, "m: scatter_sends_all is 1; give true or false"),
        ("sources", {"flops": None}, "m: sources.flops is null; give text"),
        ("lunch", 1e-6, f"m has an unknown entry 'lunch' (did you mean 'launch'?); known are {FIELDS}"),
        ("xyz", 0, f"m has an unknown entry 'xyz'; known are {FIELDS}"),
    ],
)
def test_an_entry_that_cannot_be(field: str, value: Any, message: str) -> None:
    assert message_of(entries() | {field: value}) == message


def test_an_entry_of_a_link_is_lacking() -> None:
    found = entries()
    del found["across"]["latency"]
    assert message_of(found) == "m lacks 'across.latency'; calibrate anew"


def test_a_whole_number_may_be_written_as_a_float() -> None:
    found = Hardware.from_json(json.dumps(entries() | {"memory_bytes": 80e9}))
    assert isinstance(found.memory_bytes, int) and found == hardware_named("h100")


def test_contention_of_more_than_what_is_hidden_cannot_be() -> None:
    slow = replace(hardware_named("h100"), contention=2.0, link_contention=0.5)
    with pytest.raises(UserError) as caught:
        Hardware.from_json(slow.to_json(), where="m")
    assert str(caught.value) == (
        "m: contention is 2.0 and link_contention 0.5; give figures whose product is below 1, or calibrate anew"
    )


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(b"\x80\xff")
    with pytest.raises(UserError) as caught:
        Mesh("dp=2", hardware=str(path))
    assert str(caught.value) == f"{path} is not JSON: it is not text; write it with `python -m autoshard calibrate`"


def test_a_file_is_read_as_it_is_now(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    for launch in (1e-6, 2e-6):
        path.write_text(json.dumps(entries() | {"launch": launch}))
        assert hardware_named(str(path)).launch == launch
