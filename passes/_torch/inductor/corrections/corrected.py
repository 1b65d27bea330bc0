"""All corrections of Inductor, in force while a graph is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from passes._torch.inductor.corrections.buffers_of_fused_loops import NAMES_OF_BUFFERS, SIZES_OF_BUFFERS
from passes._torch.inductor.corrections.constants_of_inductor import PRODUCTS_WITH_ZERO, SUMS_OF_CONSTANTS
from passes._torch.inductor.corrections.copies_before_overwrites import CopiesBeforeOverwrites
from passes._torch.inductor.corrections.indices_of_maxima import INDICES_OF_MAXIMA
from passes._torch.inductor.corrections.maxima_of_bytes import MaximaOfBytes
from passes._torch.inductor.corrections.places_of_scatters import PLACES_OF_SCATTERS
from passes._torch.inductor.corrections.reads_after_scatters import READS_AFTER_SCATTERS
from passes._torch.inductor.corrections.steps_of_64_bits import STEPS_OF_64_BITS
from passes._torch.inductor.corrections.tails_of_reductions import TAILS_OF_REDUCTIONS

CORRECTING_PASSES = (MaximaOfBytes(), CopiesBeforeOverwrites())  # of a graph, before code is made of it
CORRECTIONS = (
    *(READS_AFTER_SCATTERS, TAILS_OF_REDUCTIONS, PLACES_OF_SCATTERS),
    *(NAMES_OF_BUFFERS, SIZES_OF_BUFFERS, STEPS_OF_64_BITS),
    *(SUMS_OF_CONSTANTS, PRODUCTS_WITH_ZERO, INDICES_OF_MAXIMA),
)


@contextmanager
def corrected() -> Iterator[None]:
    """Replace the parts of Inductor that write wrong code."""
    with ExitStack() as stack:
        for correction in CORRECTIONS:
            if correction.is_needed:
                stack.enter_context(correction.replacing())
        yield
