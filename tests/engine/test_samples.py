"""The sampling half of the engine on a real sampler: what fails, and what that leaves behind."""

from pathlib import Path

import orjson

from tests.bases import random_adapter, renderer
from tinsmith.config import SamplingConfig
from tinsmith.engine.checkpoints import Checkpoints
from tinsmith.engine.messages import Message, Sample, SampleDone, SampleFailed
from tinsmith.engine.samples import Sampled, Samples
from tinsmith.engine.snapshots import Snapshots
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import LoraPair
from tinsmith.sampling.local import LocalSampler
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.store import Store
from tinsmith.wire import tinker_pb2


def sample(request_id: str, weights_id: str | None = None) -> Sample:
    body = {
        "sampling_session_id": "s:sample:0",
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "stop": []},
    }
    return Sample(request_id, "tiny", weights_id, orjson.dumps(body))


def test_samples_go_on_with_newer_inflight_weights_and_say_so(text_base: BaseModel, tmp_path: Path) -> None:
    sampler = LocalSampler(text_base, SamplingConfig(kv_cache_gib=0.01), logits_chunk=16)
    sent: list[Message] = []
    snapshots = Snapshots({"tiny": text_base}, Checkpoints(Store.open(tmp_path), CheckpointFiles(tmp_path)), tmp_path / "snapshots", 2**30)
    samples = Samples({"tiny": Sampled(sampler, renderer(text_base))}, snapshots, sent.append)
    first, second = (random_adapter(text_base, seed=seed).snapshot() for seed in (1, 2))
    first.version, second.version = "s:train:0/1", "s:train:0/3"
    for weights_id in ("s:train:0/inflight", "s:train:0/1"):
        snapshots.publish("tiny", weights_id, first)
    for asked in ("s:train:0/inflight", "s:train:0/1", None):
        samples.add(sample(str(asked), asked))
    samples.step()
    snapshots.publish("tiny", "s:train:0/inflight", second)
    settle(samples)
    versions = {}
    for done in sent:
        assert isinstance(done, SampleDone)
        (sequence,) = tinker_pb2.SampleResponse.FromString(done.payload).sequences
        versions[done.request_id] = [(span.version, span.start, span.end) for span in sequence.versions]
    assert versions == {
        "s:train:0/inflight": [("s:train:0/1", 0, 1), ("s:train:0/3", 1, 4)],
        "s:train:0/1": [("s:train:0/1", 0, 4)],
        "None": [(text_base.name, 0, 4)],
    }


def settle(samples: Samples) -> None:
    while samples.has_work:
        samples.step()


def test_a_step_that_fails_ends_its_requests_and_not_the_engine(text_base: BaseModel, tmp_path: Path) -> None:
    sampler = LocalSampler(text_base, SamplingConfig(kv_cache_gib=0.01), logits_chunk=16)
    sent: list[Message] = []
    snapshots = Snapshots({"tiny": text_base}, Checkpoints(Store.open(tmp_path), CheckpointFiles(tmp_path)), tmp_path / "snapshots", 2**30)
    samples = Samples({"tiny": Sampled(sampler, renderer(text_base))}, snapshots, sent.append)
    misshapen = random_adapter(text_base)
    misshapen.working["lm_head"] = LoraPair(*(tensor[:, :1] for tensor in misshapen.working["lm_head"]))
    snapshots.publish("tiny", "s:train:0/1", misshapen)
    samples.add(sample("healthy"))
    samples.add(sample("broken", "s:train:0/1"))
    settle(samples)
    assert {(type(m), m.request_id, m.category, m.gone) for m in sent if isinstance(m, SampleFailed)} == {
        (SampleFailed, "healthy", "server", False),
        (SampleFailed, "broken", "server", False),
    }
    assert samples.started == {}
    assert len(sampler.cache.free) == sampler.cache.total

    sent.clear()
    samples.add(sample("after"))
    settle(samples)
    assert [(type(m), m.request_id) for m in sent if isinstance(m, SampleDone | SampleFailed)] == [(SampleDone, "after")]
