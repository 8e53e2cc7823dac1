"""JSON requests as the SDK writes them, and what is refused."""

import json
from types import ModuleType
from typing import Any

import orjson
import pytest
from pydantic import BaseModel, ValidationError
from tinker import types
from tinker.types.create_model_request import CreateModelRequest as SdkCreateModel
from tinker.types.create_sampling_session_request import CreateSamplingSessionRequest as SdkSamplingSession
from tinker.types.create_session_request import CreateSessionRequest as SdkCreateSession
from tinker.types.future_retrieve_request import FutureRetrieveRequest as SdkRetrieve
from tinker.types.get_info_request import GetInfoRequest as SdkGetInfo
from tinker.types.optim_step_request import OptimStepRequest as SdkOptimStep
from tinker.types.save_weights_for_sampler_request import SaveWeightsForSamplerRequest as SdkSaveForSampler
from tinker.types.session_heartbeat_request import SessionHeartbeatRequest as SdkHeartbeat

from tinsmith.errors import NotBuiltError, UserError
from tinsmith.wire import sample
from tinsmith.wire import service_requests as catalog
from tinsmith.wire import service_requests as service
from tinsmith.wire import training_requests as training
from tinsmith.wire.json_body import parse_json
from tinsmith.wire.sample import parse_sample_request

LORA = types.LoraConfig(rank=8)


def sent(request: BaseModel) -> bytes:
    return request.model_dump_json(exclude_unset=False, exclude_none=True).encode()


@pytest.mark.parametrize(
    ("model", "request_of_the_sdk"),
    [
        (service.CreateSessionRequest, SdkCreateSession(tags=["a"], user_metadata={"k": [1]}, sdk_version="0.38.0")),
        (service.SessionHeartbeatRequest, SdkHeartbeat(session_id="s")),
        (training.GetInfoRequest, SdkGetInfo(model_id="m")),
        (service.RetrieveFutureRequest, SdkRetrieve(request_id="r", allow_metadata_only=True)),
        (training.CreateModelRequest, SdkCreateModel(session_id="s", model_seq_id=0, base_model="b", lora_config=LORA)),
        (training.SaveWeightsForSamplerRequest, SdkSaveForSampler(model_id="m", seq_id=3, sampling_session_seq_id=0)),
        (
            service.CreateSamplingSessionRequest,
            SdkSamplingSession(session_id="s", sampling_session_seq_id=0, base_model="b"),
        ),
    ],
)
def test_bodies_of_the_sdk_are_read(model: type[BaseModel], request_of_the_sdk: Any) -> None:
    parsed = parse_json(model, sent(request_of_the_sdk)).model_dump(exclude_none=True)
    wire = orjson.loads(sent(request_of_the_sdk))
    assert {name: wire[name] for name in parsed if name in wire} == parsed


def test_an_optim_step_of_the_sdk_is_read_with_its_defaults() -> None:
    body = sent(
        SdkOptimStep(model_id="m", seq_id=2, optim_params=types.AdamParams(learning_rate=0.5, grad_clip_norm=1.0))
    )
    parsed = parse_json(training.OptimStepRequest, body)
    assert parsed.adam_params == training.AdamParams(learning_rate=0.5, grad_clip_norm=1.0)
    assert training.AdamParams().model_dump() == types.AdamParams().model_dump()


def operation(**fields: Any) -> bytes:
    return orjson.dumps({"model_id": "m", "seq_id": 1} | fields)


def creation(**fields: Any) -> bytes:
    return orjson.dumps({"session_id": "s", "model_seq_id": 0} | fields)


ADAMW = {"type": "adamw"}
NOTHING = {"rank": 8, "train_unembed": False, "train_mlp": False, "train_attn": False}


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        *(
            (training.OptimStepRequest, operation(adam_params=params), f"adam_params.{message}")
            for params, message in (
                ({"learning_rate": -1.0}, "learning_rate: .* got -1.0"),
                ({"beta1": 1.0}, "beta1: .* got 1.0"),
                ({"learning_rate": None}, "learning_rate: .* got null, as which the SDK sends NaN and infinity too"),
                ({"beta2": -0.1}, "beta2"),
                ({"eps": -1e-9}, "eps"),
                ({"learning_rate": "0.1"}, "learning_rate: .* got '0.1'"),
                ({"learning_rate": True}, "learning_rate"),
                ({"nesterov": True}, "nesterov: Extra inputs are not permitted, got True"),
            )
        ),
        (
            training.OptimStepRequest,
            b'{"model_id":"m","seq_id":1,"adam_params":{"learning_rate":Infinity}}',
            "learning_rate",
        ),
        *(
            (training.OperationKey, json.dumps({"model_id": "m", "seq_id": n}).encode(), "seq_id")
            for n in (0, 2**31, 2**70, "1", 1.5)
        ),
        (training.OptimStepRequest, operation(optimizer_params={"type": "dimuon", "learning_rate": 1}), "not built"),
        (training.CreateModelRequest, creation(base_model="b", lora_config=NOTHING), "one of train_unembed"),
        (training.SaveWeightsForSamplerRequest, operation(), "either path"),
        (training.SaveWeightsForSamplerRequest, operation(path="a", sampling_session_seq_id=0), "either path"),
        (training.SaveWeightsForSamplerRequest, operation(path="a", kind="inflight"), "a checkpoint never changes"),
        (
            training.SaveWeightsForSamplerRequest,
            operation(sampling_session_seq_id=0, ttl_seconds=3600),
            "belong to a checkpoint",
        ),
        (training.SaveWeightsRequest, operation(path="a", ttl_seconds=3599), "ttl_seconds"),
        (training.SaveWeightsRequest, operation(path="a", ttl_seconds=400_000_000), "ttl_seconds"),
        (training.SaveWeightsRequest, operation(path="a\nb"), "cannot name a checkpoint"),
        (
            training.LoadWeightsRequest,
            operation(path="a", optimizer=True, weights_access_token="t"),
            "weights_access_token",
        ),
        (
            training.CreateFromCheckpointRequest,
            creation(path="a", optimizer=True, optimizer_config=ADAMW),
            "cannot replace",
        ),
        (
            service.CreateSamplingSessionRequest,
            orjson.dumps({"session_id": "s", "sampling_session_seq_id": 0}),
            "is needed",
        ),
    ],
)
def test_what_is_wrong_impossible_or_not_built_is_refused_and_named(
    model: type[BaseModel], body: bytes, message: str
) -> None:
    with pytest.raises(NotBuiltError if message == "not built" else UserError, match=message):
        parse_json(model, body)


@pytest.mark.parametrize("lora", [{}, {"lora_config": None}, {"lora_config": {"rank": 0}}])
def test_without_a_rank_all_parameters_are_trained(lora: dict[str, Any]) -> None:
    assert parse_json(training.CreateModelRequest, creation(base_model="b", **lora)).lora_config == training.LoraConfig(
        rank=0
    )


def test_a_poll_names_samples_of_its_session_and_each_once() -> None:
    named = ["s:sample:0/1", "x", "t:sample:0/1", "s:sample:0/2", "s:sample:0/1", "s:sample:01/1"]
    asked = service.parse_poll(
        orjson.dumps({"target": {"sampling_session_id": "s:sample:0"}, "retrieved_request_ids": named})
    )
    assert asked.retrieved_request_ids == ["s:sample:0/1", "s:sample:0/2"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            b",".join(b'"%d": 1' % number for number in range(1001)),
            "body: 1001 fields are wrong or not known; send those of the API alone",
        ),
        (
            b'"target_prompt_logprobs": {"data": [], "dtype": "int64", "sparse_crow_indices": ['
            + b"0.5," * 2000
            + b"1]}",
            "indices.0: ",
        ),
    ],
    ids=["unknown fields", "values of a list"],
)
def test_of_a_body_that_is_wrong_in_many_places_not_all_are_described(wrong: bytes, message: str) -> None:
    """That would take seconds, and a gigabyte."""
    body = b'{"prompt": {"chunks": []}, "sampling_params": {}, %s}' % wrong
    with pytest.raises(UserError, match=message) as caught:
        parse_sample_request(body)
    assert len(str(caught.value)) < 300
    cause = caught.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() in (1, 1001)


@pytest.mark.parametrize(("module", "count"), [(service, 6), (training, 5), (sample, 1), (catalog, 3)])
def test_no_request_takes_an_id_longer_than_any_that_was_given(module: ModuleType, count: int) -> None:
    """It is refused before anything is looked up or remembered."""
    models = [found for found in vars(module).values() if isinstance(found, type) and issubclass(found, BaseModel)]
    names = {"model_id", "request_id", "sampling_session_id", "session_id", "last_session_id"}
    ids = [(model, name) for model in models for name in names & model.model_fields.keys()]
    assert len(ids) >= count
    for model, name in ids:
        with pytest.raises(ValidationError) as caught:
            model.model_validate({name: "x" * 301})
        assert ("string_too_long", (name,)) in [(error["type"], error["loc"]) for error in caught.value.errors()]
