"""Share the cost of a value's transition between the users that need the same layout: one pairwise factor per user."""

from __future__ import annotations

from copy import copy

import numpy as np

from passes.search.model.factor_graph import Floats
from passes.search.model.transitions import INFEASIBLE, Endpoint


class TransitionFactor:
    """A value's pairwise factors, one per user.

    `costs[user, source, target]` is the user's share of the transition cost plus the messages that were passed to it.
    """

    def __init__(self, maker: Endpoint, users: list[Endpoint], transitions: Floats) -> None:
        """Share out `transitions[source, target]`, seconds that are paid once however many users need the target."""
        self.maker, self.users = maker, users
        self.used = np.zeros((len(users), 1, transitions.shape[1]))  # 1 where the user may need the target
        for number, user in enumerate(users):
            self.used[number, 0, user.present] = 1.0
        self.counts = np.maximum(self.used.sum(0), 1.0)
        self.paid = np.where(self.used > 0, transitions / self.counts, 0.0)  # each user's share of the transition cost itself
        self.costs = np.where(self.used > 0, self.paid, INFEASIBLE)
        self.transitions = transitions

    def reweigh(self, transitions: Floats) -> None:
        """Change the transition costs; users keep their shares of them."""
        ratio = np.where(self.transitions > 0, transitions / np.where(self.transitions > 0, self.transitions, 1.0), 0.0)
        paid = np.where(self.transitions > 0, self.paid * ratio, transitions / self.counts * self.used)
        self.costs += paid - self.paid
        self.paid, self.transitions = paid, transitions

    def lift(self) -> float:
        """Raise negative costs to zero, and return what that takes off the bound, as a negative number."""
        taken = 0.0
        for number, user in enumerate(self.users):
            costs = self.costs[number]
            low = np.minimum(costs[:, user.present].min(1), 0.0)
            if low.any():
                costs -= low.min()
                taken += float(low.min())
        return taken

    def copied(self) -> TransitionFactor:
        """Return a copy that can be changed."""
        new = copy(self)
        new.paid, new.costs = self.paid.copy(), self.costs.copy()
        return new

    def share(self) -> None:
        """Pool the shares that users do not need and distribute them evenly."""
        if len(self.users) > 1:
            given = np.minimum(self.costs, self.paid)
            change = np.add.reduce(given, axis=0)
            change /= self.counts
            change = np.subtract(change, given, out=given)
            change *= self.used
            self.paid += change
            self.costs += change
