"""Cost of the command log and of kept copies on an SFT step of a 30-million-parameter model.

A step is forward_backward and optim_step of 8 sequences of 128 tokens on Qwen3 of width 512 with 8 layers, LoRA of rank
8. Steps of two servers take turns, one with copies as by default and one without (`--kept-copies-gib 0`); median of 15
steps of each. The log cannot be turned off: its transactions of such a step are timed alone, in a store of their
own, and counted as if nothing went on beside them. About 2 minutes.

Run it with: taskset -c 0,1 python -m benchmarks.log_and_copies
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from benchmarks.servers import random_datums, tinsmith_server, training_client
from benchmarks.sft_step import UNIFORM, VOCABULARY, sdk_step
from benchmarks.timing import in_turn, report
from tinsmith.store.records import CommandKind, Model, NewCommand, Outcome
from tinsmith.store.store import Store
from tinsmith.wire.service_requests import CreateSessionRequest

RESULT_BYTES = 4 * sum(UNIFORM)


def logged_step(store: Store, payload: bytes) -> Callable[[], None]:
    """A function that puts one more step into the log, and records that it has ended."""
    store.create_session("s", CreateSessionRequest().model_dump())
    model = Model("s:train:0", "s", "tiny", {}, {"type": "adamw"}, None, "creating")
    store.append([NewCommand("s:train:0", 0, "create_model", b"{}", model=model)])
    steps: list[tuple[CommandKind, bytes]] = [("forward_backward", payload), ("optim_step", b"{}")]
    numbers = iter(range(1, 10_000))

    def step() -> None:
        for kind, content in steps:
            seq_id = next(numbers)
            store.append([NewCommand("s:train:0", seq_id, kind, content)])
            store.record([Outcome(f"s:train:0/{seq_id}", bytes(RESULT_BYTES), "protobuf", None, None)])

    return step


def main() -> None:
    """Measure and print the line."""
    data = random_datums(UNIFORM, VOCABULARY)
    content = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=content, model_id="s:train:0", seq_id=1)
    payload = forward_backward_request_to_proto(request).SerializeToString()
    with tempfile.TemporaryDirectory() as folder:
        (log_s,) = in_turn(logged_step(Store.open(Path(folder)), payload), rounds=5, repeats=20)
    with (
        tinsmith_server(hidden=512, layers=8, vocab=VOCABULARY) as copying,
        tinsmith_server("--kept-copies-gib", "0", hidden=512, layers=8, vocab=VOCABULARY) as plain,
        training_client(copying) as client,
        training_client(plain) as other,
    ):
        with_s, without_s = in_turn(lambda: sdk_step(client, data), lambda: sdk_step(other, data), rounds=15, repeats=1)
    cost = (with_s - without_s + log_s) / without_s
    about = {"copying_s": with_s, "plain_s": without_s, "log_s": log_s, "load": os.getloadavg()[0]}
    report("cost_of_log_and_copies_percent", 100 * cost, "at most 3", **about)


if __name__ == "__main__":
    main()
