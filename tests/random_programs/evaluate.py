"""Run a case as a user would, and say how it ended."""

from __future__ import annotations

import re
import signal
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard import Mesh, Options, Overlap, check, plan
from autoshard.debug.simulated_ranks import Call, run_on_one_device
from passes.errors import MemoryLimitError, UserError
from tests.random_programs.program import ALONE, Case, Setting, default_dtype
from tests.random_programs.ranks import differences_alone, differences_on_ranks

EQUAL, REFUSED, WRONG, ALARM, INTERNAL, TIMEOUT = "equal", "refused", "wrong", "false alarm", "internal", "timeout"
KINDS = (EQUAL, REFUSED, WRONG, ALARM, INTERNAL, TIMEOUT)
GOOD = (EQUAL, REFUSED)
SECONDS = 120  # of CPU for a case at most; most take less than one
ROOT = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class Outcome:
    """The result of a case: its kind; `what`, equal for failures of one cause; and the `detail` of the failure."""

    kind: str
    what: str = ""
    detail: str = ""
    ops: tuple[str, ...] = ()  # of the model on one device


def evaluate(case: Case) -> Outcome:
    """Return how a case ends: every exception is an outcome."""
    ops = _Ops()
    with default_dtype(case.program.dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", "the candidate plan .* is left out")
        try:
            with _time_limit(SECONDS):
                outcome = _evaluated(case, ops)
        except _OverTime:
            outcome = Outcome(TIMEOUT, f"not done in {SECONDS} s of CPU")
        except UserError as error:
            outcome = Outcome(REFUSED, _alike(error), str(error))
        except Exception as error:
            cause = error.__context__ or error if isinstance(error, UserWarning) else error  # of a candidate left out
            outcome = Outcome(INTERNAL, f"{_alike(cause)} at {_place(cause)}", "".join(traceback.format_exception(error)))
    return replace(outcome, ops=tuple(sorted(ops.names)))


def options_of(setting: Setting, **more: Any) -> Options:
    """Return the options of a setting."""
    given = {"recipe": setting.recipe, **setting.options, **more}
    if isinstance(given.get("overlap"), Mapping):
        given["overlap"] = Overlap(**given["overlap"])
    if "mixed_precision" in given:
        given["mixed_precision"] = MixedPrecisionPolicy(param_dtype=getattr(torch, given["mixed_precision"]))
    return Options(**given)


def mesh_of(setting: Setting) -> Mesh:
    """Return the mesh of a setting: it names the hardware, unless that is unknown or this machine's."""
    return Mesh(setting.mesh) if setting.hardware in ("auto", None) else Mesh(setting.mesh, hardware=setting.hardware)


def _evaluated(case: Case, ops: _Ops) -> Outcome:
    (model, args), setting = case.program.make(), case.setting
    with torch.random.fork_rng():
        run_on_one_device(Call(model, args, {}), training=setting.training, inside=ops)
    if setting.ranks == ALONE:
        return _alone(case)
    more: dict[str, Any] = {"hardware": None} if setting.hardware is None else {}
    with torch.set_grad_enabled(setting.training):
        if setting.memory is not None and setting.hardware is not None:
            best = plan(model, mesh_of(setting), args, options=options_of(setting, **more))
            assert best.cost is not None
            more["memory_limit"] = max(1, int(best.cost.peak_memory * setting.memory))
        try:
            outcome = _checked(model, args, setting, options_of(setting, **more))
        except MemoryLimitError as error:
            if setting.memory == 1:
                return Outcome(INTERNAL, "a plan does not fit in its own peak", str(error))
            more["memory_limit"] = _suggested(error)
            outcome = _checked(model, args, setting, options_of(setting, **more))
    return outcome if setting.ranks is None else _judged(case, outcome)


def _suggested(error: MemoryLimitError) -> int:
    """Return the limit that a message says would do."""
    return int(re.findall(r"memory_limit=(\d+)", str(error))[0])


def _checked(model: nn.Module, args: tuple[Any, ...], setting: Setting, options: Options) -> Outcome:
    found = check(model, mesh_of(setting), args, options=options)
    if found:
        return Outcome(EQUAL, detail=found.not_compared)
    if found.results:
        return Outcome(WRONG, f"results of {found.first.op if found.first else 'capture'}", str(found))
    assert found.first is not None
    return Outcome(ALARM, f"values of {found.first.op}", str(found))


def _alone(case: Case) -> Outcome:
    """Compare compiled code with the model on one device, and, where it is wrong, torch's own compiled code with it."""
    options = options_of(case.setting, progress=False)
    found = differences_alone(case, options)
    if not found:
        return Outcome(EQUAL)
    whose = "autoshard's alone" if differences_alone(case, None) == [] else "torch.compile's as well"
    return Outcome(WRONG, f"compiled code, {whose}", "\n".join(found))


def _judged(case: Case, outcome: Outcome) -> Outcome:
    """Compare what real ranks give with the model on one device: a check that says otherwise is wrong itself."""
    found = differences_on_ranks(case, options_of(case.setting, compile=case.setting.ranks))
    if found:
        said = f"check says {outcome.kind}, {case.setting.ranks} ranks differ"
        return Outcome(WRONG, said, "\n".join([*found, outcome.detail]))
    return outcome if outcome.kind == EQUAL else replace(outcome, kind=ALARM)


def _alike(error: BaseException) -> str:
    """Return the class and the first words of a message, without what is particular to a case."""
    line = str(error).partition("\n")[0]
    line = re.sub(r"'[^']*'|%\w+|\([^)]*\)|\[[^]]*\]|\{[^}]*\}", "_", line)
    line = re.sub(r"\b[apbmv]\d+\b|\d[\d.e+-]*", "_", line)
    return f"{type(error).__name__}: {line[:100]}"


def _place(error: BaseException) -> str:
    """Return the last line of this project that a traceback passes through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(ROOT)]
    if error.__cause__ is not None and frames:
        return f"{frames[-1].name}, {_place(error.__cause__)}"
    return f"{Path(frames[-1].filename).name} {frames[-1].name}" if frames else "?"


class _OverTime(BaseException):
    """The time is over; not an Exception, so that nothing catches it on the way."""


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def over(number: int, frame: FrameType | None) -> None:
        raise _OverTime

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class _Ops(TorchDispatchMode):
    """Collect the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))
