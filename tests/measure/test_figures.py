"""Figures come back from times made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.measure.fit_hardware import ProductTime, TransferTime, fit_links, fit_products
from passes.cost.collective_time import collective_seconds
from passes.cost.kernel_time import Product, product_seconds
from passes.hardware.hardware import Group, Hardware, hardware_named

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SIZES = (1 << 10, 1 << 20, 1 << 28)
BLANK = replace(hardware_named("cpu"), name="blank")


def unknown(machine: Hardware) -> Hardware:
    """Return `machine` with the figures to be found replaced by another's."""
    return replace(machine, flops=BLANK.flops, efficiency=0.5, tile=4, inside=BLANK.inside, across=BLANK.across)


def transfers(machine: Hardware, groups: tuple[Group, ...]) -> list[TransferTime]:
    return [
        TransferTime(kind, ("x",), group, nbytes, collective_seconds(kind, nbytes, group, machine))
        for kind in KINDS
        for group in groups
        for nbytes in SIZES
    ]


@pytest.mark.parametrize("name", ["a100", "h100", "b200", "cpu"])
def test_links_in_a_node(name: str) -> None:
    machine = hardware_named(name)
    found = fit_links(unknown(machine), transfers(machine, (Group(2), Group(4), Group(8)))).inside
    assert found.bandwidth == pytest.approx(machine.inside.bandwidth, rel=0.02)
    assert found.latency == pytest.approx(machine.inside.latency, rel=0.1)
    noise = max(1e-6, 0.01 * machine.inside.latency)  # the bytes of a small message take time as well
    assert found.setup == pytest.approx(machine.inside.setup, rel=0.1, abs=noise)
    assert found.reduces == pytest.approx(machine.inside.reduces, rel=0.02)


@pytest.mark.parametrize("name", ["a100", "h100"])
def test_links_between_nodes(name: str) -> None:
    machine = hardware_named(name)
    found = fit_links(replace(unknown(machine), inside=machine.inside), transfers(machine, (Group(2, 2), Group(8, 8))))
    assert found.inside == machine.inside
    assert found.across.bandwidth == pytest.approx(machine.across.bandwidth, rel=0.02)
    assert found.across.latency == pytest.approx(machine.across.latency, rel=0.1)
    assert found.across.setup == pytest.approx(machine.across.setup, rel=0.1)


def test_one_pair_of_ranks_is_enough() -> None:
    machine = hardware_named("h100")
    found = fit_links(unknown(machine), transfers(machine, (Group(2),)))
    for kind in ("all_gather", "all_reduce"):
        for nbytes in SIZES:
            assert collective_seconds(kind, nbytes, Group(2), found) == pytest.approx(
                collective_seconds(kind, nbytes, Group(2), machine), rel=0.1
            )


@pytest.mark.parametrize("name", ["h100", "cpu"])
def test_rates_of_products(name: str) -> None:
    machine = replace(hardware_named(name), spread=0.0)  # times of one device
    shapes = [Product(1, size, size, size) for size in (256, 512, 1024, 2048, 4096)] + [Product(1, 8192, 512, 1024)]
    blank = [ProductTime(shape, dtype, 2, 0.0) for shape in shapes for dtype in ("bf16", "f32")]
    times = [replace(t, seconds=product_seconds(t.product, t.nbytes, t.dtype, machine)) for t in blank]
    found = fit_products(unknown(machine), times)
    for time in times:
        assert product_seconds(time.product, time.nbytes, time.dtype, found) == pytest.approx(time.seconds, rel=0.02)
    assert found.tile == machine.tile
    assert found.rate("bf16") == pytest.approx(machine.rate("bf16") * machine.efficiency, rel=0.02)


def test_small_products_that_a_launch_explains_badly_do_not_set_the_rate() -> None:
    machine = hardware_named("cpu")
    blank = [ProductTime(Product(1, size, size, size), "f32", 4, 0.0) for size in (32, 64, 128, 256, 512, 1024)]
    times = [replace(t, seconds=product_seconds(t.product, t.nbytes, "f32", machine)) for t in blank]
    odd = [replace(t, seconds=t.seconds / 2) if t.product.m <= 128 else t for t in times]
    assert fit_products(unknown(machine), odd).rate("f32") == pytest.approx(machine.rate("f32"), rel=0.05)


def test_times_that_no_formula_explains_still_give_figures() -> None:
    """A second rank slower on small messages than on large ones, as noise makes it."""
    odd = [TransferTime(kind, ("x",), Group(2), n, 1.0 / n) for kind in KINDS for n in SIZES]
    link = fit_links(BLANK, odd).inside
    assert link.bandwidth > 0 and link.latency >= 0 and link.setup >= 0


def test_a_small_message_that_took_longer_does_not_make_bytes_free() -> None:
    machine = hardware_named("cpu")
    took = ((4096, 4e-3), (1 << 20, 1e-3))
    times = [TransferTime("all_gather", ("dp",), Group(2, 1), nbytes, seconds) for nbytes, seconds in took]
    assert fit_links(machine, times).inside.bandwidth <= 80 * (1 << 20) / 1e-3
