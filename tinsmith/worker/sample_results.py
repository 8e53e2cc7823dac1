"""Answers samples that have ended: with what was sampled, which may be recorded first, or with an error."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from tinsmith.errors import NotFoundError, TinsmithError
from tinsmith.protocol.boundary import failing_into
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Sample, SampleDone, SampleFailed
from tinsmith.sampling.sampler import SampleResult
from tinsmith.store import ids
from tinsmith.store.records import RecordedSequence
from tinsmith.wire.sample import encode_sample_response
from tinsmith.worker.background import Background
from tinsmith.worker.records import SequenceRecords
from tinsmith.worker.sampling_base import Started

log = logging.getLogger(__name__)


@dataclass(eq=False)
class SampleResults:
    """Sends the results of samples. `disk` runs what records them."""

    recorded: SequenceRecords
    disk: Background
    send: Callable[[Message], None]
    sampled_tokens: int = 0
    """Tokens of all finished requests."""
    finished: int = 0

    def fail(self, message: Sample, error: TinsmithError) -> None:
        self.send(SampleFailed(message.request_id, message.run, str(error), error.category, isinstance(error, NotFoundError)))
        log.warning("failed sample=%s: %s", message.request_id, error)

    def finish(self, result: SampleResult, started: Started) -> None:
        """Answer a sample; what cannot be answered fails."""
        message = started.message
        with failing_into(partial(self.fail, message)):
            result.check_finite(started.questions)
            response = encode_sample_response(result.sequences, result.answers, result.cached_tokens)
            done = SampleDone(message.request_id, message.run, response)
            if started.is_recorded:
                self._record(message, result, done)
            else:
                self.send(done)
            tokens = sum(len(sequence.tokens) for sequence in result.sequences)
            self.sampled_tokens += tokens
            self.finished += 1
            log.debug(
                "sample=%s weights=%s prompt_tokens=%d tokens=%d seconds=%.3f",
                message.request_id,
                message.weights_id or message.base_model,
                result.prompt_tokens,
                tokens,
                time.monotonic() - started.started_at,
            )

    def _record(self, message: Sample, result: SampleResult, done: SampleDone) -> None:
        """Record what was sampled in a thread, then answer: a client may train on it as soon as it has the answer."""
        sequences = {
            ids.sequence_id(message.request_id, index): RecordedSequence(
                result.prompt_tokens, np.array(sequence.tokens, dtype=np.int32), np.array(sequence.logprobs, dtype=np.float32)
            )
            for index, sequence in enumerate(result.sequences)
        }

        def answer(ended: "Future[None]") -> None:
            with failing_into(partial(self.fail, message)):
                ended.result()
                self.send(done)

        self.disk.run(partial(self.recorded.put, sequences), answer)

    def forget_session(self, session_id: str) -> None:
        """Delete what an ended session has recorded."""
        self.disk.run(partial(self.recorded.forget_session, session_id), _log_failure)


def _log_failure(ended: "Future[None]") -> None:
    with failing_into(lambda error: log.warning("what an ended session recorded stays until it expires: %s", error)):
        ended.result()
