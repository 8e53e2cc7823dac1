"""JSON bodies about sessions, sampling sessions and futures."""

from typing import Annotated, Literal, Self

from pydantic import FailFast, Field, model_validator

from tinsmith.wire.json_body import CountFromZero, FiniteFloat, Id, Metadata, StrictModel, TolerantModel, parse_json

MOST_ACKNOWLEDGED = 2**16
"""Samples that one poll can acknowledge. The SDK polls many times a minute."""


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
    """POST retrieve_future. `allow_metadata_only` permits a reply without the payload; the whole payload is always allowed, too."""

    request_id: Id
    allow_metadata_only: bool = False


class CancelFutureRequest(StrictModel):
    """POST cancel_future."""

    request_id: Id


class SamplesOfClient(StrictModel):
    """The client whose samples retrieve_futures asks about."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Id
    cloned_sampler_id: CountFromZero = 0
    """The number of the client of the sampling session; 0 is the one that created it."""


class RetrieveFuturesRequest(StrictModel):
    """POST retrieve_futures."""

    target: SamplesOfClient
    prev_cursor: CountFromZero = 0
    """The client has the reports up to this cursor."""
    timeout: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Seconds to wait for a report; None leaves it to the server."""
    retrieved_request_ids: Annotated[list[str], FailFast(), Field(default_factory=list, max_length=MOST_ACKNOWLEDGED)]
    """Samples whose results the client has."""


def parse_poll(body: bytes) -> RetrieveFuturesRequest:
    """The body of a poll, which may hold many ids. Those of samples of its session are kept, each once. Raises as `parse_json`."""
    asked = parse_json(RetrieveFuturesRequest, body)
    prefix = f"{asked.target.sampling_session_id}/"
    return asked.model_copy(
        update={"retrieved_request_ids": [each for each in dict.fromkeys(asked.retrieved_request_ids) if each.startswith(prefix)]}
    )


class JoinSamplingSessionRequest(StrictModel):
    """POST join_sampling_session: one more client of a sampling session."""

    sampling_session_id: Id
    type: Literal["join_sampling_session"] = "join_sampling_session"


class CreateSamplingSessionRequest(StrictModel):
    """POST create_sampling_session: of a base model, or of a checkpoint, with `base_model` instead of the base that it names, if given."""

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
