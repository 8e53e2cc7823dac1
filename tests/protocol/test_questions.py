"""What workers ask of databases that only the engine opens, over real sockets.

Invariant: No worker opens a database: it gets rows and recorded sequences from the engine, with all their bits, and
nobody else may ask for them. Also: `tests/test_architecture.py`, `tests/distributed/test_ray.py`.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from tests.protocol.test_link import OVER_TCP, knock
from tests.store.test_store import checkpoint
from tinsmith.config import Config
from tinsmith.engine.records import Records
from tinsmith.errors import NotFoundError, StoreUnavailableError, TinsmithError, UserError
from tinsmith.protocol.gate import ChildKeys
from tinsmith.protocol.link import ParentLink, question_address
from tinsmith.protocol.messages import Message
from tinsmith.protocol.questions import (
    Answered,
    Answering,
    Answers,
    CheckpointRow,
    FindCheckpoint,
    ForgetSequences,
    Questions,
)
from tinsmith.store.recorded_sequences import RecordedSequences
from tinsmith.store.records import LOCAL, RecordedSequence, SequenceRoutes
from tinsmith.store.store import Store
from tinsmith.worker.records import AskedRecords

ROW = replace(checkpoint("tinker://m/sampler_weights/a"), size_bytes=2**40)


@contextmanager
def asking(answers: Answers, host: str | None = None) -> Iterator[Questions]:
    """A worker's end whose questions get these answers."""
    parent = ParentLink(host)
    answering = Answering(parent.take_questions(), answers)
    questions = Questions(parent.address, parent.keys, 120.0)
    yield questions
    questions.close()
    answering.close()
    parent.close()


@pytest.mark.parametrize("host", [None, OVER_TCP])
def test_sequences_are_recorded_found_and_forgotten_by_the_engine_with_all_their_bits(
    tmp_path: Path, host: str | None
) -> None:
    records = Records(Config(["tiny=unused"], str(tmp_path)))
    sequences = {
        f"s:sample:0/{number}/0": RecordedSequence(
            number, np.arange(number, dtype=np.int32), np.array([-1 / 3, np.nan, -np.inf][:number], np.float32)
        )
        for number in range(4)
    }
    with asking(records.answer, host) as questions:
        worker = AskedRecords(questions.ask)
        worker.put(sequences)
        for found in (worker.find(["unknown", *sequences]), RecordedSequences(tmp_path, 2**20).find(sequences)):
            assert list(found) == list(sequences)
            for name, kept in sequences.items():
                assert found[name].prompt_length == kept.prompt_length
                assert found[name].tokens.tobytes() == kept.tokens.tobytes()
                assert found[name].logprobs.tobytes() == kept.logprobs.tobytes()
        worker.forget_session("s")
        assert worker.find(sequences) == {}
    records.close()


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_experts_are_kept_and_found_by_the_engine_with_all_their_bits(
    tmp_path: Path, dtype: type[np.integer[Any]]
) -> None:
    records = Records(Config(["tiny=unused"], str(tmp_path)))
    kept = [
        SequenceRoutes(
            np.arange(length, dtype=np.int64) - 2**40, np.arange(6 * (length - 1)).reshape(2, -1, 3).astype(dtype)
        )
        for length in (1, 4, 30)
    ]
    with asking(records.answer) as questions:
        worker = AskedRecords(questions.ask)
        worker.put_routes("s:train:0", LOCAL, kept)
        asked = [each.tokens for each in kept] + [np.arange(3)]
        found = worker.find_routes("s:train:0", asked)
        assert found[3] is None
        for each, ours in zip(kept, found[:3], strict=True):
            assert ours is not None
            assert ours.dtype == dtype
            np.testing.assert_array_equal(ours, each.experts)
        assert worker.find_routes("s:train:1", asked) == [None] * 4
        worker.put_routes("s:train:1", "another", kept)  # who samples a checkpoint of it that is published
        assert worker.find_routes("s:train:1", asked) == [None] * 4
        worker.forget_session("s")
        assert worker.find_routes("s:train:0", asked) == [None] * 4
    records.close()


def test_rows_of_checkpoints_and_errors_arrive_as_the_store_has_them(tmp_path: Path) -> None:
    records = Records(Config(["tiny=unused"], str(tmp_path)))
    store = Store.open(tmp_path)
    with asking(records.answer) as questions:
        worker = AskedRecords(questions.ask)
        for path, kind in ((ROW.tinker_path, "sampler"), ("tinker://m/weights/a", "sampler"), ("elsewhere", None)):
            with pytest.raises(TinsmithError) as expected:
                store.require_checkpoint(path, kind)  # type: ignore[arg-type]
            with pytest.raises(TinsmithError) as told:
                worker.require_checkpoint(path, kind)  # type: ignore[arg-type]
            assert (type(told.value), str(told.value)) == (type(expected.value), str(expected.value))
            assert isinstance(told.value, NotFoundError | UserError)
    with asking(lambda _: CheckpointRow.of(ROW)) as questions:
        assert AskedRecords(questions.ask).require_checkpoint(ROW.tinker_path, "sampler") == ROW
    records.close()
    store.close()


def test_threads_of_a_worker_each_get_their_own_answer() -> None:
    with asking(lambda question: question) as questions, ThreadPoolExecutor(4) as threads:
        asked = [FindCheckpoint(f"{number}", None) for number in range(80)]
        assert list(threads.map(questions.ask, asked)) == asked


def test_an_engine_that_fails_or_does_not_answer_is_asked_again_later_and_a_late_answer_is_nobodys() -> None:
    go_on = threading.Event()

    def answer(question: Message) -> Message:
        assert isinstance(question, ForgetSequences)
        if question.session_id == "wrong":
            raise ValueError("a bug")
        if question.session_id == "late":
            go_on.wait()
        return FindCheckpoint(question.session_id, None)

    with asking(answer) as questions:
        with pytest.raises(TinsmithError, match="a bug"):
            questions.ask(ForgetSequences("wrong"))
        questions._patience_ms = 10
        with pytest.raises(StoreUnavailableError, match="the engine did not answer"):
            questions.ask(ForgetSequences("late"))
        go_on.set()
        questions._patience_ms = 120_000
        assert questions.ask(ForgetSequences("next")) == FindCheckpoint("next", None)


def test_nobody_but_its_worker_may_ask_over_tcp() -> None:
    parent = ParentLink(OVER_TCP)
    assert parent.keys is not None
    answering = Answering(parent.take_questions(), lambda _: Answered())
    public, secret = (key.decode() for key in zmq.curve_keypair())
    for keys in (None, ChildKeys(parent.keys.parent, public, secret)):
        assert knock(zmq.REQ, question_address(parent.address), keys) != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert knock(zmq.REQ, question_address(parent.address), parent.keys) == zmq.EVENT_HANDSHAKE_SUCCEEDED
    answering.close()
    parent.close()
