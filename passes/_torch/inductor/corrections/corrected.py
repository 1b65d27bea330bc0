"""All corrections of Inductor, in force while a graph is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from passes._torch.inductor.corrections.buffers_of_fused_loops import buffers_of_fused_loops
from passes._torch.inductor.corrections.copies_before_overwrites import CopiesBeforeOverwrites
from passes._torch.inductor.corrections.maxima_of_bytes import MaximaOfBytes
from passes._torch.inductor.corrections.places_of_scatters import places_of_scatters
from passes._torch.inductor.corrections.reads_after_scatters import reads_after_scatters
from passes._torch.inductor.corrections.steps_of_64_bits import steps_of_64_bits
from passes._torch.inductor.corrections.tails_of_reductions import tails_of_reductions

CORRECTING_PASSES = (MaximaOfBytes(), CopiesBeforeOverwrites())  # of a graph, before code is made of it
_REPLACING = (reads_after_scatters, tails_of_reductions, places_of_scatters, buffers_of_fused_loops, steps_of_64_bits)


@contextmanager
def corrected() -> Iterator[None]:
    """Replace the parts of Inductor that write wrong code."""
    with ExitStack() as stack:
        for replacing in _REPLACING:
            stack.enter_context(replacing())
        yield
