"""Capture a call in other sizes by running the model's code, where an earlier capture tells what the run computes.

The code runs on tensors without data. It has to call the same functions of torch, in the same order, on the same values as
the earlier graph does; then that graph, with the numbers of the run, is the graph of this call. Where anything else differs
(a call, a flag, a dtype, an object that the run changes), dynamo traces the call as it did the first.
"""

from __future__ import annotations

import inspect
import io
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from autoshard.capture.changes import NOTHING_NEW
from autoshard.capture.fake_module import FakeModule
from autoshard.capture.flat_call import FlatCall, unreturned
from autoshard.capture.python_state import Functions, Held
from autoshard.capture.signature import Call, InputSpec, NotReturned, Outputs, describe_output
from passes._torch import CalledFunction, as_traced, called_functions, name_of, quiet_loggers
from passes.ir.graph import Input, InputRole

_log = logging.getLogger("autoshard.capture")

_WITHOUT_EFFECT = ("zeros", "_log_api_usage_once")  # calls whose value is not used

_COMMUTATIVE = frozenset({"add", "mul", "and", "or", "xor"})
_ATTRIBUTES = {"numpy_T": "T", "mT": "mT", "mH": "mH", "matrix_H": "H"}  # ops, as which torch 2.14 traces them
_VIEWS = frozenset({"getitem", "view", "reshape", "expand", "unsqueeze", "squeeze", "transpose", "permute"})


@dataclass(frozen=True)
class ResizedCall:
    """A call captured by a run: the number of the earlier call that it is like, and the names that the run's code reads."""

    call: FlatCall
    number: int
    names: frozenset[str]


class _Unlike(Exception):
    """The run is not that of the earlier graph, in other sizes."""


def resized_call(
    earlier: Sequence[FlatCall], fake: FakeModule, call: Call, leaves: Mapping[str, Any], mode: Any
) -> ResizedCall | None:
    """Return a call of `fake` with `leaves`, captured as one of the `earlier` calls was; None where the run is not surely
    like one of them.

    The run may change `fake`.
    """
    arguments = {Input(InputRole.INPUT, path): leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    tensors = {**fake.tensors, **arguments}
    possible = {number: one for number, one in enumerate(earlier) if _is_possible(one, tensors)}
    if not possible:
        return None
    try:
        run = _run(fake, call, leaves, mode)
    except Exception as error:  # of the user's code, too, which may ask for values
        _log.debug("dynamo traces a call in other sizes anew: %s", error)
        return None
    for number, one in reversed(possible.items()):
        try:
            graph = _graph(one, tensors, run)
        except (_Unlike, TypeError) as error:  # arguments that do not bind
            _log.debug("a call in other sizes is not like call %d: %s", number + 1, error)
            continue
        signature = replace(
            one.signature,
            forward=call.bound.signature,
            inputs=tuple(
                InputSpec(path, tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
                for path, leaf in call.leaves.items()
                if isinstance(leaf, torch.Tensor)
            ),
            constants=tuple((path, leaf) for path, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)),
            results=run.output.results,
        )
        found = replace(one, graph_module=graph, tensors=tensors, constants=dict(fake.attributes), signature=signature)
        return ResizedCall(found, number, run.names)
    return None


def _is_possible(earlier: FlatCall, tensors: Mapping[Input, torch.Tensor]) -> bool:
    """Return whether an earlier call has the tensors of this one, changes no objects, and leaves no message or check out,
    which a run would write or make.
    """
    left_out = list(map(unreturned, _left_out(earlier)))
    is_silent = all(remark.routine or remark in left_out for remark in earlier.remarks)
    return is_silent and earlier.new_values is NOTHING_NEW and list(tensors) == list(earlier.tensors)


def _left_out(earlier: FlatCall) -> list[NotReturned]:
    return [value for _, value in earlier.signature.results if isinstance(value, NotReturned)]


@dataclass(frozen=True)
class _Run:
    called: list[CalledFunction]
    output: Outputs
    names: frozenset[str]


def _run(fake: FakeModule, call: Call, leaves: Mapping[str, Any], mode: Any) -> _Run:
    """Return what a run of the code calls, returns and reads. Raises _Unlike if it does what no graph can.

    It runs again if the first run changes something: it may have set a flag in a config, and a later one finds that set.
    """
    args, kwargs = call.with_leaves(dict(leaves))
    functions, own, outer = Functions(), Held.by(fake.module, (args, kwargs), Functions()), Held()
    with quiet(), mode, as_traced(), functions.noted(outer), called_functions() as called:
        output = fake.module(*args, **kwargs)
    if changed := own.changed(but_flags=True):
        raise _Unlike(f"it changes {changed}")
    if functions.draws or functions.checkpoints or functions.stored():
        raise _Unlike("it draws numbers, makes a checkpoint or assigns a variable outside of it")
    if not own.changed() and not outer.changed():
        return _Run(called, describe_output(output), functions.names)
    held = Held.by(fake.module, (args, kwargs), functions)
    with quiet(), mode, as_traced(), called_functions() as called:
        output = fake.module(*args, **kwargs)
    if changed := held.changed():
        raise _Unlike(f"it changes {changed}")
    return _Run(called, describe_output(output), functions.names)


@contextmanager
def quiet() -> Iterator[None]:
    """Log, print and warn nothing: dynamo leaves such calls out, too."""
    with quiet_loggers(), redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _graph(earlier: FlatCall, tensors: Mapping[Input, torch.Tensor], run: _Run) -> GraphModule:
    """Return the graph of a run. Raises _Unlike if it is not the earlier one in other sizes."""
    output = run.output
    if list(output.left_out) != _left_out(earlier) or output.spec != earlier.signature.out_spec:
        raise _Unlike("it returns something else")
    if tuple(path for path, _ in output.tensors) != earlier.signature.outputs:
        raise _Unlike("it returns other tensors")
    return _Resized(earlier, tensors, run.called).graph([tensor for _, tensor in output.tensors])


class _Resized:
    """The earlier graph, compared with a run call by call."""

    def __init__(
        self, earlier: FlatCall, tensors: Mapping[Input, torch.Tensor], called: Sequence[CalledFunction]
    ) -> None:
        self.earlier, self.called = earlier, iter(called)
        given = earlier.graph_module.graph.find_nodes(op="placeholder")
        self.values: dict[Node, Any] = dict(zip(given, tensors.values(), strict=True))

    def graph(self, outputs: Sequence[torch.Tensor]) -> GraphModule:
        """Return the graph of the run, which returned `outputs`. Raises _Unlike if it is not the earlier one resized."""
        graph, copies = Graph(), dict[Node, Node]()
        returned: Any = self.earlier.graph_module.graph.output_node().args[0]
        ends = dict(zip(returned, outputs, strict=True))  # clones, which no code of the model calls
        for node in self.earlier.graph_module.graph.nodes:
            new = copies[node] = graph.node_copy(node, copies.__getitem__)
            if node in ends:
                if self.values[node.args[0]] is not ends[node]:
                    raise _Unlike(f"it returns another value than {node.args[0]}")
            elif node.op in ("call_function", "call_method"):
                self._resize(node, new, copies)
            elif node.op not in ("placeholder", "output"):
                raise _Unlike(f"{node} is a {node.op}")
        if (more := next(self.called, None)) is not None:
            raise _Unlike(f"it calls {more.name} at its end")
        return GraphModule(self.earlier.graph_module, graph)

    def _resize(self, node: Node, new: Node, copies: Mapping[Node, Node]) -> None:
        """Give `new`, a copy of `node`, the numbers of the run's next call, if that is the same call."""
        source, number = (*node.args, None, None)[:2]
        results = self.values[source] if node.target is operator.getitem and isinstance(source, Node) else None
        if isinstance(results, tuple | list) and isinstance(number, int):
            self.values[node] = results[number]
        elif not node.users and name_of(node.target) in _WITHOUT_EFFECT:
            self.values[node] = node.meta.get("example_value")
            return
        else:
            call, (args, kwargs) = self._like(node)
            new.args, new.kwargs = map_arg(args, copies.__getitem__), map_arg(kwargs, copies.__getitem__)
            self.values[node] = call.result
        example = node.meta.get("example_value")
        if _kind(example) != _kind(self.values[node]):
            raise _Unlike(f"{node} is {_kind(self.values[node])}, and was {_kind(example)}")
        new.meta["example_value"] = self.values[node]

    def _like(self, node: Node) -> tuple[CalledFunction, tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the next call of the run, and its arguments as those of `node`. Views that the earlier graph lacks, as
        nothing used them, are left out: what used one would read another value than the graph does.
        """
        name = name_of(node.target)
        for call in self.called:
            if call.name == "getattr" and name in _ATTRIBUTES and call.args[1] == _ATTRIBUTES[name]:
                call = replace(call, name=name, args=call.args[:1])
            try:
                if call.name != name:
                    raise _Unlike(f"it calls {call.name} where it called {node.target}")
                return call, self._arguments(node, call)
            except _Unlike:
                if name in _COMMUTATIVE and call.name == name and len(call.args) == 2 and not call.kwargs:  # 2 * x may be x * 2
                    return call, self._arguments(node, replace(call, args=call.args[::-1]))
                if call.name not in _VIEWS:
                    raise
        raise _Unlike(f"it does not call {node.target}")

    def _arguments(self, node: Node, call: CalledFunction) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a node with the numbers of the run's call, which may give them in another way."""
        args, kwargs = call.args, call.kwargs
        names = _signature(call.function)
        if names is not None:
            given = names.bind(*args, **kwargs)
            given.apply_defaults()
            own = names.bind(
                *node.args, **{name: value for name, value in node.kwargs.items() if name in names.parameters}
            )
            values, count = list(given.arguments.values()), len(node.args)
            left = [name for name in list(given.arguments)[count:] if name not in node.kwargs]
            if len(given.args) + len(given.kwargs) != len(values) or len(own.arguments) != count + len(node.kwargs):
                raise _Unlike(f"it calls {call.name}, which takes any number of arguments")
            if any(given.arguments[name] != names.parameters[name].default for name in left):
                raise _Unlike(f"it gives {call.name} more arguments")
            args, kwargs = tuple(values[:count]), {name: given.arguments[name] for name in node.kwargs}
        if node.kwargs.keys() != kwargs.keys():
            raise _Unlike(f"it calls {call.name} with other arguments")
        return tuple(self._items(node.args, args)), {
            name: self._argument(item, kwargs[name]) for name, item in node.kwargs.items()
        }

    def _items(self, own: Sequence[Any], now: Sequence[Any]) -> Iterator[Any]:
        if len(own) != len(now):
            raise _Unlike("a call has another number of arguments")
        return (self._argument(*pair) for pair in zip(own, now, strict=True))

    def _argument(self, own: Any, now: Any) -> Any:
        """Return an argument of the earlier call with the numbers of the run's. Nodes, flags and names are the same."""
        if isinstance(own, Node):
            if self.values[own] is not now:
                raise _Unlike(f"it reads another value than {own}")
            return own
        if isinstance(own, tuple | list) and isinstance(now, tuple | list):
            return list(self._items(own, now)) if isinstance(own, list) else tuple(self._items(own, now))
        if isinstance(own, slice) and isinstance(now, slice):
            return slice(*self._items((own.start, own.stop, own.step), (now.start, now.stop, now.step)))
        if isinstance(own, dict) and isinstance(now, dict) and own.keys() == now.keys():
            return {name: self._argument(item, now[name]) for name, item in own.items()}
        if type(own) is not type(now):
            raise _Unlike(f"it gives {type(now).__name__} where it gave {type(own).__name__}")
        if type(own) not in (int, float) and own != now:
            raise _Unlike(f"it gives {now} where it gave {own}")
        return now


def _signature(function: Any) -> inspect.Signature | None:
    """Return the signature of a function in Python; None for one of torch's in C, also with a wrapper in Python."""
    try:
        return inspect.signature(function) if isinstance(function, FunctionType) else None
    except ValueError:
        return None


def _kind(value: Any) -> Any:
    """Return what a value of the same call has in common in all sizes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.ndim, value.device, value.requires_grad, type(value) is torch.nn.Parameter
    if isinstance(value, tuple | list):
        return [_kind(item) for item in value]
    return type(value)
