"""The errors that autoshard raises on purpose, divided into the user's mistakes and its own.

    AutoshardError
    ├── UserError                  the input cannot work; the message says what to change
    │   ├── MeshError              a mesh, or an axis of it
    │   ├── RecipeError            a recipe's name, or where it was put
    │   ├── ConstraintError        a placement or glob in Options(params=, inputs=, outputs=)
    │   ├── MemoryLimitError       no plan fits in the memory of a device
    │   ├── CaptureError           the model cannot be captured as one graph
    │   ├── InputError             a call does not fit what was captured
    │   ├── UnknownOpError         an op without a rule, where Options(unknown_ops="error")
    │   ├── PlanError              a plan file that is damaged, or a plan for another model, mesh or options
    │   └── GraphTextError         a dump that does not read back
    ├── DistributedError           another rank failed, or the ranks disagree
    └── CompilerError              autoshard is wrong; the message names pass, node and stage
        ├── VerifyError            a graph is not valid at its stage
        ├── PassError              a pass failed; lists the passes that ran before it
        └── UnlikeLayersError      equal layers came out unlike; the planner then plans the whole graph
"""

from __future__ import annotations


class AutoshardError(Exception):
    """The base class of all errors that autoshard raises on purpose."""


class UserError(AutoshardError, ValueError):
    """An input that cannot work; the message says why and what to change."""


class MeshError(UserError):
    """A mesh that cannot be used, or an axis that it does not have."""


class RecipeError(UserError):
    """An unknown recipe, or one on axes that it cannot serve."""


class ConstraintError(UserError):
    """A constraint that names nothing, or that the mesh cannot honour."""


class MemoryLimitError(UserError):
    """A memory limit in which no plan fits; `smallest` is one in which a plan was found, in bytes."""

    def __init__(self, message: str, *, smallest: float = float("inf")) -> None:
        super().__init__(message)
        self.smallest = smallest


class CaptureError(UserError):
    """A model that cannot be captured as one graph; `for_arguments` if it fails for the arguments of this call."""

    def __init__(self, message: str, *, for_arguments: bool = False) -> None:
        super().__init__(message)
        self.for_arguments = for_arguments


class InputError(UserError):
    """Arguments of a call that do not fit what was captured."""


class UnknownOpError(UserError):
    """An op without a sharding rule, where Options(unknown_ops="error")."""


class PlanError(UserError):
    """A plan file that cannot be read, or a plan for another model, mesh or options, listed in `differences`."""

    def __init__(self, message: str, *, differences: str = "") -> None:
        super().__init__(message)
        self.differences = differences


class GraphTextError(UserError):
    """Graph text that does not read back."""


class DistributedError(AutoshardError, RuntimeError):
    """A failure of another rank, or a disagreement of the ranks of a group.

    It is no ValueError, so that a loop that skips bad samples by `except ValueError` does not go on without the others.
    """


class CompilerError(AutoshardError):
    """A bug in autoshard: please report it with the dump."""


class VerifyError(CompilerError):
    """A graph that is not valid at the stage it claims."""


class PassError(CompilerError):
    """A pass that failed, with the passes that ran before it."""


class UnlikeLayersError(CompilerError):
    """Equal layers of a folded graph that do not look alike in its program, so that it cannot be unrolled."""


def with_article(name: str) -> str:
    """Return the name of a type as a message says it: "a Tensor", "an OrderedDict", "an LSTM"."""
    is_spelled = name[:2].isupper() and name[0] in "FHLMNRSX"
    return f"an {name}" if name[:1] in "AEIOaeio" or name == "ndarray" or is_spelled else f"a {name}"
