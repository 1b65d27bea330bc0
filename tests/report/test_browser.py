"""The page of a plan in a real headless Chromium: no errors, and what it shows follows what is clicked and typed.

`make test-browser` runs it. The browser is that of `CHROMIUM`, one on the PATH, or playwright's own. With
`SCREENSHOTS=folder` the pictures are kept.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from autoshard import ShardingPlan
from tests.report.plans import deep, followed, searched, tiny_llama, unknown_hardware

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

sync_api = pytest.importorskip("playwright.sync_api")

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-headless-shell", "google-chrome")
TABS = ("overview", "timeline", "tensor", "collectives", "roofline", "program", "remarks")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Page]:
    """Open a page that fails the test at its end for whatever the console complained of, and for any request."""
    made = browser.new_page(viewport={"width": 1500, "height": 900}, color_scheme=request.param)
    made.set_default_timeout(10_000)
    complaints: list[str] = []
    made.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    made.on("pageerror", lambda error: complaints.append(str(error)))
    made.on("request", lambda asked: complaints.append(asked.url) if not asked.url.startswith(("file:", "data:")) else None)
    yield made
    made.close()
    assert complaints == []


def opened(page: Page, plan: ShardingPlan, folder: Path) -> float:
    """Return the seconds that the page takes to be there."""
    path = folder / "plan.html"
    plan.to_html(path)
    started = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_selector("#view table")
    return time.perf_counter() - started


def picture(page: Page, name: str) -> None:
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def says(page: Page, where: str, *texts: str) -> None:
    """Fail unless the element comes to hold each text."""
    for text in texts:
        sync_api.expect(page.locator(where)).to_contain_text(text)


def tab(page: Page, name: str) -> None:
    page.click(f"#tabs button[data-view={name}]")


def pixels(page: Page) -> str:
    """Return what the canvas shows."""
    shown: str = page.evaluate("document.getElementById('timeline').toDataURL()")
    return shown


@pytest.mark.parametrize("make", [tiny_llama, deep, searched, followed, unknown_hardware])
def test_every_view_of_every_plan_opens(page: Page, make: Callable[[], ShardingPlan], tmp_path: Path) -> None:
    opened(page, make(), tmp_path)
    for name in TABS:
        tab(page, name)
        assert page.inner_text("#view").strip()
        picture(page, f"{make.__name__}-{name}")


def test_the_tree_leads_to_modules_and_their_collectives_to_lines(page: Page, tmp_path: Path) -> None:
    opened(page, tiny_llama(), tmp_path)
    page.click("#tree .label:text-is('wo')")
    says(page, "#details", "layers.0-1.attention.wo", "In[B_dp, H_tp, S, E] . W[H_tp, E, D_dp] -> [B_dp, S_tp, D]")
    page.click("#details a:has-text('reduce_scatter')")
    says(page, "#details", "megatron: row-parallel output")
    page.click("#details a:has-text('llama.py:')")
    says(page, "#details pre", "self.wo(out.transpose(1, 2).flatten(2))")
    page.click("#details a:has-text('layers.0-1.attention.wo')")
    page.click("#details a:has-text('layers.0-1.attention.wo.weight')")
    page.click("#details a:has-text('in the program')")
    says(page, ".program .picked", "layers.0.attention.wo.weight")


def test_a_collective_leads_to_the_value_that_it_moves(page: Page, tmp_path: Path) -> None:
    opened(page, tiny_llama(), tmp_path)
    tab(page, "collectives")
    page.fill("#view input", "row-parallel")
    page.click("#collectives tbody tr")
    moved = page.inner_text("#details div:has(> h2:text('moves')) a")  # waits for it
    page.click(f"#details a:text-is('{moved}')")
    says(page, "#details", f"value {moved}", "per rank")


def test_the_timeline_zooms_and_says_who_is_live(page: Page, tmp_path: Path) -> None:
    opened(page, tiny_llama(), tmp_path)
    tab(page, "timeline")
    page.wait_for_selector("#live table tr")
    whole = pixels(page)
    box = page.locator("#timeline").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 50)
    early = page.inner_text("#live")
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 50)
    assert page.inner_text("#live") != early
    page.mouse.wheel(0, -900)
    page.wait_for_timeout(100)
    near = pixels(page)
    assert near != whole
    page.mouse.down()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 50)
    page.mouse.up()
    assert pixels(page) != near
    page.click("text=peak of memory")
    assert tiny_llama().cost is not None
    peak = page.inner_text("#live b")
    assert peak.startswith(f"{tiny_llama().cost.peak_memory / 2**20:.1f} MiB at ")
    page.click("text=whole step")
    timeline = tiny_llama().timeline
    assert timeline is not None
    spans = zip(timeline.program.tasks, timeline.starts, timeline.ends, strict=True)
    _, middle = max((end - start, (start + end) / 2) for task, start, end in spans if not task.is_collective)
    page.mouse.click(box["x"] + middle / timeline.step_time * box["width"], box["y"] + 50)
    page.wait_for_selector("#details dt:text-is('takes')")
    picture(page, "picked")


def test_search_finds_modules_lines_values_and_collectives(page: Page, tmp_path: Path) -> None:
    opened(page, tiny_llama(), tmp_path)
    tab(page, "timeline")
    page.wait_for_selector("#live table tr")
    before = pixels(page)
    page.fill("#search", "attention.wo")
    kinds = {one.get_attribute("data-kind") for one in page.query_selector_all("#found .result")}
    assert kinds == {"module", "value", "collective"}
    assert pixels(page) != before
    page.fill("#search", "llama.py:69")
    page.click("#found .result[data-kind=line]")
    says(page, "#details", "line llama.py:69")
    picture(page, "search")
    page.fill("#search", "no such thing")
    assert page.inner_text("#found") == "nothing matches"
    page.fill("#search", "")
    assert page.is_visible("#tree")


def test_a_rank_shows_what_it_holds(page: Page, tmp_path: Path) -> None:
    opened(page, tiny_llama(), tmp_path)
    page.evaluate("location.hash = 'value=layers.0.feed_forward.w2.weight'")
    tab(page, "tensor")
    says(page, "#held", "rank 0 (dp=0, tp=0) holds dim 0: 0 to 31 of 64; dim 1: 0 to 87 of 176")
    page.hover("#mesh .rank >> nth=3")
    says(page, "#held", "rank 3 (dp=1, tp=1) holds dim 0: 32 to 63 of 64; dim 1: 88 to 175 of 176")
    page.mouse.move(0, 0)
    page.evaluate("location.hash = 'value=layers.0.feed_forward.w1.weight'")
    page.wait_for_selector("#held:has-text('rank 0 (dp=0, tp=0) holds dim 0: 0 to 43 of 176; dim 1: all 64')")


def test_the_cursor_keys_and_the_address_work(page: Page, tmp_path: Path) -> None:
    opened(page, tiny_llama(), tmp_path)
    page.goto(f"{(tmp_path / 'plan.html').as_uri()}#module=output")
    page.reload()
    says(page, "#details", "module output")
    page.keyboard.press("/")
    page.keyboard.type("wq")
    assert page.input_value("#search") == "wq"


def test_a_page_opens_at_once(page: Page, tmp_path: Path) -> None:
    assert opened(page, deep(), tmp_path) < 3.0
