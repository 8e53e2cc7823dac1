"""The training half of the engine on a real backend: order, budgets, failures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.bases import renderer
from tinsmith.config import TrainingConfig
from tinsmith.engine.checkpoints import Checkpoints
from tinsmith.engine.command_queue import CommandQueue
from tinsmith.engine.operations import Operations, Served
from tinsmith.engine.snapshots import Snapshots
from tinsmith.engine.trainer import Trainer
from tinsmith.models.base import BaseModel
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.records import REJECTED, Command, CommandKind, Outcome
from tinsmith.store.store import Store
from tinsmith.training.backend import DatumWork, LocalBackend, PassResult
from tinsmith.wire import tinker_pb2


class CountingBackend(LocalBackend):
    """The real backend, with a note of every pass."""

    passes: list[tuple[list[str], int, bool]]

    def run_pass(self, work: Sequence[DatumWork], backward: bool) -> PassResult:
        self.passes.append(([datum.model_id for datum in work], sum(len(datum.rendered) for datum in work), backward))
        return super().run_pass(work, backward)


class Bench:
    """A trainer, its outcomes by request id, and ways to feed it."""

    def __init__(self, base: BaseModel, data_dir: Path, tokens_per_pass: int = 64, held_s: float = 60.0) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.backend = CountingBackend(base, TrainingConfig(tokens_per_pass=tokens_per_pass))
        self.backend.passes = []
        checkpoints = Checkpoints(Store.open(data_dir), CheckpointFiles(data_dir))
        self.snapshots = Snapshots({"tiny": base}, checkpoints, data_dir / "snapshots", 2**30)
        served = {"tiny": Served("tiny", self.backend, renderer(base))}
        self.payloads: dict[int, bytes] = {}
        operations = Operations(served, 64, checkpoints, self.snapshots, 60.0, lambda command: self.payloads[command.id])
        self.trainer = Trainer(operations, CommandQueue(held_s), tokens_per_pass, self._finish)
        self.ids = iter(range(1, 1000))

    def _finish(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            assert outcome.request_id not in self.outcomes, "an operation ended twice"
            self.outcomes[outcome.request_id] = outcome

    def add(self, model: str, seq: int, kind: CommandKind, payload: Any, created_at: float = 0.0) -> None:
        body = payload if isinstance(payload, bytes) else orjson.dumps(payload)
        number = next(self.ids)
        self.payloads[number] = body
        self.trainer.add(Command(number, f"s:train:{model}", seq, kind, len(body), created_at))

    def create(self, model: str, base_model: str = "tiny", rank: int = 4) -> None:
        body = {"session_id": "s", "model_seq_id": 0, "base_model": base_model, "lora_config": {"rank": rank}}
        self.add(model, 0, "create_model", body)

    def forward(self, model: str, seq: int, lengths: Sequence[int], forward_only: bool = False, target: int = 1) -> None:
        message = tinker_pb2.ForwardBackwardRequest(model_id=f"s:train:{model}", seq_id=seq, loss_fn="cross_entropy")
        message.forward_only = forward_only
        for length in lengths:
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.arange(length, dtype="<i4").tobytes()
            tensor = datum.loss_fn_inputs["target_tokens"]
            tensor.dense = np.full(length, target, dtype="<i8").tobytes()
            tensor.dtype = tinker_pb2.DTYPE_INT64
            tensor.shape.append(length)
        self.add(model, seq, "forward_backward", message.SerializeToString())

    def snapshot(self, model: str, seq: int, number: int = 1) -> None:
        body = {"model_id": f"s:train:{model}", "seq_id": seq, "sampling_session_seq_id": number}
        self.add(model, seq, "save_weights_for_sampler", body)

    def optim(self, model: str, seq: int, **adam: float) -> None:
        params = {"learning_rate": 1e-3} | adam
        self.add(model, seq, "optim_step", {"model_id": f"s:train:{model}", "seq_id": seq, "adam_params": params})

    def settle(self) -> None:
        for _ in range(200):
            if not self.trainer.has_work:
                return
            self.trainer.turn()
        raise AssertionError("the trainer does not come to rest")

    def error(self, model: str, seq: int) -> str | None:
        return self.outcomes[f"s:train:{model}/{seq}"].error


@pytest.fixture
def bench(text_base: BaseModel, tmp_path: Path) -> Bench:
    return Bench(text_base, tmp_path)


def test_operations_run_in_order_and_once(bench: Bench) -> None:
    bench.optim("a", 3)
    bench.forward("a", 2, [5])
    bench.create("a")
    bench.settle()
    assert list(bench.outcomes) == ["s:train:a/0"]
    bench.forward("a", 1, [4])
    bench.settle()
    assert list(bench.outcomes) == [f"s:train:a/{seq}" for seq in range(4)]
    assert all(outcome.error is None for outcome in bench.outcomes.values())
    assert bench.backend.passes == [(["s:train:a", "s:train:a"], 9, True)]


def test_neighbouring_work_of_all_models_shares_passes_and_a_step_is_a_barrier_for_its_own(bench: Bench) -> None:
    for model in "ab":
        bench.create(model)
        bench.forward(model, 1, [3])
    bench.optim("a", 2)
    bench.forward("a", 3, [2])
    bench.forward("b", 2, [2])
    bench.settle()
    a, b = "s:train:a", "s:train:b"
    assert bench.backend.passes[0] == ([a, b, b], 8, True)
    assert bench.backend.passes[1] == ([a], 2, True)


def test_a_pass_keeps_its_budget_and_is_fair(bench: Bench) -> None:
    bench.create("long")
    bench.create("short")
    bench.forward("long", 1, [30] * 5)
    bench.forward("short", 1, [10])
    bench.settle()
    assert bench.backend.passes[0] == (["s:train:long", "s:train:short"], 40, True)
    assert all(tokens <= 64 for _, tokens, _ in bench.backend.passes)
    assert sum(tokens for _, tokens, _ in bench.backend.passes) == 160


def test_a_datum_over_the_budget_runs_alone(bench: Bench) -> None:
    bench.create("a")
    bench.forward("a", 1, [100, 4])
    bench.settle()
    assert [tokens for _, tokens, _ in bench.backend.passes] == [100, 4]


def test_forward_and_backward_do_not_share_a_pass(bench: Bench) -> None:
    bench.create("a")
    for seq in (1, 2, 3):
        bench.forward("a", seq, [3], forward_only=seq == 2)
    bench.settle()
    assert [backward for _, _, backward in bench.backend.passes] == [True, False, True]


def test_a_failed_contribution_refuses_the_step_and_clears_it(bench: Bench) -> None:
    bench.create("a")
    bench.forward("a", 1, [4])
    bench.forward("a", 2, [4], target=5000)
    bench.optim("a", 3)
    bench.forward("a", 4, [4])
    bench.optim("a", 5)
    bench.settle()
    assert bench.error("a", 1) is None
    assert bench.error("a", 2) == "datum 0: target_tokens at position 0 is 5000, which is not in the vocabulary of 2048"
    assert "the step was refused and the gradients are cleared, because an operation before it failed: seq_id 2" in str(bench.error("a", 3))
    assert bench.error("a", 5) is None
    weights = bench.backend.optimizers["s:train:a"].weights
    assert bench.backend.optimizers["s:train:a"].adamw.state[weights.tensors()[0]]["step"].item() == 1


def test_a_failed_forward_leaves_the_step_alone(bench: Bench) -> None:
    bench.create("a")
    bench.forward("a", 1, [4])
    bench.forward("a", 2, [4], forward_only=True, target=5000)
    bench.optim("a", 3)
    bench.settle()
    assert bench.error("a", 2) is not None
    assert bench.error("a", 3) is None


def test_a_refused_step_clears_the_gradients(bench: Bench) -> None:
    bench.create("a")
    bench.forward("a", 1, [4])
    bench.optim("a", 2, learning_rate=-1.0)
    bench.settle()
    assert "learning_rate" in str(bench.error("a", 2))
    assert bench.backend.optimizers["s:train:a"].gradients is None


def test_a_step_that_failed_by_itself_leaves_nothing_behind_for_the_next(bench: Bench) -> None:
    bench.create("a")
    bench.forward("a", 1, [4], target=5000)
    bench.optim("a", 2, learning_rate=-1.0)
    bench.forward("a", 3, [4])
    bench.optim("a", 4)
    bench.settle()
    assert "learning_rate" in str(bench.error("a", 2))
    assert bench.error("a", 4) is None


def test_an_overdue_step_leaves_nothing_behind_for_the_next(text_base: BaseModel, tmp_path: Path) -> None:
    bench = Bench(text_base, tmp_path, held_s=0.0)
    bench.create("a")
    bench.settle()
    bench.optim("a", 2)
    bench.trainer.fail_overdue()
    bench.forward("a", 3, [4])
    bench.optim("a", 4)
    bench.settle()
    assert bench.error("a", 2) == "seq_id 1 never came; this operation, seq_id 2, waited 0 s for it"
    assert bench.error("a", 4) is None


def test_a_step_that_comes_too_late_leaves_the_gradients_of_another_alone(text_base: BaseModel, tmp_path: Path) -> None:
    bench = Bench(text_base, tmp_path, held_s=0.0)
    bench.create("a")
    bench.settle()
    bench.forward("a", 2, [4])
    bench.trainer.fail_overdue()
    bench.optim("a", 3)
    bench.forward("a", 4, [4])
    bench.settle()
    bench.optim("a", 1)
    bench.optim("a", 5)
    bench.settle()
    assert "came after" in str(bench.error("a", 1))
    assert orjson.loads(bench.outcomes["s:train:a/5"].result or b"")["metrics"]["grad_norm"] > 0


def test_a_long_datum_is_not_overtaken_for_ever(bench: Bench) -> None:
    bench.create("short")
    bench.create("long")
    bench.settle()
    for seq in (1, 2):
        bench.forward("short", seq, [30, 30])
    bench.trainer.turn()
    bench.forward("long", 1, [64])
    for seq in (3, 4, 5):
        bench.forward("short", seq, [30, 30])
    bench.settle()
    assert [models for models, _, _ in bench.backend.passes].index(["s:train:long"]) == 2


def test_a_rejected_operation_keeps_its_place_and_spoils_the_step(bench: Bench) -> None:
    bench.create("a")
    bench.add("a", 1, REJECTED, b"the body is too large")
    bench.optim("a", 2)
    bench.settle()
    assert bench.error("a", 1) == "the body is too large"
    assert "seq_id 1: the body is too large" in str(bench.error("a", 2))


def test_a_gap_fails_the_operation_behind_it_and_the_step(text_base: BaseModel, tmp_path: Path) -> None:
    bench = Bench(text_base, tmp_path, held_s=0.0)
    bench.create("a")
    bench.settle()
    bench.forward("a", 2, [4])
    bench.optim("a", 3)
    bench.trainer.fail_overdue()
    bench.settle()
    assert bench.error("a", 2) == "seq_id 1 never came; this operation, seq_id 2, waited 0 s for it"
    assert "the step was refused" in str(bench.error("a", 3))
    bench.forward("a", 1, [4])
    assert "came after the operations behind it had been given up" in str(bench.error("a", 1))


def test_models_that_were_not_created_fail_in_words(bench: Bench) -> None:
    bench.create("a", base_model="gpt-9")
    bench.create("b", rank=100)
    bench.create("c", base_model="tiny:peft:262144")
    bench.forward("a", 1, [3])
    bench.settle()
    assert bench.error("a", 0) == "base_model 'gpt-9' is not served here; there are: tiny"
    assert bench.error("b", 0) == "lora_config.rank is 100; this server allows up to 64 (--max-lora-rank)"
    assert bench.error("c", 0) is None
    assert "model s:train:a is not loaded" in str(bench.error("a", 1))


def test_a_finished_session_cancels_what_it_has_queued_and_frees_its_models(bench: Bench) -> None:
    for model in "ab":
        bench.create(model)
    bench.settle()
    for model in "ab":
        bench.forward(model, 1, [60, 60])
    bench.trainer.turn()
    bench.forward("a", 2, [3])
    bench.optim("a", 3)
    bench.forward("a", 5, [3])
    bench.trainer.end_session("s", save=False)
    bench.settle()
    assert bench.error("a", 1) is None  # a half of it was computed, so it was run to its end
    for model, seq in (("b", 1), ("a", 2), ("a", 3), ("a", 5)):
        assert bench.error(model, seq) == "it was cancelled: its session ended before the operation was run"
    assert [models for models, _, _ in bench.backend.passes] == [["s:train:a"], ["s:train:a"]]
    assert bench.backend.optimizers == {}
    assert bench.trainer.queue.models == {}


def test_a_session_that_ends_before_its_models_exist_leaves_nothing(bench: Bench) -> None:
    bench.create("a")
    bench.create("refused", rank=100)
    bench.snapshot("a", 1)
    bench.trainer.end_session("s", save=False)
    bench.settle()
    assert all("cancelled" in str(outcome.error) for outcome in bench.outcomes.values())
    assert len(bench.outcomes) == 3
    assert bench.backend.optimizers == {}
    assert bench.trainer.queue.models == {}
    assert bench.snapshots.held == {}


def test_a_snapshot_is_taken_in_order(bench: Bench) -> None:
    bench.create("a")
    for seq in (1, 2):
        body = {"model_id": "s:train:a", "seq_id": 3 * seq, "sampling_session_seq_id": seq}
        bench.forward("a", 3 * seq - 2, [4])
        bench.optim("a", 3 * seq - 1)
        bench.add("a", 3 * seq, "save_weights_for_sampler", body)
    bench.settle()
    first, second = bench.snapshots.find("tiny", "s:train:a/3"), bench.snapshots.find("tiny", "s:train:a/6")
    live = bench.backend.optimizers["s:train:a"].weights
    assert orjson.loads(bench.outcomes["s:train:a/3"].result or b"") == {"sampling_session_id": "s:sample:1"}
    assert not (first.tensors()[1] == second.tensors()[1]).all()
    assert (second.tensors()[1] == live.tensors()[1]).all()


def test_an_unloaded_model_leaves_no_counter_behind_and_its_tokens_count(bench: Bench) -> None:
    bench.create("a")
    bench.forward("a", 1, [5, 4])
    bench.settle()
    assert bench.trainer.trained_tokens == {"s:train:a": 9}
    bench.trainer.end_session("s", save=False)
    bench.settle()
    assert (bench.trainer.trained_tokens, bench.trainer.trained_before) == ({}, 9)
