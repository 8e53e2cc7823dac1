"""What a script meets around training and sampling: model names, tokenizers, a finished session, an operation that it sends twice."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import tinker

from tests.acceptance.conftest import connect
from tests.acceptance.talking import RAW_STEP, datum, text_input, train
from tests.running import Server


def test_capabilities_and_info(service: tinker.ServiceClient, family_dir: Callable[[str], Path]) -> None:
    supported = service.get_server_capabilities().supported_models
    assert [(m.model_name, m.max_context_length) for m in supported] == [("text", 32768), ("vision", 32768)]
    client = train(service, "vision:variant", rank=16)
    info = client.get_info()
    assert (info.model_data.model_name, info.model_data.arch, info.lora_rank) == ("vision", "qwen3_vl", 16)
    assert info.model_data.tokenizer_id == str(family_dir("qwen3_vl"))
    assert client.get_tokenizer().decode(client.get_tokenizer().encode("a kettle")) == "a kettle"


def test_a_finished_session_is_over(server: Server, http: httpx.Client) -> None:
    with connect(server) as service:
        client = train(service, "text")
        client.save_weights_and_get_sampling_client().result()
    session_id = client.model_id.partition(":train:")[0]
    assert http.post("session_heartbeat", json={"session_id": session_id}).status_code == 410
    late = http.post("optim_step", json={"model_id": client.model_id, "seq_id": 2, "adam_params": {}}).json()
    failed = http.post("retrieve_future", json={"request_id": late["request_id"]}).json()
    assert (failed["category"], "its session is finished" in failed["error"]) == ("user", True)
    ask = {"sampling_session_id": f"{session_id}:sample:0", "seq_id": 9, "sampling_params": {"max_tokens": 1}}
    assert http.post("asample", json=ask | {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}}).status_code == 404


def test_one_line_is_logged_for_each_operation_and_one_under_the_number_of_another_is_refused_at_once(
    service: tinker.ServiceClient, server: Server
) -> None:
    """As when two processes train one model. The SDK would send it again for five minutes if it were answered 409."""
    client = train(service, "text")
    client.forward_backward([datum(text_input(0, 7))], "cross_entropy").result()
    client._request_id_counter = client._turn_counter = 0
    with pytest.raises(tinker.BadRequestError, match=r"/1 is forward_backward of digest \w+ already, and now came as optim_step of digest"):
        client.optim_step(RAW_STEP).result(timeout=150)
    client.optim_step(RAW_STEP).result()  # under the next number: there is no hole
    server.wait_for_log(f"model={client.model_id} seq_id=2 ")  # the client may have its result before the line is written
    lines = [line for line in server.log.read_text().splitlines() if f"model={client.model_id} " in line]
    for line, said in zip(lines, ("0 kind=create_model tokens=0", "1 kind=forward_backward tokens=7", "2 kind=optim_step"), strict=True):
        assert line.partition(" seq_id=")[2].startswith(said)
        assert " seconds=" in line
        assert " queued=" in line
