"""Base models of a type that Tinsmith has no code for: what passes the self-check is served like any other, the rest is
refused."""

from pathlib import Path

from tests.acceptance.conftest import connect, ready
from tests.acceptance.talking import datum, learn, text_input, train
from tests.acceptance.test_sampling import assert_sampled_as_trained, sampling_client
from tests.bases import OTHER_DECODERS, write_decoder
from tests.running import START_S, serving


def test_a_decoder_that_passes_trains_and_samples(tmp_path: Path) -> None:
    write_decoder("starcoder2", tmp_path / "model", **OTHER_DECODERS["starcoder2"])
    with (
        ready(tmp_path, "--base-model", f"other={tmp_path / 'model'}", "--kv-cache-gib", "0.1") as server,
        connect(server) as service,
    ):
        client = learn(train(service, "other"), [datum(text_input(1, 30))])
        assert_sampled_as_trained(client, sampling_client(client), text_input(2, 30))
    assert "other passes its self-check" in server.log.read_text()


def test_a_decoder_that_computes_something_else_is_refused_at_start(tmp_path: Path) -> None:
    write_decoder("granite", tmp_path / "model", logits_scaling=8.0)
    with serving(tmp_path, "--base-model", f"other={tmp_path / 'model'}", "--kv-cache-gib", "0.1") as server:
        assert server.process.wait(timeout=START_S) == 2
    reason = (
        "other (granite) cannot be served: transformers computes other log-probabilities "
        "(logits_scaling=8.0 is not supported)"
    )
    assert f"tinsmith: {reason}" in server.log.read_text()
    assert "before it could take work" in server.log.read_text()
