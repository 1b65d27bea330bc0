"""Find the communication that chunks of matrix products could hide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from passes.cost.program import Task
from passes.ir.matmul_chunks.sites import Site


def exposed_by_form(sites: Sequence[Site], exposed: Iterable[tuple[Task, float]]) -> dict[object, float]:
    """Return, by form, the `exposed` seconds of a step's tasks that chunks could hide.

    Of the messages that nothing waits for, only the one with the longest exposed time counts: the others queue for
    their link, and would do so in chunks.
    """
    forms: dict[str, object] = {site.collective.name: site.form for site in sites}
    found, late = dict.fromkeys(forms.values(), 0.0), list[tuple[float, object]]()
    for task, seconds in exposed:
        for form in {forms[name] for name in task.nodes if name in forms}:
            if task.deferrable:
                late.append((seconds, form))
            else:
                found[form] += seconds
    if late:
        longest, form = max(late, key=lambda one: one[0])
        found[form] += longest
    return found
