"""Bad input in one table: every request of it is refused with a message that names field, place and value, and nothing else changes.

A row is a `Case`: how to send the request, and what the refusal must say. All rows share a server and two models, which must
compute the same after each row as before it. The rows lie in the tables of `bad_training.py`,
`bad_requests.py` and `bad_names.py`.

Invariant: A bad request is refused with field, place and value, and leaves weights, gradients and later results as they were.
"""

from collections.abc import Iterator

import pytest

from tests.acceptance.bad_names import NAMES_AND_BODIES
from tests.acceptance.bad_requests import SAMPLES_AND_STEPS
from tests.acceptance.bad_target import GOOD, Case, Target
from tests.acceptance.bad_training import TRAINING, example, training
from tests.acceptance.talking import RAW_STEP
from tests.running import Server


@pytest.fixture(scope="module")
def targets(server: Server) -> Iterator[dict[str, tuple[Target, list[float]]]]:
    """A model on each base model, and what it computed before anything bad came."""
    made = {base_model: Target(server, base_model) for base_model in ("text", "vision")}
    yield {base_model: (target, target.scores()) for base_model, target in made.items()}
    for target in made.values():
        target.http.close()


@pytest.mark.parametrize("case", [*TRAINING, *SAMPLES_AND_STEPS, *NAMES_AND_BODIES], ids=lambda case: case.name)
def test_a_bad_request_is_refused_with_a_reason_and_leaves_no_trace(case: Case, targets: dict[str, tuple[Target, list[float]]]) -> None:
    target, before = targets[case.base_model]
    words = case.send(target)
    assert [fragment for fragment in case.says if fragment not in words] == [], words
    assert target.scores() == before


@pytest.mark.parametrize("base_model", ["text", "vision"])
def test_after_bad_requests_a_step_is_refused_once_and_the_next_is_like_that_of_a_new_model(server: Server, base_model: str) -> None:
    """It trains, so it has a model of its own."""
    target = Target(server, base_model)
    before = target.scores()
    training(example(target_tokens=[1]))(target)
    model = target.model
    model.forward_backward(target.next(), GOOD)
    assert "the gradients are cleared" in target.failure(model.optim_step(target.next(), RAW_STEP))
    assert target.scores() == before
    model.forward_backward(target.next(), GOOD)
    norm = model.grad_norm(model.optim_step(target.next(), RAW_STEP))

    other = Target(server, base_model)
    assert other.scores() == before
    other.model.forward_backward(other.next(), GOOD)
    assert norm == pytest.approx(other.model.grad_norm(other.model.optim_step(other.next(), RAW_STEP)), rel=1e-6)
    assert target.http.get("healthz").status_code == 200
    for each in (target, other):
        each.http.close()
