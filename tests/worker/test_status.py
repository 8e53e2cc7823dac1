"""What a worker counts of itself.

Invariant: The numbers of a model disappear with it.
"""

import time
from pathlib import Path

import pytest
import torch

from tests.engine.here import Here
from tests.worker.test_samples import sample
from tinsmith.config import SamplingConfig
from tinsmith.models.base import BaseModel
from tinsmith.observing.metrics import ENGINE, WORKER, WorkerTime, numbers
from tinsmith.protocol.serving import EndSession
from tinsmith.worker.gpu_sensors import GpuSensors

MODEL = "s:train:a"


def sampled_tokens() -> float | None:
    """Those of the model, as the reports of this process have them."""
    return WORKER.get_sample_value("tinsmith_model_sampled_tokens_total", {"model": MODEL})


def test_sampled_tokens_of_a_model_are_counted_until_it_is_unloaded(text_base: BaseModel, tmp_path: Path) -> None:
    here = Here({"tiny": text_base}, tmp_path, sampling=SamplingConfig(kv_cache_gib=0.01, max_running=7))
    here.create("a")
    here.snapshot("a", 1)
    here.settle()
    here.say(sample("s:sample:1/0", f"{MODEL}/1"))
    here.settle()
    board = here.worker.status
    board.due_at = 0.0
    board.note()
    assert sampled_tokens() == 4
    assert WORKER.get_sample_value("tinsmith_sampler_places", {"base_model": "tiny"}) == 7
    here.say(EndSession("s", save=False))
    here.settle()
    board.due_at = 0.0
    board.note()
    assert (sampled_tokens(), board.samples.results.sampled_models) == (None, set())


def test_queued_operations_are_counted_by_kind_and_tenant_and_the_oldest_tells_their_age(
    text_base: BaseModel, tmp_path: Path
) -> None:
    def queued(kind: str) -> tuple[float | None, bool]:
        labels = {"kind": kind, "tenant": "local"}
        age = ENGINE.get_sample_value("tinsmith_queued_operation_age_seconds", labels)
        return ENGINE.get_sample_value("tinsmith_queued_operations", labels), age is not None and age > 0

    here = Here({"tiny": text_base}, tmp_path)
    here.create("a")
    here.settle()
    here.process.is_stuck = True
    here.forward("a", 1, [5, 4])
    for seq in (2, 3):
        here.optim("a", seq)
    here.turn()
    board = here.engine.status
    board.due_at = 0.0
    board.note()
    assert (queued("forward_backward"), queued("optim_step"), queued("save_weights")) == (
        (1, True),
        (2, True),
        (0, False),
    )
    status = board.take()
    assert status is not None
    assert [(each["queued"], each["trained_tokens"]) for each in status.models] == [(3, 0)]
    assert board.take() is None
    here.process.is_stuck = False
    here.settle()
    board.due_at = 0.0
    board.note()
    assert (queued("forward_backward"), queued("optim_step")) == ((0, False), (0, False))


def test_the_time_of_a_worker_adds_up_and_is_what_it_was_in_innermost() -> None:
    def seconds() -> dict[str, float]:
        (family,) = counted.collect()
        return {each.labels["activity"]: each.value for each in family.samples}

    began = time.monotonic()
    counted = WorkerTime()
    counted.begin("other")

    def fail() -> None:
        with counted.during("compiling"):
            time.sleep(0.05)
            raise ZeroDivisionError

    with counted.during("sampling"), pytest.raises(ZeroDivisionError):
        fail()
    found = seconds()
    passed_s = time.monotonic() - began
    assert counted.activity == "other"
    assert found["compiling"] >= 0.05 > found["sampling"]
    assert passed_s - 0.05 < sum(found.values()) <= passed_s
    time.sleep(0.01)
    assert seconds()["other"] >= found["other"] + 0.01


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_nobody_can_ask_has_no_numbers_and_is_asked_once() -> None:
    sensors = GpuSensors(torch.device("cuda:0"))
    sensors.read()
    assert sensors.working == {}
    assert [name for name, _, _ in numbers(WORKER) if name.startswith("tinsmith_gpu_")] == []
