"""A lower bound on every plan, and on every plan that makes a given choice, by dual ascent.

The costs of a problem are choices' and moves'. Any part of a cost can be carried along an edge from one to the other
without changing what a plan costs in all. Two walks over the variables (as sequential tree-reweighted message passing:
Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy Minimization", 2006) carry costs to where
they collide; what is left is not negative, and what was taken off in front is the bound. A choice whose rest is more
than the bound leaves to a plan in hand is in no better plan.

A move that several users share is split between them; what one user has no use for goes to the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from passes.search.problem import Floats, Ints

NEVER = 1e5  # seconds: what cannot be


@dataclass(eq=False)
class Slot:
    """Layouts (positions on one side of a value) that the choices of a variable give or need."""

    variable: int
    at: Ints  # per choice
    size: int
    order: Ints = field(init=False)
    starts: Ints = field(init=False)
    present: Ints = field(init=False)
    is_full: bool = field(init=False)  # no layout that no choice has

    def __post_init__(self) -> None:
        self.order = np.argsort(self.at, kind="stable")
        ordered = self.at[self.order]
        self.starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        self.present = ordered[self.starts]
        self.is_full = len(self.present) == self.size

    def compacted(self, kept: Sequence[Ints], layouts: Ints) -> Slot:
        """The same of the choices (per variable) that are kept, which have no other `layouts`."""
        return Slot(self.variable, np.searchsorted(layouts, self.at[kept[self.variable]]), len(layouts))

    def least(self, costs: Floats) -> Floats:
        """Per layout, the least cost of a choice that has it."""
        ordered = costs[self.order]
        least: Floats = ordered if len(self.starts) == len(ordered) else np.minimum.reduceat(ordered, self.starts)
        if self.is_full:
            return least
        found = np.full(self.size, NEVER)
        found[self.present] = least
        return found

    def having(self, choices: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Layouts that one of these choices has."""
        found = np.zeros(self.size, dtype=np.bool_)
        found[self.at[choices]] = True
        return found


class Exchange:
    """A value: `costs[user, source, target]` is each user's part of a move, and what was carried to it."""

    def __init__(self, maker: Slot, users: list[Slot], moves: Floats) -> None:
        """`moves[source, target]` is paid once, whoever needs it."""
        self.maker, self.users = maker, users
        self.used = np.zeros((len(users), 1, moves.shape[1]))  # 1 where the user may need the target
        for number, user in enumerate(users):
            self.used[number, 0, user.present] = 1.0
        self.counts = np.maximum(self.used.sum(0), 1.0)
        self.paid = np.where(self.used > 0, moves / self.counts, 0.0)  # each user's part of the move itself
        self.costs = np.where(self.used > 0, self.paid, NEVER)
        self.moves = moves

    def reprice(self, moves: Floats) -> None:
        """Other prices of moves: users pay the same parts of them."""
        ratio = np.where(self.moves > 0, moves / np.where(self.moves > 0, self.moves, 1.0), 0.0)
        paid = np.where(self.moves > 0, self.paid * ratio, moves / self.counts * self.used)
        self.costs += paid - self.paid
        self.paid, self.moves = paid, moves

    def lift(self) -> float:
        """Make costs that have become negative zero at least; what that took off the bound, as a negative number."""
        taken = 0.0
        for number, user in enumerate(self.users):
            costs = self.costs[number]
            low = np.minimum(costs[:, user.present].min(1), 0.0)
            if low.any():
                costs -= low.min()
                taken += float(low.min())
        return taken

    def copied(self) -> Exchange:
        new = copy(self)
        new.paid, new.costs = self.paid.copy(), self.costs.copy()
        return new

    def compacted(self, kept: Sequence[Ints]) -> Exchange:
        """The same between the choices (per variable) that are kept."""
        sources = np.unique(self.maker.at[kept[self.maker.variable]])
        targets = np.unique(np.concatenate([user.at[kept[user.variable]] for user in self.users]))
        maker = self.maker.compacted(kept, sources)
        new = Exchange(maker, [user.compacted(kept, targets) for user in self.users], self.moves[np.ix_(sources, targets)])
        at = np.ix_(np.arange(len(self.users)), sources, targets)
        unused = new.used <= 0
        new.paid, new.costs = np.where(unused, 0.0, self.paid[at]), np.where(unused, NEVER, self.costs[at])
        return new

    def share(self) -> None:
        """What users pay for a move without need goes to all in equal parts."""
        if len(self.users) > 1:
            given = np.minimum(self.costs, self.paid)
            change = np.add.reduce(given, axis=0)
            change /= self.counts
            change = np.subtract(change, given, out=given)
            change *= self.used
            self.paid += change
            self.costs += change


@dataclass(eq=False)
class Left:
    """What a search still looks at: per variable its choices, per value [user, source, target]."""

    choices: list[NDArray[np.bool_]]
    moves: list[NDArray[np.bool_]]

    @property
    def is_possible(self) -> bool:
        """Whether every variable has a choice."""
        return all(bool(choices.any()) for choices in self.choices)

    @property
    def size(self) -> int:
        """Moves, of each user."""
        return sum(int(moves.sum()) for moves in self.moves)

    def joined(self, other: Left) -> Left:
        """What either looks at."""
        choices = [a | b for a, b in zip(self.choices, other.choices, strict=True)]
        return Left(choices, [a | b for a, b in zip(self.moves, other.moves, strict=True)])


_Ahead = tuple[list[tuple[int, int]], int]  # exchanges and user numbers, -1 less it for the maker; and how many are not ahead


@dataclass(eq=False)
class Dual:
    """`bound` plus what is left in `choices` and in the exchanges is what a plan costs."""

    choices: list[Floats]
    exchanges: list[Exchange]
    bound: float = 0.0
    slack: float = float("inf")  # a choice that leaves more than this over the bound is struck
    deadline: float = float("inf")  # by `time.perf_counter`: from then on it ascends one step at a time
    struck: list[NDArray[np.bool_]] = field(default_factory=list)  # per variable and choice
    made: list[list[int]] = field(default_factory=list)  # per variable, exchanges it makes
    used: list[list[tuple[int, int]]] = field(default_factory=list)  # per variable, exchanges and user numbers
    ahead: list[list[_Ahead]] = field(default_factory=list)  # per variable, backward and forward

    def __post_init__(self) -> None:
        self.struck = [np.zeros(len(costs), dtype=np.bool_) for costs in self.choices]
        self.made = [[] for _ in self.choices]
        self.used = [[] for _ in self.choices]
        for number, exchange in enumerate(self.exchanges):
            self.made[exchange.maker.variable].append(number)
            for user, slot in enumerate(exchange.users):
                self.used[slot.variable].append((number, user))
        variables = range(len(self.choices))
        self.ahead = [[self._ahead(variable, forward=forward) for variable in variables] for forward in (False, True)]

    def _ahead(self, variable: int, *, forward: bool) -> _Ahead:
        ahead: list[tuple[int, int]] = []
        behind = 0
        ends = [(n, -1 - user, s.variable) for n in self.made[variable] for user, s in enumerate(self.exchanges[n].users)]
        ends += [(number, user, self.exchanges[number].maker.variable) for number, user in self.used[variable]]
        for number, user, other in ends:
            if (other > variable) == forward and other != variable:
                ahead.append((number, user))
            else:
                behind += 1
        return ahead, behind

    def ascend(self, sweeps: int, tolerance: float = 1e-5) -> None:
        """Walk forward and backward until the bound grows by less than `tolerance` of itself."""
        for _ in range(sweeps):
            before = self.bound
            for variable in range(len(self.choices)):
                self._visit(variable, forward=True)
            for variable in reversed(range(len(self.choices))):
                self._visit(variable, forward=False)
            if time.perf_counter() > self.deadline:
                break
            if self.bound - before < tolerance * max(self.bound, 1e-12):
                break

    def exclude(self, variable: int, choices: Ints) -> None:
        """Strike these choices of a variable."""
        self.struck[variable][choices] = True
        self.choices[variable][choices] = NEVER

    def strike(self, worst: float, sweeps: int) -> None:
        """Strike choices that no plan of less than `worst` makes."""
        self.slack = worst - self.bound
        self.ascend(sweeps, 0.0)

    def left(self) -> Left:
        """The choices and moves that were not struck."""
        moves = [(e.costs < self.closed) & (e.used > 0) for e in self.exchanges]
        return Left([~struck for struck in self.struck], moves)

    def nearest(self, most: int, plans: Sequence[Sequence[int]] = ()) -> Left:
        """Of what was not struck, no more than so many choices of a variable, the cheapest; and all that `plans` make."""
        picked = [~struck for struck in self.struck]
        for variable, choices in enumerate(picked):
            if choices.sum() > most:
                costs = np.where(choices, self.least(variable), NEVER)
                choices[np.argsort(costs, kind="stable")[most:]] = False
            choices[[plan[variable] for plan in plans]] = True
        found = []
        for exchange in self.exchanges:
            made = exchange.maker.having(picked[exchange.maker.variable])[:, None] & (exchange.moves < NEVER)
            users = [user.having(picked[user.variable])[None, :] for user in exchange.users]
            found.append(np.stack([made & needed for needed in users]))
        return Left(picked, found)

    def least(self, variable: int) -> Floats:
        """Per choice, what it costs over the bound as far as its variable and values know."""
        costs = self.choices[variable].copy()
        for number in self.made[variable]:
            exchange = self.exchanges[number]
            costs += exchange.costs.min(2).sum(0)[exchange.maker.at]
        for number, user in self.used[variable]:
            exchange = self.exchanges[number]
            costs += exchange.costs[user].min(0)[exchange.users[user].at]
        return costs

    @property
    def closed(self) -> float:
        """What a move that was struck costs at least."""
        return min(self.slack, NEVER / 2)

    def copied(self) -> Dual:
        """The same, to be struck or to go on from here."""
        exchanges = [exchange.copied() for exchange in self.exchanges]
        new = Dual([costs.copy() for costs in self.choices], exchanges, self.bound, self.slack, self.deadline)
        new.struck = [struck.copy() for struck in self.struck]
        return new

    def compacted(self) -> tuple[Dual, list[Ints]]:
        """The same without what was struck; and per variable, the choices that are left."""
        kept = [np.flatnonzero(~struck) for struck in self.struck]
        exchanges = [exchange.compacted(kept) for exchange in self.exchanges]
        choices = [costs[numbers] for costs, numbers in zip(self.choices, kept, strict=True)]
        return Dual(choices, exchanges, self.bound, self.slack, self.deadline), kept

    def _collect(self, variable: int) -> None:
        costs = self.choices[variable]
        for number in self.made[variable]:
            exchange = self.exchanges[number]
            exchange.share()
            moves = exchange.costs
            least = np.minimum.reduce(moves, axis=2)
            moves -= least[:, :, None]
            self._close(moves)
            costs = costs + (least[0] if len(least) == 1 else np.add.reduce(least, axis=0))[exchange.maker.at]
        for number, user in self.used[variable]:
            exchange = self.exchanges[number]
            moves = exchange.costs[user]
            least = np.minimum.reduce(moves, axis=0)
            moves -= least
            self._close(moves)
            costs = costs + least[exchange.users[user].at]
        low = float(np.minimum.reduce(costs))
        self.bound += low
        costs = costs - low
        self.slack -= low
        if self.slack < NEVER:
            self.struck[variable] |= costs > self.slack
        costs[self.struck[variable]] = NEVER
        self.choices[variable] = costs

    def _close(self, moves: Floats) -> None:
        """Strike what is over the slack."""
        if self.slack < NEVER:
            np.copyto(moves, NEVER, where=moves > self.slack)

    def _visit(self, variable: int, *, forward: bool) -> None:
        self._collect(variable)
        ahead, behind = self.ahead[forward][variable]
        if not ahead:
            return
        rest = self.choices[variable]
        part = rest / max(len(ahead), behind)
        for number, user in ahead:
            exchange = self.exchanges[number]
            slot = exchange.maker if user < 0 else exchange.users[user]
            moved = slot.least(part)
            rest = rest - moved[slot.at]
            if user < 0:
                moves = exchange.costs[-1 - user]
                moves += moved[:, None]
            else:
                moves = exchange.costs[user]
                moves += moved
        self.choices[variable] = np.maximum(rest, 0.0)

    def decode(self, order: Sequence[int]) -> list[int]:
        """A plan: one variable after the other takes what is cheapest beside those before it."""
        picked = [-1] * len(self.choices)
        for variable in order:
            costs = self.choices[variable].copy()
            for number in self.made[variable]:
                exchange = self.exchanges[number]
                for user, slot in enumerate(exchange.users):
                    if picked[slot.variable] >= 0:
                        costs += exchange.costs[user][:, slot.at[picked[slot.variable]]][exchange.maker.at]
            for number, user in self.used[variable]:
                exchange = self.exchanges[number]
                maker = exchange.maker
                if picked[maker.variable] >= 0:
                    costs += exchange.costs[user][maker.at[picked[maker.variable]]][exchange.users[user].at]
            picked[variable] = int(costs.argmin())
        return picked
