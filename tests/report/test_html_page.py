"""The page is one file with everything in it, and its data agree with the plan."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard import ShardingPlan
from autoshard.inspection.report.html_page import format_page, page_data
from passes.base import Remark
from passes.ir.graph import Origin
from tests.report.plans import deep, searched, tiny_llama, unknown_hardware


@pytest.mark.slow
def test_the_page_needs_no_network(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    tiny_llama().to_html(path)
    text = path.read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=\"(?!data:)", text)
    assert "{{" not in text.replace("{{U", "")
    assert "<title>plan: dp=2,tp=2 h100</title>" in text


@pytest.mark.slow
def test_the_data_in_the_page_are_the_plan_whatever_it_says() -> None:
    said = Remark("propagate", "</script><b>&", Origin("a.b", "é.py", 3, "x < 1 </script>"), "mm")
    text = format_page(replace(searched(), remarks=(said,)))
    assert text.count("</script>") == 2
    (packed,) = re.findall(r'<script id="plan" type="text/plain">(.*?)</script>', text)
    data = zlib.decompress(base64.b64decode(packed))
    assert json.loads(data)["remarks"][0]["text"] == "</script><b>&"
    assert json.loads(data) == json.loads(json.dumps(page_data(replace(searched(), remarks=(said,)))))


@pytest.mark.slow
def test_tasks_and_buffers_stand_in_columns_of_one_length() -> None:
    timeline = deep().timeline
    step = page_data(deep())["step"]
    assert timeline is not None
    assert {len(column) for column in step["tasks"].values()} == {len(timeline.program.tasks)}
    assert {len(column) for column in step["buffers"].values()} == {len(timeline.program.buffers)}
    assert max(step["tasks"]["end"]) == round(1e6 * timeline.step_time, 3)


def test_every_parameter_is_there_with_its_part() -> None:
    data = page_data(tiny_llama())
    values = {value["name"]: value for value in data["values"] if value["role"] == "parameter"}
    assert list(values) == list(tiny_llama().parameters)
    value = values["layers.0.feed_forward.w1.weight"]
    assert (value["shape"], value["local"], value["placements"]) == ((176, 64), (44, 64), ["S(0/2)", "S(0)"])
    assert value["notation"] == "[N_tp.dp, D]"
    folded = {group["name"]: group["names"] for group in data["parameters"]}
    alike = [f"layers.{layer}.feed_forward.w{number}.weight" for layer in (0, 1) for number in (1, 3)]
    assert folded["layers.0-1.feed_forward.w{1,3}.weight"] == alike


def test_collectives_lead_to_lines() -> None:
    for one in page_data(tiny_llama())["collectives"]:
        assert re.fullmatch(r"\w+\.py:\d+", one["line"])
        assert one["source"] and one["reason"] and one["id"]


def test_a_page_without_a_step_has_the_rest() -> None:
    data = page_data(unknown_hardware())
    assert data["step"] is None and data["cost"] is None
    assert len(data["modules"]) == 4 and len(data["collectives"]) == 8


def test_the_page_of_a_loaded_plan_is_the_same() -> None:
    for plan in (deep(), searched()):
        assert format_page(ShardingPlan.from_json(plan.to_json())) == format_page(plan)
