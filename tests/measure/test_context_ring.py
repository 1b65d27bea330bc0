"""The ring and the gather are compared by their predicted and measured steps."""

from __future__ import annotations

from benchmarks.context_ring import Steps, lines


def test_a_length_says_whether_the_predicted_winner_wins() -> None:
    ring, gather, both = lines(Steps(512, predicted=(1.0, 2.0), measured=(2.0, 2.5)))
    assert ring == "   512 ring   predicted   1.000 s, measured   2.000 s, ratio 0.500"
    assert gather == "   512 gather predicted   2.000 s, measured   2.500 s, ratio 0.800"
    assert both == "   512 ring / gather: predicted 0.500, measured 0.800: the same winner"
    assert lines(Steps(512, (1.0, 2.0), (3.0, 2.5)))[-1].endswith("predicted 0.500, measured 1.200: NOT the same winner")
