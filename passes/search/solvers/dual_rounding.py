"""Read assignments and the costs of single strategies off the reduced costs of a dual."""

from __future__ import annotations

from collections.abc import Sequence

from passes.search.model.factor_graph import Floats
from passes.search.solvers.dual_ascent import Dual


def rounded(dual: Dual, order: Sequence[int]) -> list[int]:
    """Round to an assignment: each variable in `order` takes the strategy that is cheapest beside those before it."""
    picked = [-1] * len(dual.unary)
    for variable in order:
        costs = dual.unary[variable].copy()
        for number in dual.adjacency.outgoing[variable]:
            factor = dual.factors[number]
            for user, endpoint in enumerate(factor.users):
                if picked[endpoint.variable] >= 0:
                    costs += factor.costs[user][:, endpoint.at[picked[endpoint.variable]]][factor.maker.at]
        for number, user in dual.adjacency.incoming[variable]:
            factor = dual.factors[number]
            maker = factor.maker
            if picked[maker.variable] >= 0:
                costs += factor.costs[user][maker.at[picked[maker.variable]]][factor.users[user].at]
        picked[variable] = int(costs.argmin())
    return picked


def min_marginals(dual: Dual, variable: int) -> Floats:
    """Return the reduced cost of each strategy of a variable with the best of its neighbours: min-marginals over the bound,
    as far as the adjacent factors know."""
    costs = dual.unary[variable].copy()
    for number in dual.adjacency.outgoing[variable]:
        factor = dual.factors[number]
        costs += factor.costs.min(2).sum(0)[factor.maker.at]
    for number, user in dual.adjacency.incoming[variable]:
        factor = dual.factors[number]
        costs += factor.costs[user].min(0)[factor.users[user].at]
    return costs
