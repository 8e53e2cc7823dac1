"""The tensors of a part of the decoder, whatever it consists of: walked through in one order, replaced by others, and by their names."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from torch import Tensor

from tinsmith.models.decoder import DeltaBlock, Norm
from tinsmith.models.joined_linear import JoinedLinear

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


def parameters_of(part: Any) -> dict[str, Tensor]:
    """The parameters of a part of a base model, by their names inside the language model: what `with_weights` takes.

    A linear that has no bias gets rows of zeros if one that is computed with it has a bias.
    """
    if isinstance(part, JoinedLinear):
        found = {}
        for module, (start, end) in zip(part.projection.modules, part.rows, strict=True):
            found[f"{module}.weight"] = part.weight[start:end]
            if part.bias is not None:
                found[f"{module}.bias"] = part.bias[start:end]
        return found
    if isinstance(part, Norm):
        return {part.name: part.weight}
    if isinstance(part, DeltaBlock):
        own = dict(zip(part.names, part.parameters, strict=True))
        return own | parameters_of(part.projection) | parameters_of(part.output)
    inside: tuple[Any, ...] = ()
    if isinstance(part, tuple):
        inside = part
    elif is_dataclass(part) and not isinstance(part, type):
        inside = tuple(getattr(part, field.name) for field in fields(part))
    return {name: tensor for each in inside for name, tensor in parameters_of(each).items()}


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
