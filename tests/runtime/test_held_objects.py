"""Objects that a model holds, of every kind: after a change of one, the next call has the numbers of one device."""

from __future__ import annotations

import array
import copy
import enum
import functools
import gc
import itertools
import math
import operator
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import Options, autoshard
from autoshard.runtime.calls import model_state

X = torch.linspace(-1, 1, 12).reshape(3, 4)
EAGER = Options(recipe="fsdp", compile="eager")
Use = Callable[[Tensor, Any], Tensor]


class Holder(nn.Module):
    """Uses an object that it holds."""

    def __init__(self, held: Any, use: Use) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held = held
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.linear(x), self.held)


class RunDirectly(Holder):
    """Calls what dynamo does not trace."""

    def forward(self, x: Tensor) -> Tensor:
        with open("/dev/null"):
            return super().forward(x)


class Scaling:
    def __init__(self, by: Any = 1.0) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


class Private:
    __slots__ = ("__by",)

    def __init__(self) -> None:
        self.__by = 1.0

    def get(self) -> float:
        return self.__by

    def set(self, by: float) -> None:
        self.__by = by


@dataclass(slots=True)
class Slots:
    by: Any = 1.0


class Kept(list[float]):
    by = 0.0


class Kind(enum.Enum):
    A = 1


class Doubling(Scaling):
    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


class Shadow:
    def __init__(self) -> None:
        self._values = {"by": 1.0}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._values[name]


Pair = namedtuple("Pair", "one other")


def scaled(x: Tensor) -> Tensor:
    return x * scaled.by  # type: ignore[attr-defined]


TARGET = Scaling()


def nested(levels: int, inmost: Any) -> Any:
    return inmost if not levels else SimpleNamespace(inside=nested(levels - 1, inmost))


def inmost(held: Any, levels: int) -> Any:
    return held if not levels else inmost(held.inside, levels - 1)


def cycle() -> Any:
    one = SimpleNamespace(by=1.0)
    one.other = SimpleNamespace(one=one)
    return one


def kept() -> Kept:
    held = Kept([1.0])
    held.by = 1.0
    return held


def function() -> Any:
    scaled.by = 1.0  # type: ignore[attr-defined]
    return scaled


def member() -> Kind:
    Kind.A.by = 1.0  # type: ignore[attr-defined]
    return Kind.A


def reference() -> Any:
    TARGET.by = 1.0
    return weakref.ref(TARGET)


def times_by(x: Tensor, held: Any) -> Tensor:
    return x * held.by


def times_item(x: Tensor, held: Any) -> Tensor:
    return x * held[0]


def times_a(x: Tensor, held: Any) -> Tensor:
    return x * held["a"]


def times_sum(x: Tensor, held: Any) -> Tensor:
    return x * sum(held)


def times_first(x: Tensor, held: Any) -> Tensor:
    return x * next(iter(held.values()))


def called(x: Tensor, held: Any) -> Tensor:
    return held(x)


def set_by(held: Any) -> None:
    held.by = 2.0


def set_item(held: Any) -> None:
    held[0] = 2.0


def set_a(held: Any) -> None:
    held["a"] = 2.0


CASES: dict[str, tuple[Callable[[], Any], Use, Callable[[Any], object]]] = {
    "an object that is called": (Scaling, called, set_by),
    "an object with a call, an attribute of which is read": (Scaling, times_by, set_by),
    "an object that is called, in a list": (lambda: [Scaling()], lambda x, held: held[0](x), lambda held: set_by(held[0])),
    "a bound method": (lambda: Scaling().__call__, called, lambda held: set_by(held.__self__)),
    "a partial": (lambda: functools.partial(torch.mul, other=1.0), called, lambda held: held.keywords.update(other=2.0)),
    "a partial of a method": (
        lambda: functools.partial(Scaling().__call__), called, lambda held: set_by(held.func.__self__)
    ),
    "a function's attribute": (function, called, set_by),
    "slots": (Slots, times_by, set_by),
    "a private slot": (Private, lambda x, held: x * held.get(), lambda held: held.set(2.0)),
    "another class": (Scaling, called, lambda held: setattr(held, "__class__", Doubling)),
    "an attribute that a dict has": (Shadow, times_by, lambda held: held._values.update(by=2.0)),
    "a cycle": (cycle, lambda x, held: times_by(x, held.other.one), set_by),
    "a deque": (lambda: deque([1.0], 1), times_sum, lambda held: held.append(2.0)),
    "a dict of deques": (
        lambda: {"a": deque([1.0])}, lambda x, held: times_sum(x, held["a"]), lambda held: held["a"].__setitem__(0, 2.0)
    ),
    "a set": (lambda: {1.0}, times_sum, lambda held: (held.clear(), held.add(2.0))),
    "a set of names": (lambda: {"a"}, lambda x, held: x * 2 if "b" in held else x, lambda held: held.add("b")),
    "a list's attribute": (kept, times_by, set_by),
    "a namedtuple": (lambda: Pair([1.0], 0), lambda x, held: times_item(x, held.one), lambda held: set_item(held.one)),
    "an ordered dict": (lambda: OrderedDict(a=1.0), times_a, set_a),
    "the order of an ordered dict": (lambda: OrderedDict(a=1.0, b=2.0), times_first, lambda held: held.move_to_end("a")),
    "the order of a dict": (lambda: {"a": 1.0, "b": 2.0}, times_first, lambda held: held.update(a=held.pop("a"))),
    "a default dict": (lambda: defaultdict(float, a=1.0), times_a, set_a),
    "a counter": (lambda: Counter(a=1), times_a, lambda held: held.update("a")),
    "a dict of the user's": (lambda: UserDict(a=1.0), times_a, set_a),
    "two keys with one text": (lambda: {0: 1.0, "0": 5.0}, times_item, set_item),
    "an enum's member": (member, times_by, set_by),
    "a weak reference": (reference, lambda x, held: times_by(x, held()), lambda held: set_by(held())),
    "a getter": (
        lambda: (operator.attrgetter("by"), Scaling()), lambda x, held: x * held[0](held[1]), lambda held: set_by(held[1])
    ),
    "an array": (lambda: np.ones(4, np.float32), lambda x, held: x * torch.from_numpy(held), lambda held: held.fill(2)),
    "arrays in a list": (
        lambda: [np.ones(4, np.float32)], lambda x, held: x * torch.from_numpy(held[0]), lambda held: held[0].fill(2)
    ),
    "an array of Python's": (lambda: array.array("d", [1.0]), times_item, set_item),
    "a range of equal numbers": (
        lambda: [range(0, 3, 2)], lambda x, held: x * held[0].stop, lambda held: held.__setitem__(0, range(0, 4, 2))
    ),
    "the sign of a complex zero": (
        lambda: [0j], lambda x, held: x * math.copysign(1.0, held[0].real), lambda held: held.__setitem__(0, -0j)
    ),
    "bytes": (lambda: bytearray([1]), times_item, lambda held: held.__setitem__(0, 2)),
    "a module in a list": (
        lambda: [nn.Threshold(0, 1.0)], lambda x, held: x * held[0].value, lambda held: setattr(held[0], "value", 2.0)
    ),
    "a buffer of a module in a list": (
        lambda: [nn.BatchNorm1d(4)], lambda x, held: x + held[0].running_mean, lambda held: held[0].running_mean.fill_(2)
    ),
    "a tensor in a deque": (lambda: deque([torch.ones(4)]), times_item, lambda held: held[0].fill_(2)),
    "another tensor in a deque": (lambda: deque([torch.ones(4)]), times_item, lambda held: held.__setitem__(0, X[0])),
    "a tensor in slots": (lambda: Slots(torch.ones(4)), times_by, lambda held: held.by.fill_(2)),
    "a tensor in an object that is called": (lambda: Scaling(torch.ones(4)), called, lambda held: held.by.fill_(2)),
    "a tensor in a long list": (lambda: [torch.ones(4), *[0.0] * 1000], times_item, lambda held: held[0].fill_(2)),
    "another tensor in a long list": (
        lambda: [torch.ones(4), *[0.0] * 1000], times_item, lambda held: held.__setitem__(0, X[0])
    ),
    "a list of 1001": (lambda: [1.0] * 1001, times_item, set_item),
    "a dict of 1001": (lambda: dict.fromkeys(range(1001), 1.0), times_item, set_item),
}
for levels in (3, 4, 5, 12):
    CASES[f"{levels} objects deep"] = (
        lambda levels=levels: nested(levels, Scaling()),  # type: ignore[misc]
        lambda x, held, levels=levels: times_by(x, inmost(held, levels)),  # type: ignore[misc]
        lambda held, levels=levels: set_by(inmost(held, levels)),  # type: ignore[misc]
    )
    CASES[f"a tensor {levels} objects deep"] = (
        lambda levels=levels: nested(levels, Scaling(torch.ones(4))),  # type: ignore[misc]
        lambda x, held, levels=levels: times_by(x, inmost(held, levels)),  # type: ignore[misc]
        lambda held, levels=levels: inmost(held, levels).by.fill_(2),  # type: ignore[misc]
    )


@pytest.mark.parametrize("name", CASES)
def test_a_change_of_a_held_object_is_seen(one_rank: DeviceMesh, name: str) -> None:
    check_change(Holder, one_rank, name)


RUN = ["a bound method", "slots", "a deque", "a set", "an array", "a weak reference", "12 objects deep"]


@pytest.mark.parametrize("name", RUN)
def test_a_change_is_seen_where_the_code_was_run(one_rank: DeviceMesh, name: str) -> None:
    if name == "an array":  # whose values code may read when it is run
        CASES[name] = (CASES[name][0], lambda x, held: x * float(held[0]), CASES[name][2])
    check_change(RunDirectly, one_rank, name)


def check_change(kind: type[Holder], mesh: DeviceMesh, name: str) -> None:
    make, use, change = CASES[name]
    torch.manual_seed(0)
    sharded: Any = autoshard(kind(make(), use), mesh, options=EAGER)
    torch.manual_seed(0)
    model = kind(make(), use)
    with torch.no_grad():
        before = model(X)
        assert torch.equal(sharded(X), before)
        change(model.held)
        if not any(one in name for one in ("function", "enum", "weak")):  # of which both models have the same
            change(sharded.held)
        assert not torch.equal(model(X), before)
        assert torch.equal(sharded(X), model(X))


def test_what_no_code_reads_may_change(one_rank: DeviceMesh) -> None:
    sharded: Any = autoshard(Holder(SimpleNamespace(by=1.0, unread=[0]), times_by), one_rank, options=EAGER)
    sharded(X)
    sharded.held.unread.append(1)
    sharded(X)
    assert len(sharded.programs) == 1


def test_what_is_changed_back_has_its_program(one_rank: DeviceMesh) -> None:
    sharded: Any = autoshard(Holder(Scaling(), called), one_rank, options=EAGER)
    for by in (1.0, 2.0, 1.0, 2.0):
        sharded.held.by = by
        sharded(X)
    assert len(sharded.programs) == 2


def test_values_that_a_later_call_reads_first(one_rank: DeviceMesh) -> None:
    """The programs of earlier states do not depend on them."""

    class Chooses(Holder):
        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return h * self.held.by if len(x) > 2 else h

    model = Chooses(Scaling(), called)
    sharded: Any = autoshard(model, one_rank, options=EAGER)
    linear = copy.deepcopy(model.linear)
    sharded(X[:2])
    for by in (2.0, 3.0, 2.0):
        sharded.held.by = by
        assert torch.equal(sharded(X[:2]), linear(X[:2]))
        assert torch.equal(sharded(X), linear(X) * by)


def test_a_counter_that_is_not_read(one_rank: DeviceMesh) -> None:
    sharded: Any = autoshard(Holder((itertools.count(), 2.0), lambda x, held: x * held[1]), one_rank, options=EAGER)
    assert torch.equal(sharded(X), sharded(X))


def test_more_objects_than_are_looked_at_are_named(
    one_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_state, "OBJECTS_MAX", 100)
    sharded: Any = autoshard(Holder([1.0] * 200, lambda x, held: x * held[150]), one_rank, options=EAGER)
    before = sharded(X)
    sharded(X[:2])
    warned = [record.getMessage() for record in caplog.records if record.name == "autoshard.programs"]
    assert warned == [
        "held holds more than 100 objects, and a change of one beyond these is not noticed: the program stays as it is. Assign a "
        "new object to held to have the model captured again, or keep what does not matter to forward elsewhere"
    ]
    sharded.held = [2.0] * 200
    assert torch.equal(sharded(X), 2 * before)


_collections = 0


def _count_collections(phase: str, info: dict[str, int]) -> None:
    global _collections
    _collections += 1


def test_a_callback_of_garbage_collection_is_not_of_the_model(one_rank: DeviceMesh) -> None:
    gc.callbacks.append(_count_collections)
    try:
        check_change(RunDirectly, one_rank, "slots")
    finally:
        gc.callbacks.remove(_count_collections)
