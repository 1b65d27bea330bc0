"""Compute what hybrid sharding (HSDP) saves on the network compared with full sharding (FSDP), and its memory.

FSDP shards over all devices: each step it gathers the parameters over all of them, for the forward and again for the
backward, and reduce-scatters the gradients. ZeRO-2 keeps what the forward gathered. HSDP shards inside a node and keeps a
copy per node: it gathers and reduce-scatters in the node, and only all-reduces the scattered gradients over the network.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from passes.cost import collective_time as wire
from passes.errors import UserError
from passes.hardware.hardware import Group, Hardware
from passes.ir.collectives import formulas
from passes.ir.text import DTYPES
from passes.ir.units import format_bytes, format_seconds

n, p = formulas.n, formulas.p
Q, W, G = sympy.symbols("Q W G", positive=True)
SYMBOLS = {
    Q: "bytes of the parameters as they are stored",
    W: "bytes of the parameters as they are gathered",
    G: "bytes of the gradients as they are reduced",
    n: "nodes",
    p: "devices on a node",
}
MOST = 10**15  # nodes, devices on one, parameters, buckets: far beyond any, and their products fit in a float
STATES = 4  # tensors held per parameter: itself, its gradient, and the two moments of AdamW


@dataclass(frozen=True)
class Cluster:
    """A model of `parameters` on full nodes, with `buckets` collectives for each pass over it."""

    hardware: Hardware
    nodes: int = 100
    parameters: int = 8 * 10**9
    buckets: int = 32
    gathered: str = "bf16"
    reduced: str = "f32"
    stored: str = "f32"

    def __post_init__(self) -> None:
        for name, count in (("nodes", self.nodes), ("parameters", self.parameters), ("buckets", self.buckets)):
            if not 1 <= count <= MOST:
                raise UserError(f"{name}={count}: give 1 or more, at most {MOST:.0e}")
        for dtype in (self.gathered, self.reduced, self.stored):
            if dtype not in DTYPES:
                raise UserError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")

    def values(self) -> dict[sympy.Symbol, float]:
        """Return the value of each of `SYMBOLS`."""
        per_node = self.hardware.node_size
        sizes = {Q: self.stored, W: self.gathered, G: self.reduced}
        counts = {n: float(self.nodes), p: float(per_node)}
        return {symbol: float(self.parameters * DTYPES[name].itemsize) for symbol, name in sizes.items()} | counts


@dataclass(frozen=True)
class Step:
    """One pass of collectives over the model: `whole` bytes (larger side), in groups of `ranks` on `nodes`."""

    kind: str
    whole: sympy.Expr
    ranks: sympy.Expr
    nodes: sympy.Expr

    def sent(self) -> tuple[sympy.Expr, sympy.Expr]:
        """Return the bytes that a device sends: in its node, over the network."""
        group = {formulas.k: self.ranks, formulas.n: self.nodes, formulas.p: self.ranks / self.nodes, formulas.N: self.whole}
        inside, network = wire.sent_formula(self.kind, "inside" if self.nodes == 1 else "across")
        return inside.subs(group, simultaneous=True), network.subs(group, simultaneous=True)

    def seconds(self, cluster: Cluster) -> float:
        """Return the seconds of all buckets, one after another."""
        values = cluster.values()
        whole, ranks, nodes = (float(sympy.sympify(e).subs(values)) for e in (self.whole, self.ranks, self.nodes))
        group = Group(int(ranks), int(nodes))
        bucket = whole / cluster.buckets
        return cluster.buckets * wire.collective_seconds(self.kind, bucket, group, cluster.hardware)


@dataclass(frozen=True)
class Sharding:
    """A way to shard parameters, and what it costs each device per step, as formulas of `SYMBOLS` and figures."""

    name: str
    steps: tuple[Step, ...]
    network: sympy.Expr
    """Bytes sent over the network."""
    inside: sympy.Expr
    """Bytes sent inside the node."""
    memory: sympy.Expr
    """Bytes held for the whole step: parameters, gradients, optimizer state, and what a forward gathered and kept."""
    network_bytes: float
    inside_bytes: float
    memory_bytes: float
    network_seconds: float
    """Seconds of the collectives over nodes, one after another: this much must overlap with compute to cost nothing."""
    inside_seconds: float


def shardings(cluster: Cluster) -> tuple[Sharding, ...]:
    """Return FSDP, ZeRO-2 and HSDP, in this order."""
    one = sympy.Integer(1)
    gather, scatter = Step("all_gather", W, n * p, n), Step("reduce_scatter", G, n * p, n)
    in_node = Step("all_gather", W, p, one), Step("reduce_scatter", G, p, one)
    copies = Step("all_reduce", G / p, n, n)
    return (
        _sharding("fsdp", cluster, (gather, gather, scatter), STATES * Q / (n * p)),
        _sharding("zero2", cluster, (gather, scatter), STATES * Q / (n * p) + W),
        _sharding("hsdp", cluster, (in_node[0], *in_node, copies), STATES * Q / p),
    )


def _sharding(name: str, cluster: Cluster, steps: tuple[Step, ...], memory: sympy.Expr) -> Sharding:
    inside, network = (sympy.factor(sympy.Add(*(step.sent()[i] for step in steps))) for i in range(2))
    values = cluster.values()
    return Sharding(
        name,
        steps,
        network,
        inside,
        memory,
        network_bytes=float(network.subs(values)),
        inside_bytes=float(inside.subs(values)),
        memory_bytes=float(memory.subs(values)),
        network_seconds=sum(step.seconds(cluster) for step in steps if step.nodes != 1),
        inside_seconds=sum(step.seconds(cluster) for step in steps if step.nodes == 1),
    )


def format_shardings(cluster: Cluster, found: tuple[Sharding, ...]) -> str:
    """Return the answer as a table, followed by its formulas."""
    devices = cluster.nodes * cluster.hardware.node_size
    fsdp, *_, hsdp = found
    lines = [
        f"{cluster.parameters / 1e9:g} B parameters on {cluster.nodes} nodes x {cluster.hardware.node_size} "
        f"{cluster.hardware.name}, gathered in {cluster.gathered}, gradients reduced in {cluster.reduced}, "
        f"{cluster.buckets} buckets",
        "",
        f"a device, in a step  {'network':>11} {'in node':>11} {'per parameter':>15} {'network':>10} {'in node':>10} "
        f"{'held':>11}",
    ]
    for sharding in found:
        each = f"{sharding.network_bytes / cluster.parameters:.3f} B"
        lines.append(
            f"{sharding.name:<20} {format_bytes(sharding.network_bytes):>11} {format_bytes(sharding.inside_bytes):>11} "
            f"{each:>15} {format_seconds(sharding.network_seconds):>10} {format_seconds(sharding.inside_seconds):>10} "
            f"{format_bytes(sharding.memory_bytes):>11}"
        )
    saved = 1 - hsdp.network_bytes / fsdp.network_bytes
    seconds = fsdp.network_seconds - hsdp.network_seconds
    lines += [
        "",
        f"HSDP against FSDP, on each of {devices} devices: {saved:.0%} less over the network, "
        f"{format_seconds(seconds)} less of network time, "
        f"{format_bytes(hsdp.memory_bytes - fsdp.memory_bytes)} more memory",
        "",
    ]
    for sharding in found:
        lines.append(f"{sharding.name}: network {sharding.network}; in node {sharding.inside}; held {sharding.memory}")
    values = cluster.values()
    lines += ["", *(f"  {symbol} = {values[symbol]:.4g}: {meaning}" for symbol, meaning in SYMBOLS.items())]
    return "\n".join(lines)
