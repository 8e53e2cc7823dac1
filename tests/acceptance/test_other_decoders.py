"""Base models of a type that Tinsmith has no code for: what passes the self-check is served like any other, the rest is refused."""

from pathlib import Path

import numpy as np
import tinker
from tinker import types

from tests.acceptance.conftest import API_KEY
from tests.acceptance.talking import RAW_STEP, datum, numbers, text_input, train
from tests.bases import OTHER_DECODERS, write_decoder
from tests.running import START_S, serving


def test_a_decoder_that_passes_trains_and_samples(tmp_path: Path) -> None:
    write_decoder("starcoder2", tmp_path / "model", **OTHER_DECODERS["starcoder2"])
    options = ["--base-model", f"other={tmp_path / 'model'}", "--kv-cache-gib", "0.1"]
    with serving(tmp_path, *options) as server:
        server.wait_for_health()
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            client = train(service, "other")
            done = client.forward_backward([datum(text_input(1, 30))], "cross_entropy")
            client.optim_step(RAW_STEP).result()
            assert np.isfinite(done.result().metrics["loss:sum"])
            sampler = client.save_weights_and_get_sampling_client()
            prompt = text_input(2, 30)
            answer = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=20, seed=1, stop=[])).result().sequences[0]
            whole = types.ModelInput.from_ints([*prompt.to_ints(), *answer.tokens])
            scores = numbers(sampler.compute_logprobs(whole).result())
            np.testing.assert_allclose(numbers(answer.logprobs), scores[30:], atol=1e-4)
    assert "other passes its self-check" in server.log.read_text()


def test_a_decoder_that_computes_something_else_is_refused_at_start(tmp_path: Path) -> None:
    write_decoder("granite", tmp_path / "model", logits_scaling=8.0)
    with serving(tmp_path, "--base-model", f"other={tmp_path / 'model'}", "--kv-cache-gib", "0.1") as server:
        assert server.process.wait(timeout=START_S) == 2
    reason = "other (granite) cannot be served: transformers computes other log-probabilities (logits_scaling=8.0 is not supported)"
    assert f"tinsmith: {reason}" in server.log.read_text()
