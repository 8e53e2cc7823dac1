"""JSON about sessions, sampling sessions and futures."""

from typing import Annotated, Literal, Self

from pydantic import FailFast, Field, model_validator

from tinsmith.wire.json_body import CountFromZero, FiniteFloat, Id, Metadata, StrictModel, TolerantModel, parse_json

MOST_ACKNOWLEDGED = 2**16
"""Samples that one poll, of many a minute, can acknowledge."""


class CreateSessionRequest(TolerantModel):
    """POST create_session."""

    tags: Annotated[list[str], FailFast()] = Field(default_factory=list)
    user_metadata: Metadata | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionHeartbeatRequest(TolerantModel):
    """POST session_heartbeat."""

    session_id: Id


class FinishReason(TolerantModel):
    """Reason for the end of a session."""

    type: str


class FinishSessionRequest(TolerantModel):
    """POST sessions/{session_id}/finish."""

    reason: FinishReason
    detail: str | None = None


class RetrieveFutureRequest(StrictModel):
    """POST retrieve_future. `allow_metadata_only` permits, but does not ask for, a reply without the payload."""

    request_id: Id
    allow_metadata_only: bool = False


class CancelFutureRequest(StrictModel):
    """POST cancel_future."""

    request_id: Id


class SamplesOfClient(StrictModel):
    """The client that retrieve_futures is about."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Id
    cloned_sampler_id: CountFromZero = 0
    """Its number within the sampling session; 0 created it."""


class RetrieveFuturesRequest(StrictModel):
    """POST retrieve_futures."""

    target: SamplesOfClient
    prev_cursor: CountFromZero = 0
    """The client has the reports up to this cursor."""
    timeout: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Seconds to wait; None leaves them to the server."""
    retrieved_request_ids: Annotated[list[str], FailFast(), Field(default_factory=list, max_length=MOST_ACKNOWLEDGED)]
    """Samples whose results the client has."""


def parse_poll(body: bytes) -> RetrieveFuturesRequest:
    """The body of a poll. Of its ids those of its session's samples are kept, each once. Raises as `parse_json`."""
    asked = parse_json(RetrieveFuturesRequest, body)
    prefix = f"{asked.target.sampling_session_id}/"
    return asked.model_copy(
        update={"retrieved_request_ids": [each for each in dict.fromkeys(asked.retrieved_request_ids) if each.startswith(prefix)]}
    )


class JoinSamplingSessionRequest(StrictModel):
    """POST join_sampling_session."""

    sampling_session_id: Id
    type: Literal["join_sampling_session"] = "join_sampling_session"


class CreateSamplingSessionRequest(StrictModel):
    """POST create_sampling_session, of a base model or a checkpoint; `base_model` may replace the checkpoint's."""

    session_id: Id
    sampling_session_seq_id: CountFromZero
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.base_model is None and self.model_path is None:
            raise ValueError("base_model or model_path is needed")
        return self
