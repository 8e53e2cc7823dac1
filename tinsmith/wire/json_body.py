"""How JSON bodies and the parameters of URLs are read: unknown fields, wrong types and impossible values are refused."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tinsmith.errors import UserError, quoted

MAX_SEQ_ID = 2**31 - 1
"""The protobuf requests carry seq_id as int32, so no training operation can have a larger one."""


def _check_finite(values: dict[str, Any]) -> dict[str, Any]:
    """Refuse what is no JSON: a search could not read the stored object."""
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
SeqId = Annotated[int, Field(ge=1, le=MAX_SEQ_ID)]
Metadata = Annotated[dict[str, Any], AfterValidator(_check_finite)]
"""A JSON object of the client's own, to be stored as it is."""
CountFromZero = Annotated[int, Field(ge=0, le=2**63 - 1)]


class StrictModel(BaseModel):
    """A JSON object of which every field is known. Numbers are not taken from texts."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TolerantModel(BaseModel):
    """A JSON object that only informs: fields that a newer SDK adds are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


def parse_json(model_cls: type[ModelT], body: bytes) -> ModelT:
    """The body as `model_cls`. Raises UserError naming the first wrong field and its value, NotBuiltError for parts not built."""
    try:
        return model_cls.model_validate_json(body)
    except ValidationError as error:
        raise _explained(error, "body") from error


def parse_query(model_cls: type[ModelT], values: Mapping[str, str]) -> ModelT:
    """The parameters of a URL as `model_cls`. Raises UserError naming the first wrong one and its value."""
    try:
        return model_cls.model_validate(values)
    except ValidationError as error:
        raise _explained(error, "query") from error


def _explained(error: ValidationError, whole: str) -> UserError:
    """What is wrong, from the first fault that was found; `whole` names what is wrong as a whole."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or whole
    return UserError(f"{field}: {first['msg']}, got {quoted(first['input'])}")
