"""Cost reshards in seconds, by the formulas that the simulator uses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from passes.cost.collective_time import collective_seconds, link_of
from passes.cost.contention import Contention
from passes.hardware.hardware import Group, Hardware
from passes.ir.collectives import TAKE_PART
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from passes.search.model.factor_graph import Floats, Together
from passes.search.model.local_sizes import LocalSizes, Shape
from passes.search.model.reshard_routes import Leg, ReshardRoutes

BUCKET = 25 << 20  # bytes: DDP's default `bucket_cap_mb`, and a sixteenth of that of `Overlap(bucket_bytes=...)`
APART = 0.5  # of the time of the link that is in use less: for which the other is not in use, as often as not
CHUNKS = (2, 4, 8)  # of a product, as decompose_matmuls tries
SECONDS = 8  # of a leg: so many entries has `_Seconds`
T = TypeVar("T", float, Floats)
_Seconds = tuple[float, ...]  # on two links, of local steps and copies, exposed, slowed by two links, of two links' waits


@dataclass(frozen=True)
class Hiding:
    """Settings for messages: joined to `bucket` bytes at least and a layer's bytes, up to `most`; beside kernels or not; those
    next to matrix products `in_chunks` or whole.

    Only gathers of parameters and reductions of gradients are joined.
    """

    bucket: int = BUCKET
    most: int = 16 * BUCKET
    overlaps: bool = True
    in_chunks: bool = True


USUAL = Hiding()


@dataclass(frozen=True, eq=False)
class TransitionCosts:
    """The seconds of transitions from each source to each target, on links [link, source, target] and of local steps, and
    which are `impossible`. Of messages that hide, what kernels wait for is `exposed`, what those on each link add to the
    seconds of kernels beside them is `slowed`, and what each link waits until the first are joined is `awaited`."""

    on_links: Floats
    local: Floats
    exposed: Floats
    slowed: Floats
    awaited: Floats
    impossible: NDArray[np.bool_]


@dataclass(frozen=True)
class UnitCosts:
    """The cached costs of transitions on one mesh and hardware."""

    mesh: Mesh
    hardware: Hardware
    routes: ReshardRoutes
    hiding: Hiding = USUAL
    _costs: dict[object, TransitionCosts] = field(default_factory=dict)
    _times: dict[tuple[float, Together | None], list[_Seconds]] = field(default_factory=dict)  # of legs, by bytes of the whole

    @staticmethod
    def of(mesh: Mesh, hiding: Hiding = USUAL) -> UnitCosts:
        """Return the costs on a mesh that names its hardware."""
        assert mesh.hardware is not None
        return UnitCosts(mesh, mesh.hardware, ReshardRoutes(LocalSizes(mesh)), hiding)

    def on(self, mesh: Mesh) -> UnitCosts:
        """Return the costs on other hardware, or other links, with the same axes: the steps of reshards do not
        change."""
        assert mesh.hardware is not None and mesh.sizes == self.mesh.sizes
        return UnitCosts(mesh, mesh.hardware, self.routes, self.hiding)

    def apart(self) -> UnitCosts:
        """Return the costs where no messages are joined."""
        return UnitCosts(self.mesh, self.hardware, self.routes, replace(self.hiding, bucket=0, most=0))

    @property
    def sizes(self) -> LocalSizes:
        """Return the sizes of one rank's parts."""
        return self.routes.sizes

    def split(self, links: T, exposed: float) -> tuple[T, T]:
        """Return the seconds that messages of `links` seconds add to those of kernels, if the part `exposed` of them cannot
        hide: those in which kernels wait, and those by which kernels beside the others are slowed down."""
        waits = links * (exposed if self.hiding.overlaps else 1.0)
        return waits, self.slowed(links - waits)

    def slowed(self, hidden: T) -> T:
        """Return the seconds that kernels take longer beside messages of `hidden` seconds: they do less work per second."""
        return hidden * Contention.of(self.hardware).delay

    def spared(self, waits: Floats) -> Floats:
        """Return the seconds by which messages on each link would slow kernels down that wait for one on the other link."""
        return self.slowed(waits)[::-1] * self.hiding.overlaps

    def beside(self, waits: Floats, slowed: Floats) -> Floats:
        """Return the seconds that messages add to those of kernels, counted beside each link [link, source, target].

        Kernels are slowed down while either link is in use.
        """
        return waits + slowed + slowed[::-1] * APART

    def in_chunks(self, sent: Mapping[int, Floats], product: float, copied: Mapping[int, Floats]) -> Floats:
        """Return the seconds that messages add to those of kernels next to a `product`, at least: of the chunks, all but one are
        sent beside a chunk of the product, and wait for it or slow it down.

        `sent` are the seconds of all chunks, by their number, and `copied` those in which results are concatenated. Each more
        chunk takes a launch.
        """
        found = [
            seconds / chunks
            + np.maximum(seconds - product, self.slowed(seconds)) * (1 - 1 / chunks)
            + (chunks - 1) * self.hardware.launch
            + copied[chunks]
            for chunks, seconds in sent.items()
        ]
        least: Floats = np.minimum.reduce(found)
        return least

    def copied(self, nbytes: Floats) -> Floats:
        """Return the seconds in which a kernel copies these bytes; none for no bytes."""
        return np.where(nbytes > 0, 2 * nbytes / self.hardware.memory_bandwidth + self.hardware.launch, 0.0)

    def transition_costs(
        self,
        shape: Shape,
        itemsize: int,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        together: Together | None = None,
    ) -> TransitionCosts:
        """Cost reshards from each source to each target as `lower_reshards` emits them, equal ones once.

        A collective that is joined with others takes its part of the time of one, and of the copies together and apart; the
        part of one message has no kernels to hide beside.
        """
        key = shape, itemsize, together, tuple(sources), tuple(targets)
        if key not in self._costs:
            routes = self.routes.routes(shape, sources, targets)
            times = np.array(self._taken(float(math.prod(shape) * itemsize), together))
            seconds = np.zeros((len(routes.legs), times.shape[1]))
            for leg in routes.legs.T:
                seconds += times[leg]
            inside, across, local, exposed, *others = (column[routes.numbers] for column in seconds.T)
            slowed, awaited = np.stack(others[:2]), np.stack(others[2:])
            impossible = routes.impossible[routes.numbers]
            self._costs[key] = TransitionCosts(np.stack([inside, across]), local, exposed, slowed, awaited, impossible)
        return self._costs[key]

    def link_seconds(self, shape: Shape, itemsize: float, sources: Sequence[Layout], targets: Sequence[Layout]) -> Floats:
        """Return the seconds on links of reshards from each source to each target, on both links together."""
        routes = self.routes.routes(shape, sources, targets)
        times = np.array(self._taken(math.prod(shape) * itemsize, None))[:, :2].sum(1)
        seconds: Floats = times[routes.legs].sum(1)[routes.numbers]
        return seconds

    def _taken(self, nbytes: float, together: Together | None) -> list[_Seconds]:
        """Return the seconds of every leg for a tensor of so many bytes, and a last entry of 0."""
        times = self._times.setdefault((nbytes, together), [])
        times += [self._leg(leg, nbytes, together) for leg in list(self.routes.legs)[len(times) :]]
        return [*times, (0.0,) * SECONDS]

    def _leg(self, leg: Leg, whole: float, together: Together | None) -> _Seconds:
        """Return the seconds of one leg."""
        if leg.kind is TAKE_PART:
            return (0.0,) * SECONDS  # a view
        if not leg.kind.communicates:
            return 0.0, 0.0, 2 * whole * leg.after / self.hardware.memory_bandwidth, *(0.0,) * (SECONDS - 3)
        group = self.mesh.group_shape(tuple(self.mesh.names[axis] for axis in leg.axes))
        nbytes = whole * max(leg.before, leg.after)  # 0 if the whole is empty, as all parts of an empty batch are
        taken = collective_seconds(leg.kind.name, nbytes, group, self.hardware)
        copies, exposed, slowed, awaited = 0.0, taken, 0.0, 0.0
        if together is not None and nbytes:
            taken, copies, exposed, slowed, awaited = self._hidden(leg, whole, taken, group, together)
        if link_of(group) == "inside":
            return taken, 0.0, copies, exposed, slowed, 0.0, awaited, 0.0
        return 0.0, taken, copies, exposed, 0.0, slowed, 0.0, awaited

    def _hidden(self, leg: Leg, whole: float, alone: float, group: Group, together: Together) -> tuple[float, ...]:
        """Return the seconds of a leg that takes `alone`, of copies to and from what it is joined with, those that are exposed,
        those by which it slows kernels down, and those in which its link waits for what it is joined with.

        It is sent alone or joined, whichever kernels wait for least. Of joined gradients, the last message has what is left.
        """
        nbytes = whole * max(leg.before, leg.after)
        layer = nbytes * max(1.0, together.times)
        everything = layer * together.layers
        least, most = self.hiding.bucket, self.hiding.most
        between = math.sqrt(least * most)  # as `bucketed` tries
        ways = [(*self.split(alone, together.waiting(1.0)), alone, 0.0, 0.0)]
        for wanted in (max(least, layer), between, most) if leg.kind.bucket == together.kind else ():
            joined = max(nbytes, min(wanted, everything, most))
            share = collective_seconds(leg.kind.name, joined, group, self.hardware) * nbytes / joined
            copies = 2 * whole * (leg.before + leg.after) / self.hardware.memory_bandwidth
            copies += 2 * self.hardware.launch * nbytes / joined
            exposed, slowed = self.split(share, together.waiting(joined / layer))
            ways.append((exposed, slowed, share, copies, joined))
        exposed, slowed, share, copies, joined = min(ways, key=lambda way: way[0] + way[1] + way[3])
        taken, awaited = min(ways, key=lambda way: sum(way[:4]))[2], 0.0
        if joined and together.exposed is not None and together.kind == "reduction":
            last = min(joined, max(everything % joined or joined, layer))
            exposed, slowed = self.split(share, together.waiting(last / layer))
            awaited = max(0.0, joined / everything - 1 / together.layers) * together.seconds * nbytes / everything
        return taken, copies, exposed, slowed, awaited
