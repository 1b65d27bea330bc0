"""How large the page of a deep plan is, and how long it takes to open: `python -m benchmarks.page`.

Llama 3 70B, all 80 layers, `fsdp` x `megatron` on 256 H100. Prints its bytes and, where `make test-browser` has installed a
headless Chromium, the seconds until the page is loaded and until its timeline is drawn.
"""

from __future__ import annotations

import os
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import Mesh, Options, plan
from examples.llama import llama3_70b

MESH = "dp=32,tp=8"
BATCH = 64


def main() -> None:
    with torch.device("meta"):
        model, args = llama3_70b(batch=BATCH)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = Options(recipe={"dp": "fsdp", "tp": "megatron"}, mixed_precision=policy)
    made = plan(model, Mesh(MESH, hardware="h100"), args, options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.html"
        started = time.perf_counter()
        made.to_html(path)
        print(f"{path.stat().st_size / 1e6:.2f} MB, written in {time.perf_counter() - started:.1f} s", flush=True)
        if find_spec("playwright") is None:
            print("not opened: playwright is not installed (`make test-browser` does)")
        else:
            _open(path)


def _open(path: Path) -> None:
    with import_module("playwright.sync_api").sync_playwright() as playwright:  # an extra: bytes are told without it
        browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 900})
        started = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_selector("#view table")
        there = time.perf_counter() - started
        page.click("#tabs button[data-view=timeline]")
        page.wait_for_selector("#timeline")
        print(f"there after {there:.2f} s, its timeline after {time.perf_counter() - started:.2f} s")
        browser.close()


if __name__ == "__main__":
    main()
