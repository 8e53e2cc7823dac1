"""What the engine keeps of the experts of sampled sequences.

Invariant: Recorded experts are found by training run and whole sampled sequence, the longest that a datum begins with;
memory is bounded, and the oldest of the run that has most of them go.
"""

import numpy as np
from numpy.typing import NDArray

from tinsmith.engine.recorded_routes import RecordedRoutes
from tinsmith.store.records import SequenceRoutes

RUN, OTHER = "s:train:0", "s:train:1"


def sequence(*tokens: int) -> NDArray[np.int64]:
    return np.array(tokens, dtype=np.int64)


def routes(mark: int, *tokens: int) -> SequenceRoutes:
    """Of 2 mixtures and 3 experts a token: 6 bytes for each token but the last."""
    return SequenceRoutes(sequence(*tokens), np.full((2, len(tokens) - 1, 3), mark, dtype=np.uint8))


def marks(kept: RecordedRoutes, run: str, *asked: NDArray[np.int64]) -> list[tuple[int, int] | None]:
    """The mark of what is found for each, and of how many tokens it is."""
    return [None if each is None else (int(each[0, 0, 0]), each.shape[1]) for each in kept.find(run, asked)]


def test_the_longest_whole_sequence_of_the_run_is_found() -> None:
    kept = RecordedRoutes(2**20)
    kept.put(RUN, [routes(1, 5, 6, 7), routes(2, 5, 6, 7, 8, 9), routes(3, 5, -12, -12, 4)])
    kept.put(OTHER, [routes(4, 5, 6)])
    asked = [
        sequence(5, 6, 7),
        sequence(5, 6, 7, 8),
        sequence(5, 6, 7, 8, 9, 10),
        sequence(5, 6),
        sequence(6, 6, 7),
        sequence(5, -12, -12, 4, 4),
        sequence(5, -13, -13, 4, 4),
    ]
    assert marks(kept, RUN, *asked) == [(1, 2), (1, 2), (2, 4), None, None, (3, 3), None]
    assert marks(kept, OTHER, *asked[:3]) == [(4, 1)] * 3
    assert marks(kept, "s:train:2", *asked[:1]) == [None]
    kept.put(RUN, [routes(7, 5, 6, 7)])
    assert marks(kept, RUN, *asked[:1]) == [(7, 2)]


def test_the_oldest_of_the_run_that_has_most_go_when_the_memory_is_full() -> None:
    """One that samples much takes nothing from another."""
    kept = RecordedRoutes(3 * 400 + 60)
    kept.put(RUN, [routes(1, 1, 2, 3, 4), routes(2, 2, 2, 3, 4)])
    kept.put(OTHER, [routes(3, 1, 2, 3, 4)])
    kept.put(RUN, [routes(4, 1, 2, 3, 4)])  # replaces the first, and is the newest now
    asked = sequence(1, 2, 3, 4), sequence(2, 2, 3, 4)
    assert marks(kept, RUN, *asked) == [(4, 3), (2, 3)]
    kept.put(OTHER, [routes(5, 3, 2, 3)])
    assert marks(kept, RUN, *asked) == [(4, 3), None]
    assert marks(kept, OTHER, asked[0], sequence(3, 2, 3)) == [(3, 3), (5, 2)]
    kept.put(RUN, [routes(6, *range(240))])
    assert marks(kept, RUN, *asked, sequence(*range(240))) == [None] * 3
    assert marks(kept, OTHER, asked[0], sequence(3, 2, 3)) == [(3, 3), (5, 2)]


def test_an_ended_session_takes_its_own_along() -> None:
    kept = RecordedRoutes(10 * 410)
    kept.put(RUN, [routes(1, 1, 2)])
    kept.put("t:train:0", [routes(2, 1, 2)])
    kept.forget_session("s")
    assert marks(kept, RUN, sequence(1, 2)) == [None]
    assert marks(kept, "t:train:0", sequence(1, 2)) == [(2, 1)]
    kept.put(RUN, [routes(3, number, 2) for number in range(9)])
    assert marks(kept, "t:train:0", sequence(1, 2)) == [(2, 1)]
