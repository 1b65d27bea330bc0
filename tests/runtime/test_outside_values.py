"""Capture a model again when something appears outside of it that its code looked for and did not find.

Each case is a function of the model's code, and a change of what it reads. After the change, outputs have to be those of one
device, from a second program; in `test_changes.py` are the changes of values that are there at the first call.
"""

from __future__ import annotations

import collections
import copy
import logging
import os
import re
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoshard import Options, autoshard

EAGER = Options(recipe="ddp", compile="eager")
X = torch.linspace(-1, 1, 12).reshape(3, 4)
LOGGER = logging.getLogger("tests.outside_values")
FACTOR, FLAG = "AUTOSHARD_TEST_FACTOR", "AUTOSHARD_TEST_FLAG"


class Switches(collections.Counter[str]):
    """A dict that has a value for keys that it lacks."""


class Base:
    slope = 1.0


class Derived(Base):
    pass


class World:
    """All that is outside of the model; a new one for each case."""

    def __init__(self) -> None:
        self.config: Any = SimpleNamespace(nested=SimpleNamespace())
        self.table: Any = {"a": 1.0}
        self.names: Any = {"old"}
        self.order: Any = collections.OrderedDict(a=1.0, b=2.0)
        self.queue: Any = collections.deque([1.0])
        self.switches: Any = Switches(a=1)
        self.module: Any = ModuleType("settings")
        self.kind: Any = type("Kind", (Derived,), {})
        self.given: Any = by_default()
        self.by_class: Any = {Base: 1.0}


def by_default() -> Callable[..., Tensor]:
    def scaled(y: Tensor, factors: Any = [1.0], plain: float = 1.0, *, more: float = 1.0) -> Tensor:  # noqa: B006
        return y * factors[0] * plain * more

    return scaled


WORLD: Any = World()
CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], object]]] = {}


def case(text: str, code: Callable[[Tensor], Tensor], change: Callable[[], object]) -> None:
    CASES[text] = code, change


def _item(y: Tensor) -> Tensor:
    try:
        return y * WORLD.table["later"]
    except KeyError:
        return y


def _attribute(y: Tensor) -> Tensor:
    try:
        return y * WORLD.config.later
    except AttributeError:
        return y


def _of_module(y: Tensor) -> Tensor:
    try:
        return y * WORLD.module.later
    except AttributeError:
        return y


def _global(y: Tensor) -> Tensor:
    try:
        return y * LATER  # type: ignore[name-defined]
    except NameError:
        return y


def _replace(name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(WORLD, name, value)


case("getenv", lambda y: y * float(os.getenv(FACTOR, "1")), lambda: os.environ.update({FACTOR: "2"}))
case("environ.get", lambda y: y * float(os.environ.get(FACTOR, "1")), lambda: os.environ.update({FACTOR: "2"}))
case("in environ", lambda y: y * 2 if FLAG in os.environ else y, lambda: os.environ.update({FLAG: ""}))
case("getattr", lambda y: y * getattr(WORLD.config, "k", 1.0), lambda: setattr(WORLD.config, "k", 2.0))
case("hasattr", lambda y: y * 2 if hasattr(WORLD.config.nested, "k") else y, lambda: setattr(WORLD.config.nested, "k", 1))
case("getattr of a class", lambda y: y * getattr(WORLD.kind, "k", 1.0), lambda: setattr(WORLD.kind, "k", 2.0))
case("getattr of a module", lambda y: y * getattr(WORLD.module, "k", 1.0), lambda: setattr(WORLD.module, "k", 2.0))
case("getattr of a function", lambda y: y * getattr(WORLD.given, "k", 1.0), lambda: setattr(WORLD.given, "k", 2.0))
case("in a dict", lambda y: y * 2 if "b" in WORLD.table else y, lambda: (WORLD.table.clear(), WORLD.table.update(b=1)))
case("get of a dict", lambda y: y * WORLD.table.get("b", 1.0), lambda: (WORLD.table.clear(), WORLD.table.update(b=2.0)))
case("in a set", lambda y: y * 2 if "new" in WORLD.names else y, lambda: (WORLD.names.clear(), WORLD.names.add("new")))
case("items of a set", lambda y: y * len(next(iter([*WORLD.names]))), lambda: (WORLD.names.clear(), WORLD.names.add("longer")))
case("the first item", lambda y: y * next(iter(WORLD.order.values())), lambda: WORLD.order.move_to_end("a"))
case("keys", lambda y: y * 2 if [*WORLD.table] == ["b"] else y, lambda: (WORLD.table.clear(), WORLD.table.update(b=1.0)))
case("a list of keys", lambda y: y * len(list(WORLD.table)[-1]), lambda: (WORLD.table.clear(), WORLD.table.update(longer=1.0)))
case("a longer deque", lambda y: y * len(WORLD.queue), lambda: WORLD.queue.append(1.0))
case("__missing__", lambda y: y * (1 + WORLD.switches["b"]), lambda: (WORLD.switches.clear(), WORLD.switches.update(b=2)))
case("try an item", _item, lambda: (WORLD.table.clear(), WORLD.table.update(later=2.0)))
case("try an attribute", _attribute, lambda: setattr(WORLD.config, "later", 2.0))
case("try an attribute of a module", _of_module, lambda: setattr(WORLD.module, "later", 2.0))
case("try a global", _global, lambda: globals().update(LATER=2.0))
case("a key that is a class", lambda y: y * WORLD.by_class[Base], lambda: WORLD.by_class.update({Base: 2.0}))
case("an item of a default", lambda y: WORLD.given(y), lambda: WORLD.given.__defaults__[0].__setitem__(0, 2.0))
case("another default", lambda y: WORLD.given(y), lambda: setattr(WORLD.given, "__defaults__", ([1.0], 2.0)))
case("another keyword's default", lambda y: WORLD.given(y), lambda: WORLD.given.__kwdefaults__.update(more=2.0))
case("other keywords' defaults", lambda y: WORLD.given(y), lambda: setattr(WORLD.given, "__kwdefaults__", {"more": 2.0}))
case("an attribute of a derived class", lambda y: y * WORLD.kind().slope, lambda: setattr(WORLD.kind, "slope", 2.0))
case("another module", lambda y: y * 2 if WORLD.module is sys else y, _replace("module", sys))
case("the command line", lambda y: y * 2 if "--fast" in sys.argv else y, lambda: sys.argv.append("--fast"))
case("is a level logged", lambda y: y * 2 if LOGGER.isEnabledFor(10) else y, lambda: LOGGER.setLevel(10))
case("the level of a logger", lambda y: y * LOGGER.getEffectiveLevel(), lambda: LOGGER.setLevel(10))
case("a backend's flag", lambda y: y * 2 if torch.backends.mkldnn.enabled else y, lambda: _mkldnn(False))
case(
    "deterministic kernels",
    lambda y: y * 2 if torch.are_deterministic_algorithms_enabled() else y,
    lambda: torch.use_deterministic_algorithms(True),
)
case(
    "the precision of a product",
    lambda y: y * 2 if torch.get_float32_matmul_precision() == "high" else y,
    lambda: torch.set_float32_matmul_precision("high"),
)


def _mkldnn(enabled: bool) -> None:
    torch.backends.mkldnn.enabled = enabled  # type: ignore[assignment]


class Model(nn.Linear):
    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__(4, 4)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(super().forward(x))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Undo what the cases change."""
    deterministic, precision = torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision()
    mkldnn, level = torch.backends.mkldnn.enabled, LOGGER.level
    monkeypatch.setitem(globals(), "WORLD", World())
    monkeypatch.setattr(sys, "argv", ["train.py"])
    yield WORLD
    LOGGER.setLevel(level)
    torch.set_deterministic_debug_mode(deterministic)
    torch.set_float32_matmul_precision(precision)
    _mkldnn(mkldnn)
    globals().pop("LATER", None)
    for name in (FACTOR, FLAG):
        os.environ.pop(name, None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", CASES)
def test_what_comes_later_is_captured(one_rank: DeviceMesh, world: World, text: str) -> None:
    code, change = CASES[text]
    torch.manual_seed(0)
    model = Model(code)
    sharded: Any = autoshard(copy.deepcopy(model), one_rank, options=EAGER)
    for _ in range(2):
        assert torch.equal(sharded(X), model(X))
    before = model(X)
    assert len(sharded.programs) == 1
    change()
    assert not torch.equal(model(X), before)
    for _ in range(2):
        assert torch.equal(sharded(X), model(X))
    assert len(sharded.programs) == 2


def _library(y: Tensor) -> Tensor:
    """Use what keeps caches, or changes while other code runs."""
    match = re.match(r"(\d+)", os.environ.get(FACTOR, "1"))
    return y if match and LOGGER.isEnabledFor(50) and not hasattr(WORLD.config, "k") else y * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda: os.environ.update({FLAG: "1"}),
        lambda: setattr(WORLD.config, "other", 1.0),
        lambda: re.compile(r"another (pattern)"),
        lambda: logging.getLogger("tests.another").setLevel(10),
        lambda: LOGGER.setLevel(20),
    ],
)
def test_what_no_code_looks_for_may_come(one_rank: DeviceMesh, world: World, change: Callable[[], object]) -> None:
    sharded: Any = autoshard(Model(_library), one_rank, options=EAGER)
    sharded(X)
    change()
    sharded(X)
    assert len(sharded.programs) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("getenv", f"global os.environ has {FACTOR!r}: False -> True"),
        ("getattr", f"global {__name__}.WORLD.config has k: False -> True"),
        ("in a dict", f"global {__name__}.WORLD.table has 'b': False -> True"),
        ("the first item", f"global {__name__}.WORLD.order (keys): 2 keys, 'a', 'b' -> 2 keys, 'b', 'a'"),
        ("items of a set", f"global {__name__}.WORLD.names is another: a set of 1"),
        ("a key that is a class", f"global {__name__}.WORLD.by_class.Base: 1.0 -> 2.0"),
        ("another keyword's default", f"global {__name__}.WORLD.given.__kwdefaults__.more: 1.0 -> 2.0"),
        ("is a level logged", f"global logging.getLogger({LOGGER.name!r}).isEnabledFor(10): False -> True"),
    ],
)
def test_how_what_comes_later_is_told(
    one_rank: DeviceMesh, world: World, caplog: pytest.LogCaptureFixture, text: str, told: str
) -> None:
    code, change = CASES[text]
    sharded: Any = autoshard(Model(code), one_rank, options=EAGER)
    sharded(X)
    change()
    sharded(X)
    warned = [record.getMessage() for record in caplog.records if record.name == "autoshard.programs"]
    assert warned == [f"the model changed, and is captured again: {told}"]


def test_attention_by_another_kernel_is_captured(one_rank: DeviceMesh) -> None:
    def attention(y: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None])

    sharded: Any = autoshard(Model(attention), one_rank, options=EAGER)
    sharded(X)
    with sdpa_kernel(SDPBackend.MATH):
        sharded(X)
    sharded(X)
    assert len(sharded.programs) == 2
