"""Mixtures of experts through the SDK: several tenants train, are sampled as trained, and go on from what they saved.

Invariant: On a mixture of experts adapters of several ranks and all weights learn at the same time, are sampled as
trained, and go on from what they saved. Also: `tests/distributed/test_sharded.py`.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from tests.acceptance.conftest import connect, ready
from tests.acceptance.talking import image_input, text_input, train, with_inputs
from tests.acceptance.test_sampling import assert_sampled_as_trained
from tests.running import tinsmith_here

KINDS = ["qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe"]
RANKS = (4, 16, 0)
STEP = types.AdamParams(learning_rate=0.005)


@pytest.fixture(scope="module")
def service(
    family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tinker.ServiceClient]:
    """A client of a server with a base model of each kind."""
    models = [option for kind in KINDS for option in ("--base-model", f"{kind}={family_dir(kind)}")]
    directory = tmp_path_factory.mktemp("mixtures")
    with ready(directory, *models, "--kv-cache-gib", "0.1") as server, connect(server) as client:
        yield client


def steps(clients: list[tinker.TrainingClient], data: list[types.Datum], count: int) -> list[list[float]]:
    """Train models at the same time, each on its datum; the losses of each."""
    found: list[list[float]] = [[] for _ in clients]
    for _ in range(count):
        passes = [client.forward_backward([each], "cross_entropy") for client, each in zip(clients, data, strict=True)]
        taken = [client.optim_step(STEP) for client in clients]
        for curve, passed, step in zip(found, passes, taken, strict=True):
            curve.append(passed.result().metrics["loss:sum"])
            step.result()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_tenants_learn_are_sampled_as_trained_and_go_on(service: tinker.ServiceClient, kind: str) -> None:
    """Adapters of two ranks and a model with weights of its own, each on another target."""
    base, asked = service.create_sampling_client(base_model=kind).result(), text_input(1, 9)
    before = base.compute_logprobs(asked).result()
    clients = [train(service, kind, rank=rank, seed=rank) for rank in RANKS]
    prompt = asked if kind == "qwen3_moe" else image_input(clients[0], 3)
    data = [
        with_inputs(prompt, target_tokens=[number] * prompt.length, weights=[1.0] * prompt.length)
        for number in range(len(clients))
    ]
    first = steps(clients, data, 2)
    assert all(later < 0.9 * earlier for earlier, later in first)
    saved = [client.save_state("two").result().path for client in clients]
    for client in clients:
        path = client.save_weights_for_sampler("two").result().path
        assert_sampled_as_trained(client, service.create_sampling_client(model_path=path).result(), prompt, seed=1)
    went_on = steps(clients, data, 2)
    again = [service.create_training_client_from_state_with_optimizer(path).result() for path in saved]
    for resumed, expected in zip(steps(again, data, 2), went_on, strict=True):
        assert resumed == pytest.approx(expected, rel=1e-5)  # who comes at the same time shares passes
    assert base.compute_logprobs(asked).result() == before


def test_adapters_learn_on_quantized_experts_and_leave_on_those_of_the_files(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """All weights are refused, by name; the log says what it costs."""
    source = family_dir("qwen3_vl_moe")
    options = ["--base-model", f"mixture={source}", "--kv-cache-gib", "0.1", "--expert-dtype", "nf4"]
    with ready(tmp_path, *options) as server, connect(server) as service:
        fresh, *clients = (train(service, "mixture", rank=rank, seed=rank) for rank in (2, 4, 16))
        prompt = image_input(fresh, 3)
        data = [
            with_inputs(prompt, target_tokens=[number] * prompt.length, weights=[1.0] * prompt.length)
            for number in range(len(clients))
        ]
        assert all(later < 0.9 * earlier for earlier, later in steps(clients, data, 2))
        for client in clients:
            path = client.save_weights_for_sampler("two").result().path
            assert_sampled_as_trained(client, service.create_sampling_client(model_path=path).result(), prompt, seed=1)
        with pytest.raises(
            Exception,
            match=r"mixture has no full parameters \(rank 0\) to train or sample: its experts are held in nf4",
        ):
            train(service, "mixture", rank=0)
        assert all(later < earlier for earlier, later in steps(clients, data, 2))
        untrained = fresh.save_state("fresh").result().path
        said = re.search(
            r"mixture: its experts are held in nf4, which costs ([\d.]+) nats", (tmp_path / "server.log").read_text()
        )
        assert said is not None
        assert 0.001 < float(said[1]) < 1
        merged = tinsmith_here(
            "export", untrained, str(tmp_path / "merged"), "--merge", "--data-dir", str(tmp_path / "data")
        )
        assert merged.returncode == 0, merged.stderr
    before, after = (load_file(place / "model.safetensors") for place in (source, tmp_path / "merged"))
    assert after.keys() - before.keys() == {"lm_head.weight"}  # the adapter has one for it alone
    assert all(torch.equal(own, after[name]) for name, own in before.items())
