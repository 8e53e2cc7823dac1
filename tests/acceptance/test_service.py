"""What a script meets around training and sampling: sessions, model names, tokenizers, clear refusals."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import tinker
import torch
from tinker import types

from tests.acceptance.talking import RAW_STEP, datum, logprobs, scores, text_input, train, with_inputs
from tests.running import Server


def test_capabilities_and_info(service: tinker.ServiceClient, family_dir: Callable[[str], Path]) -> None:
    supported = service.get_server_capabilities().supported_models
    assert [(m.model_name, m.max_context_length) for m in supported] == [("text", 32768), ("vision", 32768)]
    client = train(service, "vision:variant", rank=16)
    info = client.get_info()
    assert (info.model_data.model_name, info.model_data.arch, info.lora_rank) == ("vision", "qwen3_vl", 16)
    assert info.model_data.tokenizer_id == str(family_dir("qwen3_vl"))
    assert client.get_tokenizer().decode(client.get_tokenizer().encode("a kettle")) == "a kettle"


def test_an_unknown_base_model_names_those_there_are(service: tinker.ServiceClient) -> None:
    with pytest.raises(Exception, match="base_model 'gpt-9' is not served here; there are: text, vision"):
        service.create_lora_training_client(base_model="gpt-9").result()
    with pytest.raises(Exception, match="base_model 'gpt-9' is not served here; there are: text, vision"):
        service.create_sampling_client(base_model="gpt-9").result()


def test_what_is_not_built_is_refused_and_training_goes_on(service: tinker.ServiceClient) -> None:
    client = train(service, "text")
    item = datum(text_input(0, 6))
    with pytest.raises(tinker.RequestFailedError, match=r"loss_fn 'custom' is not built: .* forward_backward_custom"):
        client.forward([item], "custom").result()
    with pytest.raises(tinker.RequestFailedError, match=r"loss_fn 'custom' is not built: .* forward_backward_custom"):
        client.forward_backward([item], "custom").result()
    with pytest.raises(tinker.RequestFailedError, match="the step was refused and the gradients are cleared"):
        client.optim_step(RAW_STEP).result()
    client.forward_backward([item], "cross_entropy").result()
    assert client.optim_step(RAW_STEP).result().metrics


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"target_tokens": [1, 2, 3]}, r"datum 0: target_tokens has shape \(3,\), but the model input has 2 positions"),
        ({"target_tokens": [1, 9999]}, "datum 0: target_tokens at position 1 is 9999, which is not in the vocabulary of 2048"),
        ({"target_tokens": [1, 2], "weights": [1.0, float("nan")]}, "datum 0: weights at position 1 is nan; it must be finite"),
        ({"target_tokens": [1, 2], "weights": [1.0]}, r"datum 0: weights has shape \(1,\), target_tokens has \(2,\)"),
        ({"weights": [1.0, 1.0]}, "datum 0: loss_fn_inputs has no target_tokens"),
    ],
)
def test_a_wrong_datum_names_field_and_value(service: tinker.ServiceClient, item: dict[str, list[float]], message: str) -> None:
    client = train(service, "text")
    wrong = with_inputs(types.ModelInput.from_ints([1, 2]), **item)
    with pytest.raises(tinker.RequestFailedError, match=message):
        client.forward([wrong], "cross_entropy").result()
    assert len(scores(client, [datum(text_input(0, 4))])) == 1


def test_target_tokens_alone_count_once_each(service: tinker.ServiceClient) -> None:
    client = train(service, "text")
    model_input = text_input(0, 5)
    item = with_inputs(model_input, target_tokens=[1, 2, 3, 4, 5])
    output = client.forward([item], "cross_entropy").result()
    assert output.metrics["loss:sum"] == pytest.approx(-logprobs(output)[0].sum(), rel=1e-5)


def test_a_custom_loss_of_the_client(service: tinker.ServiceClient) -> None:
    """The SDK computes it from a forward and sends the gradient back as weights of any sign."""

    def squared(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        del data
        return torch.cat(logprobs).square().sum(), {"mine": 1.0}

    client, twin = train(service, "text"), train(service, "text")
    items = [datum(text_input(seed, 6), seed) for seed in range(2)]
    client.forward_backward_custom(items, squared).result()
    norm = client.optim_step(RAW_STEP).result().metrics
    by_hand = []
    for item, lp in zip(items, scores(twin, items), strict=True):
        weights = torch.from_numpy(-2 * lp)
        by_hand.append(with_inputs(item.model_input, target_tokens=item.loss_fn_inputs["target_tokens"], weights=weights))
    twin.forward_backward(by_hand, "cross_entropy").result()
    expected = twin.optim_step(RAW_STEP).result().metrics
    assert norm is not None
    assert expected is not None
    assert norm["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


def test_a_finished_session_is_over(server: Server, http: httpx.Client) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-x") as service:
        client = train(service, "text")
        sampler = client.save_weights_and_get_sampling_client().result()
        assert len(sampler.compute_logprobs(text_input(0, 4)).result()) == 4
    session_id = client.model_id.partition(":train:")[0]
    assert http.post("session_heartbeat", json={"session_id": session_id}).status_code == 410
    late = http.post("optim_step", json={"model_id": client.model_id, "seq_id": 2, "adam_params": {}}).json()
    failed = http.post("retrieve_future", json={"request_id": late["request_id"]}).json()
    assert failed["category"] == "user"
    assert "its session is finished" in failed["error"]
    ask = {"sampling_session_id": f"{session_id}:sample:0", "seq_id": 9, "sampling_params": {"max_tokens": 1}}
    gone = http.post("asample", json=ask | {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}})
    assert gone.status_code == 404


def test_one_line_is_logged_for_each_operation(service: tinker.ServiceClient, server: Server) -> None:
    client = train(service, "text")
    item = datum(text_input(0, 7))
    client.forward_backward([item], "cross_entropy").result()
    client.optim_step(RAW_STEP).result()
    server.wait_for_log(f"model={client.model_id} seq_id=2 ")  # the client may have its result before the line is written
    lines = [line for line in server.log.read_text().splitlines() if f"model={client.model_id} " in line]
    assert [line.split(" seq_id=")[1].split(" seconds=")[0].split("loss")[0].strip() for line in lines[:2]] == [
        "0 kind=create_model tokens=0",
        "1 kind=forward_backward tokens=7",
    ]
    assert "kind=optim_step" in lines[2]
    assert all(" seconds=" in line and " queued=" in line for line in lines)
