"""Bad input in one table: every request of it is refused with a message that names field, place and value, and nothing
else changes.

A row is a `Case`: how to send the request, and what the refusal must say. All rows share a server and two models, which
must compute the same after each row as before it. The rows lie in the tables of `bad_training.py`, `bad_requests.py`
and `bad_names.py`.

Invariant: A bad request is refused with field, place and value, and leaves weights, gradients and later results as they
were. Also: `tests/acceptance/test_refused_steps.py`.
"""

from collections.abc import Iterator

import pytest

from tests.acceptance.bad_names import NAMES_AND_BODIES
from tests.acceptance.bad_requests import SAMPLES_AND_STEPS
from tests.acceptance.bad_target import Case, Target
from tests.acceptance.bad_training import TRAINING
from tests.running import Server

Targets = dict[str, tuple[Target, list[list[float]]]]


@pytest.fixture(scope="module")
def targets(server: Server) -> Iterator[Targets]:
    """A model on each base model, and what it computed before anything bad came."""
    made = {base_model: Target(server, base_model) for base_model in ("text", "vision")}
    yield {base_model: (target, target.scores()) for base_model, target in made.items()}
    for target in made.values():
        target.http.close()


@pytest.mark.parametrize("case", [*TRAINING, *SAMPLES_AND_STEPS, *NAMES_AND_BODIES], ids=lambda case: case.name)
def test_a_bad_request_is_refused_with_a_reason_and_leaves_no_trace(
    case: Case, targets: dict[str, tuple[Target, list[list[float]]]]
) -> None:
    target, before = targets[case.base_model]
    words = case.send(target)
    assert [part for part in case.says.split(" ... ") if part not in words] == [], words
    assert target.scores() == before
