"""Declares settings, and reads and checks their values.

A setting is a field of a dataclass, made with `setting`. A section is such a dataclass, and may hold other sections. `fill` puts the values
of a YAML file, of environment variables or of the command line into a section. Pydantic checks types and limits; it is imported when the
first value is checked, because `tinsmith --help` imports this module.
"""

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""Bytes of each unit in which a size may be written."""


WRITTEN_BESIDE = ".writing-export-"
"""Prefix of the directory that an export fills before it is renamed to its target."""


def require_empty(directory: Path) -> None:
    """Raise ConfigError unless a directory to write to is empty but for what exports have left, or does not exist yet."""
    if directory.is_symlink() and not directory.exists():
        raise ConfigError(f"{directory} is a link to {directory.readlink()}, which does not exist; make it, or name a new directory")
    if directory.exists() and (not directory.is_dir() or any(not file.name.startswith(WRITTEN_BESIDE) for file in directory.iterdir())):
        raise ConfigError(f"{directory} is not an empty directory; name a new one")


def installer(extra: str) -> str:
    """The command that adds the packages of an extra. In a clone it names the clone: no package index need have this version."""
    clone = Path(__file__).parent.parent
    return f"pip install -e '{clone}[{extra}]'" if (clone / "pyproject.toml").is_file() else f"pip install 'tinsmith[{extra}]'"


@dataclass(frozen=True)
class SettingInfo:
    """Description of a setting beside its name, type and default.

    `low` and `high` are the limits of a number, both included. `choices` are the values that a text may take. Where there are too many to
    list, `pattern` is a regular expression for all of them, and `choices` only describes them in messages.
    """

    help: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    pattern: str = ""


def setting(
    default: Any,
    help: str,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    pattern: str = "",
) -> Any:
    """Declare a field of a section as a setting. The arguments are those of `SettingInfo`."""
    metadata = {"info": SettingInfo(help, unit, low, high, choices, pattern)}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def read_yaml(file: Path) -> Mapping[str, Any]:
    """The tree in a YAML file.

    Raises ConfigError if the file cannot be read, is not YAML, has a key twice, or holds something else than keys.
    """
    import yaml  # here for the same reason as pydantic

    class Loader(yaml.SafeLoader):
        """PyYAML keeps the last of several equal keys, and drops the others without a word."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # before `<<` merges others into it
            node = super().compose_mapping_node(anchor)
            places: dict[str, int] = {}
            for key_node, _ in node.value:
                if isinstance(key_node, yaml.ScalarNode):
                    line, key = key_node.start_mark.line + 1, key_node.value
                    if key in places:
                        again = f"line {line} has the key {key!r} of line {places[key]} again"
                        raise yaml.YAMLError(f"{again}; merge what stands below the two")
                    places[key] = line
            return node

    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())  # a YAML error spans several lines
        raise ConfigError(f"cannot read the configuration file {file}: {reason}; it must be YAML in UTF-8") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold sections such as 'server:', not a {type(tree).__name__}")
    return tree


def fill(root: Any, values: Mapping[str, Any], source: str) -> None:
    """Set the fields of the section `root` and of the sections in it from a tree of values. `source` names in messages where it comes from.

    Raises ConfigError for an unknown key, a value of the wrong type, and a value outside its limits.
    """
    _fill(root, root, (), values, source)


def _fill(root: Any, section: Any, path: tuple[str, ...], values: Mapping[str, Any], source: str) -> None:
    names = {spec.name for spec in dataclasses.fields(section)}
    for name, value in values.items():
        dotted = ".".join((*path, str(name)))
        if name not in names:
            raise ConfigError(f"{source}: unknown key {dotted!r}; {_remedy(str(name), root, path)}")
        current = getattr(section, name)
        if not dataclasses.is_dataclass(current):
            setattr(section, name, checked(section, name, value, f"{source}: {dotted}"))
        elif isinstance(value, Mapping):
            _fill(root, current, (*path, name), value, source)
        else:
            raise ConfigError(f"{source}: {dotted}={value!r} must be a section, with keys and values below it")


def _remedy(name: str, root: Any, path: tuple[str, ...]) -> str:
    """Advice on an unknown key in the section at `path`: the most similar key of any section, or else all keys of this section."""
    paths = list(_paths(root))
    similar = closest(name, {path[-1] for path in paths})
    found = [found for found in paths if found[-1] == similar]
    here = [found for found in found if found[:-1] == path] or found
    if here:
        return f"did you mean {' or '.join(repr('.'.join(path)) for path in here)}?"
    return f"known here: {', '.join(found[-1] for found in paths if found[:-1] == path)}"


def _paths(section: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key in a section and in the sections in it: ("server",), ("server", "port")."""
    for spec in dataclasses.fields(section):
        yield (*path, spec.name)
        value = getattr(section, spec.name)
        if dataclasses.is_dataclass(value):
            yield from _paths(value, (*path, spec.name))


def closest(name: str, known: set[str]) -> str | None:
    """The name among those known that a mistyped one probably stands for, if there is one."""
    return next(iter(difflib.get_close_matches(name, sorted(known), 1, cutoff=0.7)), None)


def checked(section: Any, name: str, value: Any, place: str) -> Any:
    """`value` as the type of field `name` of a section. `place` says in messages which setting it is and where its value stands.

    A text is read as a number where a number is wanted, and a size may carry its unit: `2`, `2.5`, `2GiB`, `500MiB`.
    Raises ConfigError that names the place, the value and what would be accepted.
    """
    from pydantic import ValidationError

    kind = typing.get_type_hints(type(section))[name]
    info: SettingInfo = next(spec.metadata["info"] for spec in dataclasses.fields(section) if spec.name == name)
    given = _in_unit(value, info.unit, kind) if isinstance(value, str) and kind in (int, float) else value
    try:
        # Strict, so that true is no 1; but texts, such as those of environment variables, are converted.
        found = _adapter(kind, info).validate_python(given, strict=not isinstance(given, str))
    except ValidationError:
        raise ConfigError(f"{place}={value!r} must be {_accepted(kind, info)}") from None
    if kind == list[str]:
        return [at_home(text) for text in found]
    return at_home(found) if isinstance(found, str) else found


def at_home(text: str) -> str:
    """The text with a leading `~/` replaced by the home directory: shells do so only at the beginning of an argument."""
    return str(Path(text).expanduser()) if re.match("~(/|$)", text) else text


@cache
def _adapter(kind: Any, info: SettingInfo) -> "TypeAdapter[Any]":
    from pydantic import AllowInfNan, Field, TypeAdapter

    pattern = info.pattern or "|".join(map(re.escape, info.choices))
    limits = [Field(ge=info.low, le=info.high, pattern=f"^({pattern})$" if pattern else None)]
    return TypeAdapter(Annotated[kind, *limits, *([AllowInfNan(False)] if kind is float else [])])


def _in_unit(text: str, unit: str, kind: type[int] | type[float]) -> str | float:
    """A size that carries its unit, such as 1.5GiB, as a number of `unit`. Any other text is returned as it is."""
    units = {size.lower(): count for size, count in _SIZES.items()}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    if match is None or unit not in _SIZES or match[2] not in units:
        return text
    number = float(match[1]) * units[match[2]] / _SIZES[unit]
    return int(number) if kind is int and number.is_integer() else number


def _accepted(kind: Any, info: SettingInfo) -> str:
    """Describe the values that a setting accepts: "a whole number of MiB from 1 to 4096, such as 2, 2MiB or 500MiB"."""
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else info.choices
    if choices:
        return f"one of {', '.join(choices)}"
    if kind not in (int, float):
        words = {bool: "true or false", str: "a text", list[str]: "a list of texts", list[int]: "a list of whole numbers"}
        return words.get(kind, "keys with values")
    number = f"{'a whole number' if kind is int else 'a number'}{f' of {info.unit}' if info.unit else ''}"
    if info.low is not None:
        number += f" from {info.low} to {info.high}" if info.high is not None else f" of at least {info.low}"
    return f"{number}, such as 2, 2{info.unit} or {'1MiB' if info.unit == 'KiB' else '500MiB'}" if info.unit in _SIZES else number
