"""Reads JSON bodies and query strings, and refuses unknown fields, wrong types and impossible values."""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tinsmith.errors import UserError, quoted, translated

MAX_ID = 300
"""Most characters of an id; this server's are shorter."""
MAX_SEQ_ID = 2**31 - 1
"""The largest seq_id of a training operation: an int32 in protobuf."""

_MOST_ERRORS = 1000
"""Most errors of a body whose first is named: Pydantic describes all, at a kilobyte and microseconds each."""


def _check_finite(values: dict[str, Any]) -> dict[str, Any]:
    """Refuse NaN and infinity, which JSON lacks: a search could not read the stored object."""
    for value in _scalars(values):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"must hold finite numbers only, and not {value}")
    return values


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _scalars(part)
    else:
        yield value


ModelT = TypeVar("ModelT", bound=BaseModel)
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Id = Annotated[str, Field(max_length=MAX_ID)]
"""An id of a session, a model or a request."""
Named = Literal[
    "session",
    "living session",
    "model",
    "run",
    "sampling session",
    "request",
    "checkpoint",
    "readable checkpoint",
]


@dataclass(frozen=True)
class Names:
    """Marks a field as the id of something that must be the client's own, or readable by all."""

    kind: Named


SeqId = Annotated[int, Field(ge=1, le=MAX_SEQ_ID)]
Metadata = Annotated[dict[str, Any], AfterValidator(_check_finite)]
"""A client's JSON object, stored as it is."""
CountFromZero = Annotated[int, Field(ge=0, le=2**63 - 1)]


class StrictModel(BaseModel):
    """A JSON object without unknown fields, where a number in quotes is none."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TolerantModel(BaseModel):
    """A JSON object whose unknown fields are ignored: newer SDKs may add some that only inform."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


def parse_json(model_cls: type[ModelT], body: bytes, refusal: type[UserError] = UserError) -> ModelT:
    """The body as `model_cls`. Raises `refusal` naming the first wrong field and its value, and NotBuiltError."""
    with _explaining("body", refusal):
        return model_cls.model_validate_json(body)


def parse_query(model_cls: type[ModelT], values: Mapping[str, str]) -> ModelT:
    """A query string as `model_cls`. Raises UserError as `parse_json`."""
    with _explaining("query"):
        return model_cls.model_validate(values)


def _explaining(whole: str, refusal: type[UserError] = UserError) -> AbstractContextManager[None]:
    return translated(ValidationError, refusal, lambda error: _explained(error, whole))


def _explained(error: ValidationError, whole: str) -> str:
    """Describe the first error; `whole` names the body or query where no field is wrong, or very many are."""
    if error.error_count() > _MOST_ERRORS:
        return f"{whole}: {error.error_count()} fields are wrong or not known; send those of the API alone"
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or whole
    got = quoted(first["input"])
    if first["input"] is None:
        got = (
            "null, as which the SDK sends NaN and infinity too"
            if first["type"] in ("float_type", "int_type")
            else "null"
        )
    # So Pydantic words it for dataclasses.
    message = first["msg"] if first["type"] != "unexpected_keyword_argument" else "Extra inputs are not permitted"
    return f"{field}: {message}, got {got}"
