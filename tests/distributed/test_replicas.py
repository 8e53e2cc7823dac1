"""Two workers train and sample as one does, also after they have ended, in peace or not: real servers, through the SDK.

Invariant: Several workers train, sample, save and learn by reinforcement as one does: weights to 1e-5 (of hybrid models
to 1e-4), and the same tokens. Also: `tests/distributed/test_all_reduce.py`.

Invariant: On several GPUs: workers that exchange over NCCL train as one does, in float32, to the same bounds or, after
several steps through a server, five times these, with replicas, sharded weights and sequences of all workers (gradients
of hybrid models to 5e-3); full weights get from GPU to GPU, and an end that is lost is given up (`make test-gpus`).
Also: `tests/sampling/vllm/test_transfers.py`, `tests/sampling/inside_vllm/test_transfer_group.py`.
"""

import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tinker
from rich.console import Console
from safetensors.numpy import load_file
from tinker import types

from tests.acceptance.talking import (
    assert_close,
    assert_losses_close,
    datum,
    image_input,
    numbers,
    scores,
    text_input,
    train,
)
from tests.distributed.conftest import LONG, Running
from tests.distributed.devices import ON_GPUS, ROUNDING
from tests.extent import amount
from tests.rl.test_run import config_of, logged, told
from tests.running import START_S, serving
from tinsmith_rl.trainer import train as train_policy

STEP = types.AdamParams(learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1.0, grad_clip_norm=50.0)
"""Too small for rounding to grow; eps=1 keeps a gradient near 0 from moving a weight by its sign alone."""
STEPS = amount(2, 5)
"""The moments matter from the second step on; rounding would grow with more."""
WITHIN = 1e-5 * ROUNDING
"""Of losses and weights: only the order differs in which float32 gradients are added up."""


def within_of(base: str) -> float:
    """How near a model on this base is to that of one worker: delta nets carry rounding on from token to token."""
    return 10 * WITHIN if base == "hybrid" else WITHIN


Batches = Sequence[list[types.Datum]]
"""What a model is given for each step."""


def train_together(clients: Sequence[tinker.TrainingClient], batches: Sequence[Batches]) -> list[list[float]]:
    """Train models at the same time, each with its batches; the losses of each, and norms of its gradients."""
    found: list[list[float]] = [[] for _ in clients]
    for work in zip(*batches, strict=True):
        done = [client.forward_backward(data, "cross_entropy") for client, data in zip(clients, work, strict=True)]
        stepped = [client.optim_step(STEP) for client in clients]
        for curve, passed, taken in zip(found, done, stepped, strict=True):
            curve += [passed.result().metrics["loss:sum"], (taken.result().metrics or {})["grad_norm"]]
    return found


def learn(client: tinker.TrainingClient, batches: Batches) -> list[float]:
    """The same of one model."""
    return train_together([client], [batches])[0]


def assert_curves_close(found: list[float], expected: list[float], within: float) -> None:
    """Losses and norms of a model's steps are the same as on another server."""
    assert_losses_close(found[::2], expected[::2], within)
    assert found[1::2] == pytest.approx(expected[1::2], rel=within)


def saved_weights(running: Running, clients: Sequence[tinker.TrainingClient]) -> list[dict[str, np.ndarray]]:
    """The weights of each of these models and what its optimizer remembers."""
    return [weights_at(running, client.save_state("end").result().path) for client in clients]


def weights_at(running: Running, path: str) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint's files: weights, and what the optimizer remembers."""
    manifests = (running.data_dir / "checkpoints").rglob("manifest.json")
    (directory,) = (manifest.parent for manifest in manifests if path in manifest.read_text())
    return {
        f"{file.name}:{name}": tensor
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_weights_close(together: dict[str, np.ndarray], alone: dict[str, np.ndarray], within: float) -> None:
    """Weights and moments of a model are the same to a part of the largest value of each.

    Moments are as far off as gradients that cancel. On GPUs, where sums differ from run to run, small tensors are held
    to the same number as large ones.
    """
    assert together.keys() == alone.keys()
    for name, tensor in alone.items():
        is_moment = "exp_avg" in name
        if ON_GPUS:
            atol, rtol = within, 1e-3 if is_moment else within
        else:
            atol, rtol = within * np.abs(tensor).max() * (10 if is_moment else 1), 0.0
        np.testing.assert_allclose(together[name], tensor, atol=atol, rtol=rtol, err_msg=name)


def shares_of(running: Running, clients: Sequence[tinker.TrainingClient], trained: int) -> list[int]:
    """Tokens of passes that each worker was given, by rank, once each of these models has trained on so many."""
    wanted = {client.model_id: trained for client in clients}
    status = running.server.wait_for_status(
        lambda seen: wanted.items() <= {model["model_id"]: model["trained_tokens"] for model in seen["models"]}.items()
    )
    return [worker["pass_tokens"] for worker in status["workers"]]


def batch(client: tinker.TrainingClient, what: str, step: int) -> list[types.Datum]:
    """Texts of very different lengths, with or without images, one alone (a worker has no share then), or longer ones.

    Of these two are so long that two workers compute them together, and a third if it has an image, in its second half.
    """
    texts = [text_input(10 * step + number, length) for number, length in enumerate((3, 40, 7, 60, 11))]
    long = [text_input(10 * step + 7, LONG + 11), text_input(10 * step + 2, LONG - 1)]
    if what in ("mixed", "long images"):
        images = [image_input(client, 10 * step + number) for number in range(3)]
        texts += images
        long.append(types.ModelInput(chunks=[*long[0].chunks, *images[0].chunks]))
    inputs = {"text": texts, "mixed": texts, "single": texts[:1], "long": texts + long, "long images": texts + long}[
        what
    ]
    return [datum(each, step) for each in inputs]


@pytest.mark.parametrize(
    ("base", "ranks"), [("image", [4, 16]), ("image", [0]), ("hybrid", [8]), ("experts", [4, 16]), ("experts", [0])]
)
def test_losses_and_weights_are_those_of_one_worker(
    alone_and_together: list[Running], base: str, ranks: list[int]
) -> None:
    """Models of several ranks train at the same time, and share passes.

    After the last step everything is as it would be with one worker.

    Of two workers each has computed at least a quarter of the tokens.
    """
    curves, tensors = [], []
    for count, running in enumerate(alone_and_together, 1):
        clients = [train(running.service, base, rank=rank) for rank in ranks]
        batches = [batch(clients[0], "mixed", step) for step in range(STEPS)]
        tokens = sum(each.model_input.length for work in batches for each in work)
        before = shares_of(running, clients, 0)
        curves.append(train_together(clients, [batches] * len(clients)))
        tensors.append(saved_weights(running, clients))
        shares = [after - one for after, one in zip(shares_of(running, clients, tokens), before, strict=True)]
        assert (len(shares), sum(shares)) == (count, tokens * len(ranks))
        assert min(shares) > sum(shares) / (4 if count > 1 else 2)
    assert "are sharded over" not in alone_and_together[1].server.log.read_text()  # replicas
    for number in range(len(ranks)):
        assert_curves_close(curves[1][number], curves[0][number], within_of(base))
        assert_weights_close(tensors[1][number], tensors[0][number], within_of(base))


def test_long_sequences_are_computed_by_both_workers_as_by_one(alone_and_together: list[Running]) -> None:
    """Beside short ones of the same requests, which one of them computes. Two models train at the same time.

    `test_sequences.py` has images, hybrid models and all weights, without a server.
    """
    curves, logprobs = [], []
    for running in alone_and_together:
        clients = [train(running.service, "text", rank=rank) for rank in (8, 2)]
        curves.append(train_together(clients, [[batch(clients[0], "long", step) for step in range(3)]] * 2))
        logprobs.append([each for client in clients for each in scores(client, batch(client, "long", 9))])
    for found, expected in zip(curves[1], curves[0], strict=True):
        assert_curves_close(found, expected, WITHIN)
    assert_close(logprobs[1], logprobs[0], WITHIN)
    for rank, (first, last) in enumerate([(0, 104), (105, 210)]):
        line = f"worker {rank}: computing tokens {first} to {last} of a sequence of {LONG + 11} tokens"
        alone_and_together[1].server.wait_for_log(line)
    assert "of a sequence of" not in alone_and_together[0].server.log.read_text()


def broken(data: types.ModelInput) -> types.Datum:
    """The first image of this input is cut off."""
    chunks = list(data.chunks)
    place, image = next((place, chunk) for place, chunk in enumerate(chunks) if isinstance(chunk, types.ImageChunk))
    chunks[place] = types.ImageChunk(data=image.data[:-30], format="png", expected_tokens=6)
    return datum(types.ModelInput(chunks=chunks))


def assert_spoils_its_step(client: tinker.TrainingClient, work: list[types.Datum], why: str) -> None:
    """This work is refused, and the step that it was for, of which nothing counts; the next one trains."""
    before = scores(client, batch(client, "text", 7))
    with pytest.raises(tinker.RequestFailedError, match=why):
        client.forward_backward(work, "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError):
        client.optim_step(STEP).result()
    assert_close(scores(client, batch(client, "text", 7)), before, 0)
    learn(client, [batch(client, "mixed", 0)])
    assert not np.allclose(scores(client, batch(client, "text", 7))[0], before[0])


def test_a_broken_image_spoils_its_step_on_all_workers(alone_and_together: list[Running]) -> None:
    """One worker has computed its share when the other finds it, or both compute the sequence that has it."""
    found = []
    for running in alone_and_together:
        client = train(running.service, "image")
        assert_spoils_its_step(client, [*batch(client, "text", 0), broken(image_input(client, 1))], "image")
        long = broken(batch(client, "long images", 0)[-1].model_input)
        assert_spoils_its_step(client, [*batch(client, "single", 0), long], r"datum 1: .*image")
        learn(client, [batch(client, "long images", 1)])
        found.append(scores(client, batch(client, "long images", 2)))
    assert_close(found[1], found[0], WITHIN)


@pytest.fixture(scope="module")
def sharded(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose two workers share the weights of each layer."""
    directory = tmp_path_factory.mktemp("sharded")
    with serving(directory, *options, "--workers", "2", "--shard", "weights", "--sampler", "none") as server:
        server.wait_for_health()
        with tinker.ServiceClient(base_url=server.url, api_key="tml-sharded") as service:
            yield Running(server, service, directory / "data")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=START_S) == 0


def test_workers_that_share_the_weights_train_as_one(alone_and_together: list[Running], sharded: Running) -> None:
    """Three base models at once, their passes and steps in any order; texts alone, images, a single datum."""
    models = [
        ("text", 4, "text"),
        ("image", 5, "mixed"),
        ("hybrid", 7, "mixed"),
        ("text", 0, "single"),
        ("image", 0, "mixed"),
        ("experts", 6, "mixed"),
        ("experts", 0, "mixed"),
    ]
    curves, tensors = [], []
    for running in (alone_and_together[0], sharded):
        clients = [train(running.service, base, rank=rank) for base, rank, _ in models]
        batches = [
            [batch(client, what, step) for step in range(2)]
            for client, (_, _, what) in zip(clients, models, strict=True)
        ]
        curves.append(train_together(clients, batches))
        tensors.append(saved_weights(running, clients))
    for number, (base, _, _) in enumerate(models):
        assert_curves_close(curves[1][number], curves[0][number], within_of(base))
        assert_weights_close(tensors[1][number], tensors[0][number], within_of(base))
    log = sharded.server.log.read_text()
    for name in ("text", "image", "hybrid", "experts"):
        kept = re.findall(
            rf"worker (\d): {name}: its \d layers are sharded over 2 workers \(--shard weights\): this one keeps", log
        )
        assert sorted(kept) == ["0", "1"]


def test_what_workers_that_share_the_weights_refuse_harms_nothing(sharded: Running) -> None:
    """A broken image in a pass of all; then a step as ever, and all kinds of saves."""
    client = train(sharded.service, "image")
    image = broken(image_input(client, 1))
    for work in ([image], [*batch(client, "text", 0), image]):
        assert_spoils_its_step(client, work, "image")
    for saved in (client, train(sharded.service, "text", rank=0)):
        assert saved.save_weights_external("outside").result().path
        assert weights_at(sharded, saved.save_weights_for_sampler("kept").result().path)


def test_all_weights_that_are_divided_come_back_as_they_were(sharded: Running) -> None:
    """As they were created or saved, or with the steps since then, which are replayed."""
    fresh, saved, stepped = (train(sharded.service, "text", rank=0) for _ in range(3))
    work = [batch(fresh, "text", step) for step in range(4)]
    for client in (saved, stepped):
        learn(client, work[:1])
    saved.save_state("here").result()
    server = sharded.server
    for pid, name in ((server.worker_pids()[1], "worker 1 of 2: the worker"), (server.engine_pid(), "the engine")):
        before = [scores(client, work[3]) for client in (fresh, saved, stepped)]
        os.kill(pid, signal.SIGKILL)
        server.wait_for_log(f"{name} process ended unexpectedly (signal 9)")
        for client, expected in zip((fresh, saved, stepped), before, strict=True):
            assert_close(scores(client, work[3]), expected, WITHIN)
            learn(client, work[1:2])


def test_samples_of_all_workers_are_those_of_the_trained_weights(alone_and_together: list[Running]) -> None:
    """Requests spread over both workers.

    Each answers with the weights that were published, and with the same tokens as one worker.
    """
    replies: list[list[tuple[list[int], np.ndarray]]] = []
    for running in alone_and_together:
        client = train(running.service, "image")
        client.forward_backward(batch(client, "mixed", 0), "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=0.05, beta1=0.0, beta2=0.0, eps=1.0)).result()
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=12, seed=5, stop=[])
        prompts = [*(text_input(seed, 9) for seed in range(12)), *(image_input(client, seed) for seed in range(4))]
        asked = [sampler.sample(prompt, 2, params) for prompt in prompts]
        sequences = [sequence for reply in asked for sequence in reply.result(timeout=START_S).sequences]
        replies.append([(list(sequence.tokens), numbers(sequence.logprobs)) for sequence in sequences])
    for (tokens, logprobs), (alone, their_logprobs) in zip(replies[1], replies[0], strict=True):
        assert tokens == alone
        np.testing.assert_allclose(logprobs, their_logprobs, atol=1e-4)
    for rank in range(2):
        alone_and_together[1].server.wait_for_log(f"worker {rank}: samples: ")


@pytest.mark.slow  # a long run, of what the tests of samples and of steps show one by one
def test_a_run_of_reinforcement_learning_is_that_of_one_worker(
    alone_and_together: list[Running], tmp_path: Path
) -> None:
    """Images, seeded samples of both workers, and a warm-up.

    What is sampled has the log-probabilities that the trainer computes.
    """
    told_by, curves = [], []
    for number, running in enumerate(alone_and_together):
        directory = tmp_path / str(number)
        config = config_of(
            running.server.url, directory, model={"base_model": "image"}, training={"groups": 4, "group_size": 4}
        )
        train_policy(config, Console(quiet=True))
        lines = [line for line in logged(directory) if line["step"] >= 0]
        assert all(line["kl_sampler_trainer"] < 1e-6 for line in lines)
        curves.append([line["reward"] for line in lines])
        told_by.append([trajectory["samples"][0]["ids"] for step in (2, 4) for trajectory in told(directory, step)])
    alone, together = told_by
    assert len(together) == len(alone) == 32
    # Weights differ in their last bits, so a seed may rarely draw another token.
    assert sum(one == other for one, other in zip(alone, together, strict=True)) >= 28
    assert curves[1] == pytest.approx(curves[0], abs=0.13)
    assert max(curves[1]) > 0


def test_a_model_goes_on_from_its_checkpoint_and_after_the_end_of_a_worker(alone_and_together: list[Running]) -> None:
    """With the optimizer's state.

    The worker is named that is killed in the middle of its work, and all are started again.
    """
    _, running = alone_and_together
    server, client = running.server, train(running.service, "text")
    batches = [batch(client, "text", step) for step in range(4)]
    learn(client, batches[:2])
    path = client.save_state("two").result().path
    expected = learn(client, batches[2:])
    again = running.service.create_training_client_from_state_with_optimizer(path).result()
    assert_curves_close(learn(again, batches[2:]), expected, WITHIN)
    before, first = scores(client, batches[0]), server.worker_pids()
    pending = client.forward_backward(batches[1] * 20, "cross_entropy")
    os.kill(first[0], signal.SIGKILL)
    pending.result(timeout=START_S)
    server.wait_for_log("worker 0 of 2: the worker process ended unexpectedly (signal 9)")
    server.wait_for_health()
    second = server.worker_pids()
    assert len({*first, *second}) == 4
    assert_close(scores(client, batches[0]), before, WITHIN)
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert_close(scores(client, batches[0]), before, WITHIN)
    client.optim_step(STEP).result()
