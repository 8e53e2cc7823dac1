"""Declares settings, and reads and checks their values.

A section is a dataclass whose fields are made with `setting`; a configuration is a dataclass of sections. Pydantic
checks types and limits. It is imported when the first value is checked, because the processes of environments import
this module too.
"""

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tinsmith_rl.errors import ConfigError, translated

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@dataclass(frozen=True)
class SettingInfo:
    """Description of a setting beside its name, type and default. `low` and `high` are inclusive."""

    help: str
    unit: str = ""
    low: float | None = None
    high: float | None = None


def setting(default: Any, help: str, unit: str = "", low: float | None = None, high: float | None = None) -> Any:
    """Declare a field of a section, with the arguments of `SettingInfo`."""
    metadata = {"info": SettingInfo(help, unit, low, high)}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def read_yaml(file: Path) -> Mapping[str, Any]:
    """The tree in a YAML file. Raises ConfigError if it cannot be read, has a key twice, or holds no keys."""
    import yaml  # here for the same reason as pydantic

    class Loader(yaml.SafeLoader):
        """PyYAML silently keeps the last of several equal keys."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # before `<<` merges others into it
            node = super().compose_mapping_node(anchor)
            places: dict[str, int] = {}
            for key_node in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                line, key = key_node.start_mark.line + 1, key_node.value
                if key in places:
                    raise yaml.YAMLError(
                        f"line {line} has the key {key!r} of line {places[key]} again; merge what stands below the two"
                    )
                places[key] = line
            return node

    def unread(error: Exception) -> ConfigError:
        reason = " ".join(str(error).split())  # a YAML error spans several lines
        missing = isinstance(error, OSError)
        remedy = "correct the path, or let this user read it" if missing else "it must be YAML in UTF-8"
        return ConfigError(f"cannot read the configuration file {file}: {reason}; {remedy}")

    with translated((OSError, UnicodeDecodeError, yaml.YAMLError), unread):
        tree = yaml.load(file.read_text(encoding="utf-8"), Loader)
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{file} must hold sections such as 'server:', not a {type(tree).__name__}")
    return tree or {}


def fill(config: Any, tree: Mapping[str, Any], source: str) -> None:
    """Set settings of a configuration from a tree {section: {key: value}} that comes from `source`.

    Raises ConfigError for an unknown section or key, and a value of the wrong type or outside its limits.
    """
    known = {
        section.name: [spec.name for spec in dataclasses.fields(getattr(config, section.name))]
        for section in dataclasses.fields(config)
    }
    for section, values in tree.items():
        if section not in known:
            raise ConfigError(f"{source}: unknown key {str(section)!r}; {_remedy(str(section), '', known)}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source}: {section}={values!r} must be a section, with keys and values below it")
        for key, value in values.items():
            place = f"{section}.{key}"
            if key not in known[section]:
                raise ConfigError(f"{source}: unknown key {place!r}; {_remedy(str(key), section, known)}")
            setattr(getattr(config, section), key, _checked(getattr(config, section), key, value, f"{source}: {place}"))


def _remedy(name: str, section: str, known: Mapping[str, list[str]]) -> str:
    """Advice on an unknown key: the most similar section or key, or else all that are known in its place."""
    places = {each: [each] for each in known}
    for other, keys in known.items():
        for key in keys:
            places.setdefault(key, []).append(f"{other}.{key}")
    for similar in difflib.get_close_matches(name, sorted(places), 1, cutoff=0.7):
        here = f"{section}.{similar}" if section else similar
        return f"did you mean {' or '.join(map(repr, [here] if here in places[similar] else places[similar]))}?"
    return f"known here: {', '.join(known[section] if section else known)}"


def _checked(section: Any, key: str, value: Any, place: str) -> Any:
    """`value` as the type of a field. A text is read as a number where one is wanted: YAML takes 1e-4 for a text."""
    from pydantic import ValidationError

    kind = typing.get_type_hints(type(section))[key]
    info: SettingInfo = next(spec.metadata["info"] for spec in dataclasses.fields(section) if spec.name == key)
    with translated(ValidationError, lambda _: ConfigError(f"{place}={value!r} must be {_accepted(kind, info)}")):
        # Strict, so that true is no 1
        found = _adapter(kind, info).validate_python(value, strict=not isinstance(value, str))
    return (
        at_home(found) if isinstance(found, str) else [at_home(text) for text in found] if kind == list[str] else found
    )


def _adapter(kind: Any, info: SettingInfo) -> "TypeAdapter[Any]":
    from pydantic import AllowInfNan, Field, TypeAdapter

    limits = [Field(ge=info.low, le=info.high)]
    return TypeAdapter(Annotated[kind, *limits, *([AllowInfNan(False)] if kind is float else [])])


def at_home(text: str) -> str:
    """The text with the home directory for a leading `~/`."""
    return str(Path(text).expanduser()) if text == "~" or text.startswith("~/") else text


def _accepted(kind: Any, info: SettingInfo) -> str:
    """The accepted values, such as "a whole number of steps of at least 1"."""
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(typing.get_args(kind))}"
    if kind not in (int, float):
        words = {
            bool: "true or false",
            str: "a text",
            list[str]: "a list of texts",
            list[int]: "a list of whole numbers",
        }
        return words.get(kind, "keys with values")
    number = f"{'a whole number' if kind is int else 'a number'}{f' of {info.unit}' if info.unit else ''}"
    if info.low is None:
        return number
    return number + (f" of at least {info.low}" if info.high is None else f" from {info.low} to {info.high}")
