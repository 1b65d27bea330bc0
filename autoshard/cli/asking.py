"""Commands `crossover` and `hsdp`: answer questions about a cluster with the cost formulas, without a model."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from autoshard.measure.crossover import Question, crossovers, format_crossovers
from autoshard.measure.hybrid_sharding import MOST, Cluster, format_shardings, shardings
from passes.errors import UserError
from passes.hardware.hardware import hardware_named


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    crossover = commands.add_parser("crossover", description=_crossover.__doc__)
    _add_hardware(crossover)
    crossover.add_argument("--devices", type=int, required=True, metavar="N")
    crossover.add_argument("--tokens", type=int, metavar="T", help="batch x sequence; the hidden size is asked for")
    crossover.add_argument("--hidden", type=int, metavar="H", help="the hidden size; the tokens are asked for")
    crossover.add_argument("--dtype", default="bf16", help="of x, weight and result (bf16)")
    crossover.add_argument("--link", choices=("inside", "across"), help="all on a node, or one on each (nodes filled)")
    crossover.add_argument("--training", action="store_true", help="a step with both gradients, nothing gathered")
    crossover.set_defaults(run=_crossover)
    hsdp = commands.add_parser("hsdp", description=_hsdp.__doc__)
    _add_hardware(hsdp)
    hsdp.add_argument("--nodes", type=int, default=100, metavar="N", help="full ones (100)")
    hsdp.add_argument("--per-node", type=int, metavar="P", help="devices on a node (the hardware's)")
    hsdp.add_argument("--parameters", type=float, default=8e9, metavar="P", help="of the model (8e9)")
    hsdp.add_argument("--buckets", type=int, default=32, metavar="N", help="collectives for a pass over the model (32)")
    hsdp.add_argument("--gathered", default="bf16", metavar="DTYPE", help="of parameters on the way (bf16)")
    hsdp.add_argument("--reduced", default="f32", metavar="DTYPE", help="of gradients on the way (f32)")
    hsdp.add_argument("--stored", default="f32", metavar="DTYPE", help="of parameters, gradients and moments (f32)")
    hsdp.set_defaults(run=_hsdp)


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hardware", default="h100", help="a preset, or a file of `calibrate` (h100)")


def _crossover(given: argparse.Namespace) -> None:
    """Find the size from which on [tokens, H] x [H, 4H] is faster on N devices than on one. Give the tokens or H."""
    for name, count in (("tokens", given.tokens), ("hidden", given.hidden)):
        _check_count(name, count)
    question = Question(
        given.devices,
        hardware_named(given.hardware),
        tokens=given.tokens,
        hidden=given.hidden,
        dtype=given.dtype,
        link=given.link,
        is_training=given.training,
    )
    print(format_crossovers(question, crossovers(question)))


def _hsdp(given: argparse.Namespace) -> None:
    """Compare what a device sends in a step, and holds, with parameters sharded over all devices and in each node."""
    hardware = hardware_named(given.hardware)
    if given.nodes < 2:
        raise UserError(f"--nodes {given.nodes}: HSDP shards inside nodes and copies between them; give 2 or more")
    for name, count in (("nodes", given.nodes), ("per-node", given.per_node), ("buckets", given.buckets)):
        _check_count(name, count)
    if not 1 <= given.parameters <= MOST:
        raise UserError(f"--parameters {given.parameters:g}: give 1 or more, at most {MOST:.0e}")
    cluster = Cluster(
        replace(hardware, node_size=given.per_node or hardware.node_size),
        nodes=given.nodes,
        parameters=int(given.parameters),
        buckets=given.buckets,
        gathered=given.gathered,
        reduced=given.reduced,
        stored=given.stored,
    )
    print(format_shardings(cluster, shardings(cluster)))


def _check_count(name: str, count: int | None) -> None:
    """Raise UserError for a count, if one is given, that an option may not have."""
    if count is not None and not 1 <= count <= MOST:
        raise UserError(f"--{name} {count}: give 1 or more, at most {MOST:.0e}")
