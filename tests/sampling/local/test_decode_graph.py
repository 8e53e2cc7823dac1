"""Decoding steps as CUDA graphs, on a GPU: `TINSMITH_TEST_DEVICE=cuda pytest
tests/sampling/local/test_decode_graph.py`.

Invariant: A captured step computes what the same step computes launch by launch, with the newest weights, whatever
moves or runs out.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.bases import DEVICE, load, new_ref, random_adapter
from tests.sampling.local import test_sampler as local
from tests.sampling.local.test_decoding import answers, check_equal
from tests.sampling.local.test_sampler import PARAMS, Bench, ask, full_weights, prompt_of, run, sampler_of, tokens_of
from tinsmith.config import TrainingConfig
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.protocol.shapes import LoraShape
from tinsmith.sampling.local import decode_graph
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.training.backend import LocalBackend

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="a CPU captures no graphs")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rung is captured when it is first needed."""
    monkeypatch.setattr(decode_graph, "PATIENCE", 1)


def graphs_of(sampler: LocalSampler) -> dict[decode_graph.Kind, decode_graph.Captured]:
    return sampler.decoding.run.graphs


@pytest.mark.parametrize(
    "any_base", ["qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_moe", "qwen3_5_moe", "gpt_oss"], indirect=True
)
@pytest.mark.parametrize(("blocks", "prefill"), [(400, 4096), (30, 24)])
def test_graphs_give_the_tokens_of_the_same_steps_without_graphs(
    any_base: BaseModel, blocks: int, prefill: int
) -> None:
    """With adapters, all ways to choose a token, joins, ends, prompts in pieces, and preemptions where the cache is
    small."""
    captured, eager = (
        sampler_of(any_base, blocks, prefill_tokens=prefill, max_running=24, eager=eager) for eager in (False, True)
    )
    before = decode_graph.captures()
    check_equal(answers(captured, 24), answers(eager, 24))
    assert graphs_of(captured)
    assert decode_graph.captures() >= before + len(graphs_of(captured))
    assert not captured.decoding.run.eager
    assert not graphs_of(eager)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl", "qwen3_5", "qwen3_moe", "gpt_oss"])
def test_in_half_precision_too_a_replayed_graph_reads_the_newest_weights(
    family_dir: Callable[[str], Path], family: str
) -> None:
    """On the kernels of half precision, after the columns of adapters have grown, and of full weights.

    Versions lie nats apart.
    """
    base = load(family_dir(family), dtype="bfloat16")
    sampler, rendered = sampler_of(base), prompt_of(base, (0, 20))
    backend = LocalBackend(base, TrainingConfig(logits_chunk=16))
    backend.create_model("full", LoraShape(0, 0))
    for number, rank in enumerate((4, 40, 0)):
        versions: list[Weights] = []
        for seed in range(3):
            ref = new_ref(f"v{seed}", f"m{number}")
            if rank:
                versions.append(random_adapter(base, rank, seed, ref=ref))
            else:
                change_all(backend.optimizers["full"].weights, seed)
                versions.append(backend.snapshot("full", ref))
        sampler.add("x", ask(replace(PARAMS, max_tokens=30)), rendered, versions[0])
        for newest in versions[1:]:
            for _ in range(6):
                sampler.step()
            sampler.publish(newest)
        (sequence,) = run(sampler)["x"].sequences
        assert [span.version for span in sequence.versions] == ["v0", "v1", "v2"]
        scored = [local.forward_logprobs(base, version, rendered, sequence.tokens)[1] for version in versions]
        for index, span in enumerate(sequence.versions):
            own = slice(span.start, span.end)
            apart = [float(np.abs(np.array(sequence.logprobs[own]) - each[own]).mean()) for each in scored]
            assert apart[index] < 0.3, apart
            assert min(apart[:index] + apart[index + 1 :]) > 3 * apart[index], apart
        assert rank == 0 or graphs_of(sampler)


def change_all(weights: Weights, seed: int) -> None:
    """Change all weights so far that other tokens become likely."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.tensors():
        tensor.data += 0.1 * torch.randn(tensor.shape, generator=generator).to(tensor.device)
    weights.refresh()


def test_graphs_are_captured_again_when_what_they_read_lies_elsewhere(text_base: BaseModel) -> None:
    """The columns of adapters grow, and the cache is replaced."""
    bench, rendered = Bench(text_base), prompt_of(text_base, (0, 20))
    cache, graphs, tokens = bench.sampler.cache, list[set[Any]](), list[list[list[int]]]()
    small, large = (random_adapter(text_base, rank, rank) for rank in (8, 40))
    for adapter in (small, large, large):
        if graphs[1:]:
            cache.keys, cache.values = cache.keys.clone(), cache.values.clone()
        tokens.append(tokens_of(bench.answer(rendered, weights=adapter)))
        graphs.append({*graphs_of(bench.sampler).values()})
    assert all(graphs)
    assert not graphs[0] & graphs[1]
    assert not graphs[1] & graphs[2]
    assert tokens[1] == tokens[2]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("injected"), RuntimeError("injected")])
def test_a_capture_that_fails_leaves_the_step_as_it_is(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """It is said once, the tokens are the same, and other rungs are captured."""
    captured, eager = (sampler_of(text_base, max_running=24, eager=eager) for eager in (False, True))
    inner = captured.decoding.step.__class__.__call__

    def failing(step: Any, batch: Any, rows: Any, in_place: bool = False) -> Any:
        logits = inner(step, batch, rows, in_place)
        if torch.cuda.is_current_stream_capturing() and rows.count == 8:
            raise error
        return logits

    monkeypatch.setattr(captured.decoding.step.__class__, "__call__", failing)
    check_equal(answers(captured, 24), answers(eager, 24))
    failed = [kind.rows for kind in captured.decoding.run.eager]
    assert set(failed) == {8}
    assert caplog.text.count("decoding 8 rows runs without a CUDA graph") == len(failed)
    assert {kind.rows for kind in graphs_of(captured)} - {8}
    monkeypatch.setattr(captured.decoding.step.__class__, "__call__", inner)
    captured.decoding.run.steps += decode_graph.RETRY
    answers(captured, 24)
    assert 8 in {kind.rows for kind in graphs_of(captured)}


def test_full_weights_have_graphs_of_their_own_as_long_as_they_are_sampled(text_base: BaseModel) -> None:
    """Beside those of the base, which stay."""
    bench, rendered = Bench(text_base), prompt_of(text_base, (0, 20))
    for change in (0.005, 0.01):
        bench.add("full", rendered, ask(replace(PARAMS, max_tokens=30), num_samples=2), full_weights(text_base, change))
        bench.add("base", rendered, ask(replace(PARAMS, max_tokens=40)))
        bench.step(8)
        (runner,) = bench.sampler.decoding.runners.values()
        assert runner.graphs
        assert not runner.eager
        del runner
        bench.run()
        bench.asked.clear()
        assert not bench.sampler.decoding.runners
        assert graphs_of(bench.sampler)
