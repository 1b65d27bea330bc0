"""Compare the way of attention that `context` chooses with each fixed one: `python -m benchmarks.context_ways`.

A layer of 32 heads of 128 dims on one causal sequence, over numbers of key heads, lengths, ranks and links: nodes of eight
behind NVSwitch, or one device a node. Per case: the way chosen, the simulated step of each way that can run, and the chosen
step as a part of the fastest. In the end, the worst of these. Nothing runs on devices.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import Mesh, Options, RecipeError
from autoshard.planner.make_plan import plan_ahead
from autoshard.planner.request import PlanRequest
from autoshard.plans.record import PlanRecord
from examples.llama import Config, step_of
from passes.hardware.hardware import Hardware, hardware_named

WAYS = ("gather", "ring", "all_to_all")
H100 = hardware_named("h100")
LINKS = {"NVSwitch": H100, "InfiniBand": replace(H100, name="h100, one a node", node_size=1)}
KV_HEADS, LENGTHS, RANKS = (1, 8, 32), (1 << 13, 1 << 16, 1 << 19), (2, 8, 16)
POLICY = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
KINDS = {"send": "ring", "all_to_all": "all_to_all", "all_gather": "gather"}  # of collectives, the first that a plan has


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=KV_HEADS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--links", nargs="+", choices=LINKS, default=tuple(LINKS))
    given = parser.parse_args()
    print(f"{'kv heads, length, ranks, link':34} {'chosen':11}{''.join(f'{way:>13}' for way in WAYS)}   chosen / fastest")
    worst = max(
        compared(kv_heads, length, ranks, link)
        for link, ranks, length, kv_heads in product(given.links, given.ranks, given.lengths, given.kv_heads)
    )
    print(f"worst: {worst:.4f}")


def compared(kv_heads: int, length: int, ranks: int, link: str) -> float:
    """Print a case, and return the step of the chosen way as a part of the fastest fixed one's."""
    chosen = planned(kv_heads, length, ranks, LINKS[link], "context")
    assert chosen is not None
    fixed = [planned(kv_heads, length, ranks, LINKS[link], f"context({way})") for way in WAYS]
    steps = [None if plan is None else _step(plan) for plan in fixed]
    ratio = _step(chosen) / min(step for step in steps if step is not None)
    cells = "".join(f"{'-' if step is None else f'{step * 1e3:.2f} ms':>13}" for step in steps)
    print(f"{f'{kv_heads}, {length}, {ranks}, {link}':34} {_way(chosen):11}{cells}   {ratio:.4f}", flush=True)
    return ratio


def planned(kv_heads: int, length: int, ranks: int, hardware: Hardware, recipe: str) -> PlanRecord | None:
    """Return the plan of a recipe, None if its way cannot run."""
    config = Config(layers=1, dim=4096, heads=32, kv_heads=kv_heads, hidden=4096, vocab=1024)
    with torch.device("meta"):
        model, args = step_of(config, 1, length)
    options = Options(recipe=recipe, mixed_precision=POLICY, memory_limit="10TB")
    try:
        plan, _ = plan_ahead(PlanRequest(model, args, {}, Mesh(f"cp={ranks}", hardware=hardware), options))
    except RecipeError:
        return None
    return plan


def _step(plan: PlanRecord) -> float:
    assert plan.cost is not None
    return plan.cost.step_time


def _way(plan: PlanRecord) -> str:
    kinds: Sequence[str] = [one.kind for one in plan.collectives]
    return next(way for kind, way in KINDS.items() if kind in kinds)


if __name__ == "__main__":
    main()
