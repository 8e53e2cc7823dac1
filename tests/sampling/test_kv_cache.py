"""The paged cache: what is gathered for one decoding step."""

from tinsmith.sampling.kv_cache import NARROW, similar_widths


def test_a_long_sequence_does_not_widen_the_short_ones() -> None:
    assert similar_widths([1, NARROW, 2000, 3, 1025, NARROW + 1, 1024]) == [[0, 1, 3], [2, 4], [5], [6]]
