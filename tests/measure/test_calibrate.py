"""A machine is measured into the form of the presets, alone and with real gloo ranks."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Mesh, UserError
from autoshard.measure.calibrate import Calibration, calibrate, format_calibration
from autoshard.measure.clocks import QUICK
from autoshard.measure.link_figures import contention_of, timed_kinds
from passes.cost.collective_time import collective_seconds
from passes.cost.contention import Contention
from passes.hardware.hardware import hardware_named
from tests.spawn import run_on_ranks


def test_one_process_measures_its_device(tmp_path: Path) -> None:
    calibration = calibrate(device="cpu", is_quick=True)
    machine = calibration.hardware
    assert [rate for rate, _ in machine.flops] == ["bf16", "f32", "f64"]
    assert machine.rate("f32") > 1e8 and machine.memory_bandwidth > 1e8 and 0 < machine.launch < 1e-2
    assert 0 < machine.attention <= 1 and machine.memory_bytes > 1 << 28
    assert machine.inside == hardware_named("cpu").inside, "one process has no links"
    assert "beside each other" not in format_calibration(calibration)
    assert dict(machine.sources)["inside"] == "not measured: that of the preset"
    path = tmp_path / "machine.json"
    path.write_text(machine.to_json())
    assert Mesh("dp=2", hardware=str(path)).hardware == machine
    assert "f32 [128, 128] x [128, 128]" in format_calibration(calibration)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpu"}, "device='tpu': choose cpu or cuda"),
        (
            {"mesh": "dp=2", "device": "cpu"},
            "mesh dp=2 has 2 ranks but the world has 1; start as many processes (torchrun --nproc-per-node 2 ...)",
        ),
    ],
)
def test_what_cannot_be_measured(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        calibrate(is_quick=True, **arguments)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("kernels", "links"), [(0.0, 0.0), (0.25, 0.0), (0.0, 0.5), (0.5, 1.0), (2.0, 0.3)])
def test_contention_is_told_from_what_hiding_costs(kernels: float, links: float) -> None:
    slow = Contention(kernels, links)
    of_messages = slow.kernel_end(0, 30, busy_until=10) - 30
    of_products = slow.link_time(30, 0, slow.kernel_end(0, 10, busy_until=30)) - 30
    assert contention_of(of_messages / 10, of_products / 10) == pytest.approx((kernels, links))


def test_contention_that_makes_hiding_cost_more_than_waiting_stays_below_that() -> None:
    kernels, links = contention_of(1.5, 2.0)
    assert kernels == links == pytest.approx(0.9)
    assert contention_of(-0.1, -0.2) == (0, 0), "noise"


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("has_groups", (False, True))
def test_two_ranks_measure_their_link(has_groups: bool) -> None:
    first, second = run_on_ranks(_calibrated_groups if has_groups else _calibrated, 2)
    assert first == second, "all ranks get the same figures"
    machine = first.hardware
    asked = [(kind.name, ("dp",), nbytes) for kind in timed_kinds() for nbytes in QUICK.sent]
    assert [(time.kind, time.axes, time.nbytes) for time in first.transfers] == asked
    assert machine.inside != hardware_named("cpu").inside and machine.across == hardware_named("cpu").across
    assert 1e6 < machine.inside.bandwidth < 1e12 and machine.scatter_sends_all
    assert machine.contention >= 0 and machine.link_contention >= 0 and machine.contention * machine.link_contention < 1
    assert all("over dp=2,tp=1" in dict(machine.sources)[name] for name in ("contention", "link_contention"))
    beside = f"kernels take {machine.contention:.0%} longer, collectives {machine.link_contention:.0%}"
    assert f"beside each other: {beside}" in format_calibration(first)
    sent = [time for time in first.transfers if time.kind in ("all_gather", "all_reduce")]
    ratios = [collective_seconds(time.kind, time.nbytes, time.group, machine) / time.seconds for time in sent]
    assert 1 / 10 < median(ratios) < 10, (ratios, "a busy machine may delay any one of them")


def _calibrated(rank: int) -> Calibration:
    return calibrate("dp=2,tp=1", device="cpu", is_quick=True)


def _calibrated_groups(rank: int) -> Calibration:
    return calibrate(init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")), device="cpu", is_quick=True)
