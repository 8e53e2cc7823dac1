"""The power fails while clients train and sample: all processes end at once, and what was not synced is gone.

The same at every sync is in `tests/engine/test_power_loss.py`.
"""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import tinker
from tinker import types

from tests import synced
from tests.acceptance.conftest import connect, ready
from tests.acceptance.talking import RAW_STEP, datum, image_input, text_input, train
from tests.extent import amount
from tests.running import START_S, Server

CUTS = amount(2, 30)

MOST_CUT_S = 2.0
"""The power fails up to so many seconds after two operations have ended since it last did."""


def run(service: tinker.ServiceClient, curve: list[float], goes_on: Callable[[], bool]) -> None:
    """Train on images that were never sent before, sample what was trained, and save it now and then."""
    client, step = train(service, "vision"), 0
    while goes_on():
        step += 1
        images = [datum(image_input(client, 10 * step + number), number) for number in range(5)]
        # One after the other: operations that share a pass round otherwise
        for data in (images, [datum(text_input(step, 30), step)]):
            passed = client.forward_backward(data, "cross_entropy").result(timeout=START_S)
            curve.append(passed.metrics["loss:sum"])
        curve.append((client.optim_step(RAW_STEP).result(timeout=START_S).metrics or {})["grad_norm"])
        if step % 2 == 0:
            sampler = client.save_weights_and_get_sampling_client().result(timeout=START_S)
            params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
            curve += sampler.sample(text_input(step, 5), 1, params).result(timeout=START_S).sequences[0].tokens
        if step % 5 == 0:
            client.save_state(f"step-{step}").result(timeout=START_S)


def fail(server: Server, log: Path, chance: random.Random) -> int:
    """Kill all processes, the server first, which has told what others knew; returns how many bytes go."""
    everyone = psutil.Process(server.pid).children(recursive=True)
    psutil.Process(server.pid).kill()
    time.sleep(0.05)  # for those to log what they have just synced
    for child in everyone:
        child.kill()
    psutil.wait_procs(everyone, START_S)
    server.process.wait(START_S)
    return synced.cut(server.log.parent / "data", log, chance)


def test_a_run_goes_on_when_the_power_has_failed_as_if_nothing_had_happened(
    models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK waits, and the curve is that of a server that is left alone, to the last bit."""
    chance, gone = random.Random(), list[int]()
    curve, quiet = list[float](), list[float]()
    over, log, options = threading.Event(), tmp_path / "syncs", (*models, "--deterministic")
    for name in ("disturbed", "quiet"):
        (tmp_path / name).mkdir()
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as thread:
        for name, value in synced.logging_to(log).items():
            patch.setenv(name, value)
        with ready(tmp_path / "disturbed", *options) as server, connect(server) as service:
            training = thread.submit(run, service, curve, lambda: not over.is_set())
            try:
                for _ in range(CUTS):
                    wanted = len(curve) + 2
                    while len(curve) < wanted and not training.done():
                        time.sleep(0.005)
                    time.sleep(chance.uniform(0.0, MOST_CUT_S))
                    gone.append(fail(server, log, chance))
                    server.start_again()
            finally:
                over.set()
            training.result()
    with ready(tmp_path / "quiet", *options) as server, connect(server) as service:
        run(service, quiet, lambda: len(quiet) < len(curve))
    assert sum(gone) > 0
    assert curve == quiet[: len(curve)]
