"""Query strings and JSON bodies about runs, checkpoints and sessions."""

from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from tinsmith.wire.json_body import CountFromZero, Id, StrictModel
from tinsmith.wire.training_requests import TtlSeconds

_Limit = Annotated[int, Field(ge=1, le=1000)]
_Text = Annotated[str, Field(min_length=1)]


class Query(BaseModel):
    """A query string: numbers are parsed from text."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ScopeQuery(Query):
    """Whose objects to list. There is one owner, so both scopes mean the same."""

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


class DownloadQuery(Query):
    """The parameters that make a download URL valid."""

    expires: CountFromZero
    signature: str


class TtlRequest(StrictModel):
    """PUT .../ttl. None, which must be sent, means for ever."""

    ttl_seconds: TtlSeconds | None


class WeightsInfoRequest(StrictModel):
    """POST weights_info."""

    tinker_path: str


class CopyWeightsRequest(StrictModel):
    """POST copy_weights: into a run of a session, or a new session of a project."""

    source_path: str
    session_id: Id | None = None
    model_seq_id: CountFromZero | None = None
    destination_project_id: _Text | None = None
    ttl_seconds: TtlSeconds | None = None
    weights_access_token: None = None

    @model_validator(mode="after")
    def _check_destination(self) -> Self:
        of_session = self.session_id is not None, self.model_seq_id is not None
        if of_session not in ((True, True), (False, False)) or of_session[0] == (self.destination_project_id is not None):
            raise ValueError("send either destination_project_id, or session_id and model_seq_id")
        return self


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
