"""The tensors of a part of the decoder, whatever it consists of: walked through in one order, and replaced by others."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from torch import Tensor

P = TypeVar("P")


def with_tensors(part: P, change: Callable[[Tensor], Tensor]) -> P:
    """The same part with what `change` makes of each of its tensors, which is called for them in a fixed order.

    Parts are dataclasses and tuples of parts and tensors; everything else stays as it is.
    """
    return cast(P, _changed(part, change))


def tensors_of(part: object) -> list[Tensor]:
    """The tensors of the part, in the order of `with_tensors`."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with_tensors(part, note)
    return found


def _changed(part: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(part, Tensor):
        return change(part)
    if isinstance(part, tuple):
        found = [_changed(each, change) for each in part]
        if all(new is old for new, old in zip(found, part, strict=True)):
            return part
        return type(part)(*found) if hasattr(part, "_fields") else tuple(found)
    if is_dataclass(part) and not isinstance(part, type):
        own = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
        changed = {name: _changed(value, change) for name, value in own.items()}
        return part if all(changed[name] is value for name, value in own.items()) else replace(part, **changed)
    return part
