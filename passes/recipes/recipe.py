"""The record of a recipe: all that the compiler knows of an expert's plan for one mesh axis.

A recipe is a record of facts and functions. Passes and the planner read these and never compare names. A new recipe is
one record, registered with `register_recipe`:

    register_recipe(Recipe("rows", "rows of embedding tables are sharded", decide=shard_tables))
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from torch.fx import GraphModule, Node

from passes.errors import RecipeError
from passes.ir.layout import Layout, Placement
from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class Site:
    """One axis of a mesh, and the normalized graph that a recipe is applied to."""

    gm: GraphModule
    mesh: Mesh
    axis: int
    batch_parts: int  # how many parts other axes cut the batch into
    feature_parts: int = 1  # how many parts other axes cut heads and channels into

    @property
    def size(self) -> int:
        """Return the number of ranks of the axis."""
        return self.mesh.sizes[self.axis]


@dataclass(frozen=True)
class Decision:
    """A placement on the axis of a recipe, and why."""

    placement: Placement
    reason: str
    again: bool = False  # of an operand: brought there again in the backward, instead of kept


@dataclass(frozen=True)
class Decisions:
    """Placements that a recipe chooses on its axis. They are defaults: constraints of the user come first."""

    parameters: Mapping[str, Decision] = field(default_factory=dict)  # by FQN: stored and used like this
    values: Mapping[Node, Decision] = field(default_factory=dict)  # by the call that makes the value
    remarks: tuple[tuple[Node, str], ...] = ()
    inputs: Mapping[Node, Decision] = field(default_factory=dict)  # by placeholder: how the caller splits it
    operands: Mapping[tuple[Node, int], Decision] = field(default_factory=dict)  # by call and number: how it is taken
    gathered: frozenset[str] = frozenset()  # FQNs of parameters that are used whole: stored in parts, gathered for use


Decide = Callable[[Site], Decisions]
Store = Callable[[Layout, int, Sequence[int], Mesh], Placement | None]
Spread = Callable[[Mesh, tuple[int, ...]], tuple["Recipe", ...]]


def decide_nothing(site: Site) -> Decisions:
    """Decide nothing: all placements follow from the data flow."""
    return Decisions()


@dataclass(frozen=True)
class Recipe:
    """One expert's plan for one mesh axis.

    - `carries_batch`: inputs are split over the axis along dim 0, as in data parallelism.
    - `carries_sequence`: inputs are split over the axis along their positions, as in context parallelism.
    - `decide`: finds in the graph which parameters and values the axis shards, as in tensor parallelism.
    - `store(layout, axis, shape, mesh)`: how the axis holds a parameter between steps, given the layout on other axes:
      `R` whole, `S(dim)` in parts, None if it cannot be split. A parameter in parts is gathered before use; gradients
      and optimizer state are held like their parameter.
    - `frees_gathered`: gathered parameters are freed after the forward and gathered again for the backward.
    - `twin`: the name of the recipe that only differs in `frees_gathered`.
    - `variants`: names of recipes that fix what this one chooses by an estimate; a plan is simulated with each of them.
    - `in_search`: `recipe="auto"` compares it with the plan that it searches for.
    - `spread(mesh, axes)`: for a recipe made of others, the recipe of each given axis. Raises RecipeError.

    Raises RecipeError for a name that cannot be written in `Options(recipe="a+b")`, or facts that contradict each other.
    """

    name: str
    summary: str  # one line
    _: KW_ONLY
    carries_batch: bool = False
    carries_sequence: bool = False
    decide: Decide = decide_nothing
    store: Store | None = None
    frees_gathered: bool = False
    twin: str = ""
    variants: tuple[str, ...] = ()
    in_search: bool = True
    spread: Spread | None = None

    @property
    def shards_compute(self) -> bool:
        """Return whether the axis may shard parameters while they are used."""
        return self.decide is not decide_nothing and not self.carries_sequence

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[^\W\d]\w*(\(\w+\))?", self.name) or self.name in ("auto", "none"):
            raise RecipeError(f"Recipe({self.name!r}): a recipe's name is a word such as 'fsdp', and not 'auto' or 'none'")
        if self.frees_gathered and self.store is None:
            raise RecipeError(
                f"Recipe({self.name!r}): frees_gathered=True, but without store= parameters are never gathered; give "
                "store=first_dim_that_divides, or leave frees_gathered out"
            )
