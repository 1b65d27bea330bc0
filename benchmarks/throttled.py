"""Run a benchmark on gloo processes whose links are slow: nodes are network namespaces of this machine.

Each node has a loopback of its own, and a link to a switch (a bridge in the launcher's namespace), with the rates that the
benchmark gives (`unshare`, `nsenter`, `ip` and `tc` of Linux, as root). `steady_device` makes a rank's compute thread as fast
beside idle ranks and busy links as it is beside busy ranks, which is what a GPU of its own would be.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

PORT = 29533
INSIDE_FLAG = "--in-namespace"
CPU_CONTROLLER = Path("/sys/fs/cgroup/cpu")  # of cgroups of version 1
PERIOD = 5000  # us; the kernel takes quotas of at least 1000


@dataclass(frozen=True)
class Network:
    """Nodes of `local` processes each; rates as `tc` takes them."""

    nodes: int
    local: int
    inside: str
    across: str


def run(module: str, network: Network, arguments: Sequence[str]) -> None:
    """Run `python -m module` with the arguments on each process of the network, under torchrun.

    The launcher starts itself again in a namespace of its own, so a benchmark calls this with the same arguments then.
    """
    if INSIDE_FLAG not in arguments:
        again = [sys.executable, "-m", module, INSIDE_FLAG, *arguments]
        subprocess.run(["unshare", "-n", *again], check=True)
        return
    given = [word for word in arguments if word != INSIDE_FLAG]
    _execute((), "ip link add switch type bridge")
    _execute((), "ip link set switch up")
    with ExitStack() as made:
        enter = [made.enter_context(_node(number, network)) for number in range(network.nodes)]
        begun = [
            subprocess.Popen([*before, *_torchrun(module, number, network, given)], env=_environment())
            for number, before in enumerate(enter)
        ]
        if any([one.wait() for one in begun]):
            raise SystemExit("a node failed: its error is above")


@contextmanager
def steady_device(part: float) -> Iterator[None]:
    """Let this thread have `part` of a core and no more, through a control group of its own.

    With `part` times the ranks below the number of cores, a rank does not compute faster while others wait, and the threads of
    gloo, which are not limited, take nothing from it. Without such control groups the thread is not limited, which is said.
    """
    if not (CPU_CONTROLLER / "tasks").exists():
        if dist.get_rank() == 0:
            print("no control group for CPU time: a rank computes faster while others wait", flush=True)
        yield
        return
    group, thread = CPU_CONTROLLER / f"rank-{os.getpid()}", str(threading.get_native_id())
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD * part)))
        (group / "tasks").write_text(thread)
        yield
    finally:
        (CPU_CONTROLLER / "tasks").write_text(thread)
        group.rmdir()


@contextmanager
def _node(number: int, network: Network) -> Iterator[tuple[str, ...]]:
    """Make the namespace of a node and its links; yield the command that runs another one there."""
    # The namespace lasts as long as its holder reads: also if this process is killed, the holder ends.
    command = ["unshare", "-n", "sh", "-c", "echo ready; exec cat"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    enter = ("nsenter", "-t", str(holder.pid), "-n")
    try:
        _execute((), f"ip link add port{number} type veth peer name node0 netns {holder.pid}")
        _execute((), f"ip link set port{number} master switch")
        _execute((), f"ip link set port{number} up")
        _execute(enter, "ip link set lo up")
        _execute(enter, f"ip addr add {_address(number)}/24 dev node0")
        _execute(enter, "ip link set node0 up")
        for device, rate in (("lo", network.inside), ("node0", network.across)):
            _execute(enter, f"tc qdisc add dev {device} root tbf rate {rate} burst 128kb latency 500ms")
        yield enter
    finally:
        holder.kill()


def _execute(before: tuple[str, ...], command: str) -> None:
    subprocess.run([*before, *command.split()], check=True)


def _address(number: int) -> str:
    return f"10.9.8.{number + 1}"


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "node0"}


def _torchrun(module: str, number: int, network: Network, arguments: Sequence[str]) -> list[str]:
    where = f"--nnodes {network.nodes} --node-rank {number} --nproc-per-node {network.local}"
    master = f"--master-addr {_address(0)} --master-port {PORT}"
    command = [sys.executable, "-m", "torch.distributed.run", *where.split(), *master.split()]
    return [*command, "-m", module, *arguments]
