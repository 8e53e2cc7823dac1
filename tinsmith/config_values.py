"""Settings as fields of dataclasses: declared with `knob`, read from a YAML file or the command line, and checked or refused.

A text is taken for a number where a number is wanted, and for sizes it may carry its unit: `2`, `2.5`, `2GiB`, `500MiB`.
"""

import dataclasses
import re
import typing
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from tinsmith.errors import ConfigError

_SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""Bytes of the units that a size may carry."""


def knob(
    default: Any,
    help: str,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    pattern: str = "",
) -> Any:
    """One documented configuration field. `low` and `high` are inclusive limits of a number; `choices` those of a text.

    Where the choices are too many to list, `pattern` is a regular expression of all, and `choices` what a message says of them.
    """
    metadata = {"help": help, "unit": unit, "low": low, "high": high, "choices": choices, "pattern": pattern}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def read_yaml(file: Path) -> Mapping[str, Any]:
    """The tree in a YAML file. Raises ConfigError: unreadable, or no tree."""
    import yaml  # here, because `tinsmith --help` imports this module

    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())  # a YAML error spans several lines
        raise ConfigError(f"cannot read the configuration file {file}: {reason}; it must be YAML in UTF-8") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold sections such as 'server:', not a {type(tree).__name__}")
    return tree


def fill(section: Any, values: Mapping[str, Any], source: str) -> None:
    """Set the fields of a section, and of the sections in it, from `values`; `source` names in messages where they come from.

    Raises ConfigError: unknown key, wrong type or value out of its limits.
    """
    specs = {spec.name: spec for spec in dataclasses.fields(section)}
    hints = typing.get_type_hints(type(section))
    for name, value in values.items():
        if name not in specs:
            raise ConfigError(f"{source}: unknown key {name!r}; known here: {', '.join(specs)}")
        current = getattr(section, name)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{source}: {name} is a section and must hold keys, got {value!r}")
            fill(current, value, f"{source}: {name}")
        else:
            setattr(section, name, checked(name, value, hints[name], specs[name].metadata, source))


def checked(name: str, value: Any, kind: Any, limits: Mapping[str, Any], source: str) -> Any:
    """The value of setting `name`, of the type `kind`. `limits` are the metadata of its field; `source` says where the value comes from.

    Raises ConfigError naming source, setting, value and what would be accepted.
    """
    if typing.get_origin(kind) is list:
        (item_kind,) = typing.get_args(kind)
        if not isinstance(value, list) or not all(isinstance(item, item_kind) for item in value):
            raise ConfigError(f"{source}: {name} must be a list of {'texts' if item_kind is str else 'numbers'}, got {value!r}")
        return value
    if typing.get_origin(kind) is typing.Literal:
        if value not in typing.get_args(kind):
            raise ConfigError(f"{source}: {name}={value!r} must be one of {', '.join(typing.get_args(kind))}")
        return value
    if typing.get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{source}: {name} must hold keys, got {value!r}")
        return value
    return _checked_scalar(name, value, kind, limits, source)


def _checked_scalar(name: str, value: Any, kind: Any, limits: Mapping[str, Any], source: str) -> Any:
    if kind in (int, float):
        value = _number(name, value, kind, limits["unit"], source)
    elif not isinstance(value, kind):
        raise ConfigError(f"{source}: {name} must be {'true or false' if kind is bool else 'a text'}, got {value!r}")
    low, high, choices = limits["low"], limits["high"], limits["choices"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        raise ConfigError(f"{source}: {name}={value!r} must lie between {low} and {'any number' if high is None else high}")
    if choices and not re.fullmatch(limits["pattern"] or "|".join(map(re.escape, choices)), value):
        raise ConfigError(f"{source}: {name}={value!r} must be one of {', '.join(choices)}")
    return value


def _number(name: str, value: Any, kind: type[int] | type[float], unit: str, source: str) -> float:
    """The value as a number in the unit of its setting."""
    number = _read(value, unit) if isinstance(value, str) else value
    if isinstance(value, str) and kind is int and isinstance(number, float) and number.is_integer():
        number = int(number)  # 1.5GiB, where MiB are counted
    if isinstance(number, bool) or not isinstance(number, int if kind is int else int | float):
        what = f"a {'whole ' if kind is int else ''}number{f' of {unit}' if unit else ''}"
        example = f", such as 2, 2{unit} or 500{'KiB' if unit == 'KiB' else 'MiB'}" if unit in _SIZES else ""
        raise ConfigError(f"{source}: {name} must be {what}{example}, got {value!r}")
    return kind(number)


def _read(text: str, unit: str) -> float | None:
    """The number in a text; None if there is none, or one of another unit."""
    match = re.fullmatch(r"([+-]?[\d.]+(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None:
        return None
    digits, suffix = match.groups()
    try:
        number = int(digits) if re.fullmatch(r"[+-]?\d+", digits) else float(digits)
    except ValueError:  # two points
        return None
    if not suffix:
        return number
    named = {size.lower(): count for size, count in _SIZES.items()}
    if unit not in _SIZES or suffix.lower() not in named:
        return None
    return number * named[suffix.lower()] / _SIZES[unit]
