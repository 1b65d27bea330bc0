"""What HSDP saves and costs against FSDP: against counting every message of a ring."""

from __future__ import annotations

import pytest

from autoshard import UserError
from autoshard.measure.hybrid_sharding import Cluster, format_shardings, shardings
from passes.cost.collective_time import collective_seconds
from passes.hardware.hardware import Group, hardware_named

H100 = hardware_named("h100")


def ring(ranks: list[int], part: float, sweeps: int, node_size: int, sent: dict[str, float]) -> None:
    """Add what rank 0's node sends: `per node` rings, each entering a node at another of its ranks."""
    nodes = {rank // node_size: [r for r in ranks if r // node_size == rank // node_size] for rank in ranks}
    lanes = len(nodes[0])
    for lane in range(lanes):
        order = [rank for members in nodes.values() for rank in members[lane:] + members[:lane]]
        for place, rank in enumerate(order):
            if rank // node_size == 0:
                to = order[(place + 1) % len(order)]
                link = "inside" if to // node_size == 0 else "network"
                sent[link] += sweeps * (len(ranks) - 1) * part / lanes


def counted(cluster: Cluster, name: str) -> dict[str, float]:
    """Return the bytes that a device of node 0 sends on mean, message by message."""
    size = cluster.hardware.node_size
    everyone = list(range(cluster.nodes * size))
    weights, gradients = 2.0 * cluster.parameters, 4.0 * cluster.parameters
    sent = {"inside": 0.0, "network": 0.0}
    if name == "hsdp":
        ring(everyone[:size], (2 * weights + gradients) / size, 1, size, sent)
        for place in range(size):
            peers = everyone[place::size]
            ring(peers, gradients / size / len(peers), 2, size, sent)
    else:
        gathers = 2 if name == "fsdp" else 1
        ring(everyone, (gathers * weights + gradients) / len(everyone), 1, size, sent)
    return {link: nbytes / size for link, nbytes in sent.items()}


@pytest.mark.parametrize("nodes", [2, 100])
def test_the_bytes_are_those_of_every_message_counted(nodes: int) -> None:
    cluster = Cluster(H100, nodes=nodes)
    for sharding in shardings(cluster):
        sent = counted(cluster, sharding.name)
        assert sharding.network_bytes == pytest.approx(sent["network"]), sharding.name
        assert sharding.inside_bytes == pytest.approx(sent["inside"]), sharding.name


def test_seconds_are_those_of_each_bucket() -> None:
    fsdp, _, hsdp = shardings(Cluster(H100, buckets=10))
    everyone, node, peers = Group(800, 100), Group(8), Group(100, 100)
    gather = collective_seconds("all_gather", 1.6e9, everyone, H100)
    scatter = collective_seconds("reduce_scatter", 3.2e9, everyone, H100)
    assert fsdp.network_seconds == pytest.approx(10 * (2 * gather + scatter)) and fsdp.inside_seconds == 0
    assert hsdp.network_seconds == pytest.approx(10 * collective_seconds("all_reduce", 4e8, peers, H100))
    gather = collective_seconds("all_gather", 1.6e9, node, H100)
    scatter = collective_seconds("reduce_scatter", 3.2e9, node, H100)
    assert hsdp.inside_seconds == pytest.approx(10 * (2 * gather + scatter))


def test_hsdp_on_100_nodes_of_8() -> None:
    same_dtype = shardings(Cluster(H100, reduced="bf16"))
    fsdp, zero2, hsdp = same_dtype
    assert 1 - hsdp.network_bytes / fsdp.network_bytes == pytest.approx(1 / 3, abs=0.01)
    assert hsdp.network_bytes == pytest.approx(zero2.network_bytes, rel=0.01)
    assert hsdp.memory_bytes == pytest.approx(100 * fsdp.memory_bytes)
    assert hsdp.memory_bytes == 4 * 4 * 8e9 / 8, "parameters, gradients, two moments in f32, an eighth of each"
    fsdp, _, hsdp = shardings(Cluster(H100, reduced="f32"))
    assert hsdp.network_bytes == pytest.approx(fsdp.network_bytes, rel=0.02), "gradients as large as both gathers"
    assert hsdp.network_seconds < fsdp.network_seconds / 2, "100 steps of latency, not 800"


def test_the_answer_reads() -> None:
    cluster = Cluster(H100, reduced="bf16")
    text = format_shardings(cluster, shardings(cluster))
    assert "HSDP against FSDP, on each of 800 devices: 34% less over the network, " in text
    assert "hsdp: network 2*G*(n - 1)/(n*p); in node (G + 2*W)*(p - 1)/p; held 4*Q/p\n" in text


def test_a_cluster_that_cannot_be() -> None:
    with pytest.raises(UserError, match=r"nodes=0: give 1 or more, at most 1e\+15"):
        Cluster(H100, nodes=0)
    with pytest.raises(UserError, match="unknown dtype 'int4'; choose one of f64, "):
        Cluster(H100, reduced="int4")
