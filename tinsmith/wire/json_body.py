"""How JSON bodies and the parameters of URLs are read: unknown fields, wrong types and impossible values are refused."""

from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tinsmith.errors import UserError

MAX_SEQ_ID = 2**31 - 1
"""The protobuf requests carry seq_id as int32, so no training operation can have a larger one."""

_SHOWN_CHARACTERS = 120

ModelT = TypeVar("ModelT", bound=BaseModel)
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
SeqId = Annotated[int, Field(ge=1, le=MAX_SEQ_ID)]
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
    shown = repr(first["input"])
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[:_SHOWN_CHARACTERS] + "..."
    return UserError(f"{field}: {first['msg']}, got {shown}")
