"""Mutations fit the product as it is: a patch that is stale would prove nothing. `make mutations` runs them."""

from tests.mutations import MUTATIONS, stale


def test_each_patch_has_its_place_and_its_tests() -> None:
    assert stale() == []


def test_there_are_many_and_names_tell_them_apart() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 40
