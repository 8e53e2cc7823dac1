"""Workers as actors of a real Ray, each with a GPU that Ray has reserved for it, train as one worker does."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tinker
from numpy.typing import NDArray

from tests.acceptance.talking import assert_close, datum, logprobs, text_input, train
from tests.distributed.devices import ON_GPUS, SERVER_OPTIONS, require_devices
from tests.distributed.test_replicas import STEP, STEPS, WITHIN
from tests.running import serving

pytestmark = pytest.mark.skipif(not ON_GPUS, reason="test_ray.py tests on CPUs what is not about GPUs")


def test_workers_train_on_the_gpus_that_ray_has_reserved(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    require_devices(2)
    pytest.importorskip("ray", reason="Ray is not installed here")
    from tests.ray_head import ray_head  # needs Ray

    options = [
        "--base-model",
        f"text={family_dir('qwen3')}",
        "--kv-cache-gib",
        "0.05",
        "--tokens-per-pass",
        "64",
        *SERVER_OPTIONS,
    ]
    found: list[list[NDArray[np.float64]]] = []
    with ray_head(2, gpus=2) as address:
        for count, more in ((1, ["--workers", "1"]), (2, ["--workers", "2", "--ray-address", address])):
            directory = tmp_path / str(count)
            directory.mkdir()
            with serving(directory, *options, *more) as server:
                server.wait_for_health()
                shown = server.wait_for_status(lambda seen: all(each["state"] == "ready" for each in seen["workers"]))[
                    "workers"
                ]
                assert [worker["device"] for worker in shown] == ["cuda:0"] * count  # each sees its own alone
                with tinker.ServiceClient(base_url=server.url, api_key="tml-ray") as service:
                    model = train(service, "text")
                    own = []
                    for _ in range(STEPS):
                        work = [datum(text_input(seed, 5 + 9 * seed), seed) for seed in range(7)]
                        own += logprobs(model.forward_backward(work, "cross_entropy").result())
                        model.optim_step(STEP).result()
                    found.append(own)
    assert_close(found[1], found[0], WITHIN)
