"""Requests about sessions, futures, runs and checkpoints: JSON bodies and query strings."""

from datetime import UTC, date, datetime, time
from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, FailFast, Field, model_validator

from tinsmith.wire.json_body import (
    CountFromZero,
    FiniteFloat,
    Id,
    Metadata,
    Names,
    StrictModel,
    TolerantModel,
    parse_json,
)
from tinsmith.wire.training_requests import LoraConfig, TtlSeconds

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

    session_id: Annotated[Id, Names("living session")]


class FinishReason(TolerantModel):
    """Reason for the end of a session."""

    type: str


class FinishSessionRequest(TolerantModel):
    """POST sessions/{session_id}/finish."""

    reason: FinishReason
    detail: str | None = None


class RetrieveFutureRequest(StrictModel):
    """POST retrieve_future. `allow_metadata_only` permits, but does not ask for, a reply without the payload."""

    request_id: Annotated[Id, Names("request")]
    allow_metadata_only: bool = False


class CancelFutureRequest(StrictModel):
    """POST cancel_future."""

    request_id: Annotated[Id, Names("request")]


class SamplesOfClient(StrictModel):
    """The client that retrieve_futures is about."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Annotated[Id, Names("sampling session")]
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
        update={
            "retrieved_request_ids": [
                each for each in dict.fromkeys(asked.retrieved_request_ids) if each.startswith(prefix)
            ]
        }
    )


class JoinSamplingSessionRequest(StrictModel):
    """POST join_sampling_session."""

    sampling_session_id: Annotated[Id, Names("sampling session")]
    type: Literal["join_sampling_session"] = "join_sampling_session"


class CreateSamplingSessionRequest(StrictModel):
    """POST create_sampling_session, of a base model or a checkpoint; `base_model` may replace the checkpoint's."""

    session_id: Annotated[Id, Names("session")]
    sampling_session_seq_id: CountFromZero
    base_model: str | None = None
    model_path: Annotated[str | None, Names("readable checkpoint")] = None
    type: Literal["create_sampling_session"] = "create_sampling_session"

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.base_model is None and self.model_path is None:
            raise ValueError("base_model or model_path is needed")
        return self


# What `RestClient` and the `tinker` command line ask about runs, checkpoints and sessions.

_Limit = Annotated[int, Field(ge=1, le=1000)]
_Text = Annotated[str, Field(min_length=1)]


class Query(BaseModel):
    """A query string: numbers are parsed from text."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ScopeQuery(Query):
    """Whose objects to list: the tenant's own, or all that the key may use."""

    access_scope: Literal["owned", "accessible"] = "owned"


class SessionsQuery(ScopeQuery):
    """GET sessions."""

    limit: _Limit = 20
    offset: CountFromZero = 0


class RunsQuery(SessionsQuery):
    """GET training_runs."""

    project_id: str | None = None


class CheckpointsQuery(Query):
    """GET checkpoints."""

    limit: _Limit = 100
    offset: CountFromZero = 0


class RunsPageQuery(Query):
    """The console's page of runs."""

    offset: CountFromZero = 0
    project: str = ""
    compare: str = ""
    """Empty: the list, no comparison."""


class CurvesQuery(Query):
    """The part of the console's queries that says how curves are drawn."""

    smooth: Annotated[float, Field(ge=0, le=0.999)] = 0.0
    scale: Literal["linear", "log"] = "linear"


class OperationsQuery(Query):
    """The console's page of operations; empty is no condition."""

    status: Literal["", "queued", "done", "failed"] = ""
    kind: str = ""
    run: str = ""
    before: CountFromZero | None = None


class OperationQuery(Query):
    """The part of a path of the console that names an operation of a run."""

    seq_id: CountFromZero


class TraceQuery(Query):
    """GET trace."""

    seconds: float = Field(600.0, gt=0, allow_inf_nan=False)


class UsageQuery(Query):
    """GET billing/usage/events."""

    starting_on: AwareDatetime
    ending_before: AwareDatetime


class StorageQuery(Query):
    """GET billing/usage/checkpoints/current."""

    project_id: str | None = None


class AuditQuery(Query):
    """GET audit, of a day in UTC, by default today."""

    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all"
    day: date = Field(default_factory=lambda: datetime.now(UTC).date())

    @property
    def start(self) -> float:
        """The day's beginning as Unix time."""
        return datetime.combine(self.day, time(), UTC).timestamp()


class DownloadQuery(Query):
    """The parameters that make a download URL valid."""

    expires: CountFromZero
    signature: str


class TtlRequest(StrictModel):
    """PUT .../ttl. None, which must be sent, means for ever."""

    ttl_seconds: TtlSeconds | None


class WeightsInfoRequest(StrictModel):
    """POST weights_info."""

    tinker_path: Annotated[str, Names("readable checkpoint")]


class CopyWeightsRequest(StrictModel):
    """POST copy_weights: into a run of a session, or a new session of a project."""

    source_path: Annotated[str, Names("readable checkpoint")]
    session_id: Annotated[Id | None, Names("session")] = None
    model_seq_id: CountFromZero | None = None
    destination_project_id: _Text | None = None
    ttl_seconds: TtlSeconds | None = None
    weights_access_token: None = None

    @model_validator(mode="after")
    def _check_destination(self) -> Self:
        of_session = self.session_id is not None, self.model_seq_id is not None
        if of_session not in ((True, True), (False, False)) or of_session[0] == (
            self.destination_project_id is not None
        ):
            raise ValueError("send either destination_project_id, or session_id and model_seq_id")
        return self


class UploadStartRequest(StrictModel):
    """POST external_weights_upload_start, of SDKs from 0.39 on: an adapter that is going to be uploaded."""

    base_model: _Text
    lora_config: LoraConfig
    destination_project_id: _Text | None = None


class UploadFinishRequest(StrictModel):
    """POST external_weights_upload_finish, of SDKs from 0.39 on."""

    upload_id: Id


class AssignProjectRequest(StrictModel):
    """PUT sessions/{session_id}/project."""

    project_id: _Text


class StatusWanted(StrictModel):
    """A state of sessions to search for."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[list[Literal["success", "errored", "interrupted"]], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _check_reasons(self) -> Self:
        if self.reasons is not None and self.type != "client_finished":
            raise ValueError("reasons belong to client_finished")
        return self


class OwnerWanted(StrictModel):
    """The owner whose sessions to search."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[list[str], Field(min_length=1, max_length=10)] | None = None

    @model_validator(mode="after")
    def _check_urns(self) -> Self:
        if (self.type == "user") != (self.owner_urns is not None):
            raise ValueError("owner_urns belong to type 'user', which needs them")
        return self


class SearchCursor(StrictModel):
    """The `next_cursor` of the previous page."""

    # Not strict: a JSON text is how a time comes.
    last_created_at: Annotated[AwareDatetime, Field(strict=False)]
    last_session_id: Id


class CheckpointCursor(StrictModel):
    """The `next_cursor` of the previous page of checkpoints."""

    last_created_at: Annotated[AwareDatetime, Field(strict=False)]
    last_checkpoint_uuid: Id
    """The path of that page's last checkpoint: clients send back what they got."""


class SearchCheckpointsRequest(StrictModel):
    """POST checkpoints/search, of SDKs from 0.39 on."""

    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict, max_length=100)
    checkpoint_type: Literal["training", "sampler"] | None = None
    owner: OwnerWanted = OwnerWanted()
    base_models: Annotated[list[str], Field(min_length=1, max_length=100)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: CheckpointCursor | None = None


class SearchSessionsRequest(StrictModel):
    """POST sessions/search."""

    session_id: Id | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict, max_length=100)
    display_name: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    owner: OwnerWanted = OwnerWanted()
    statuses: Annotated[list[StatusWanted], Field(min_length=1, max_length=100)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None
