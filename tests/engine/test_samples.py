"""The sampling half of the engine on a real sampler: what fails, and what that leaves behind."""

import orjson

from tests.bases import random_adapter, renderer
from tinsmith.config import SamplingConfig
from tinsmith.engine.messages import Message, Sample, SampleDone, SampleFailed
from tinsmith.engine.samples import Sampled, Samples
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import LoraPair
from tinsmith.sampling.local import LocalSampler


def sample(request_id: str, snapshot_id: str | None = None) -> Sample:
    body = {
        "sampling_session_id": "s:sample:0",
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "stop": []},
    }
    return Sample(request_id, "tiny", snapshot_id, orjson.dumps(body))


def settle(samples: Samples) -> None:
    while samples.has_work:
        samples.step()


def test_a_step_that_fails_ends_its_requests_and_not_the_engine(text_base: BaseModel) -> None:
    sampler = LocalSampler(text_base, SamplingConfig(kv_cache_gib=0.01), logits_chunk=16)
    sent: list[Message] = []
    samples = Samples({"tiny": Sampled(sampler, renderer(text_base))}, sent.append)
    misshapen = random_adapter(text_base)
    misshapen.working["lm_head"] = LoraPair(*(tensor[:, :1] for tensor in misshapen.working["lm_head"]))
    samples.publish("s:train:0/1", misshapen)
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


def test_the_snapshots_of_one_model_are_withdrawn(text_base: BaseModel) -> None:
    sent: list[Message] = []
    samples = Samples({}, sent.append)
    for snapshot_id in ("s:train:1/2", "s:train:1/5", "s:train:10/2"):
        samples.publish(snapshot_id, random_adapter(text_base))
    samples.withdraw("s:train:1")
    assert list(samples.snapshots) == ["s:train:10/2"]
