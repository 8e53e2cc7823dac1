"""Declares settings, and reads and checks their values.

A setting is a field of a dataclass, made with `setting`; a section is such a dataclass, and may hold others. Pydantic
checks values; it is imported with the first, because `tinsmith --help` imports this module.
"""

import dataclasses
import difflib
import re
import shlex
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tinsmith.errors import ConfigError, translated

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


_PREFIX = "TINSMITH_"
_TESTS_PREFIX = "TINSMITH_TEST_"
"""Variables of tests are no settings."""
WRITTEN_BESIDE = ".writing-export-"
"""Prefix of a directory that an export fills, then renames."""


def require_empty(directory: Path) -> None:
    """Raise ConfigError unless a directory is new or empty, but for what exports have left."""
    if directory.is_symlink() and not directory.exists():
        raise ConfigError(
            f"{directory} is a link to {directory.readlink()}, which does not exist; make it, or name a new directory"
        )
    if directory.exists() and (
        not directory.is_dir() or any(not file.name.startswith(WRITTEN_BESIDE) for file in directory.iterdir())
    ):
        raise ConfigError(f"{directory} is not an empty directory; name a new one")


def installer(extra: str) -> str:
    """The command that installs an extra: of a clone, or else from the index."""
    clone = Path(__file__).parent.parent
    return (
        f"pip install -e '{clone}[{extra}]'"
        if (clone / "pyproject.toml").is_file()
        else f"pip install 'tinsmith[{extra}]'"
    )


@dataclass(frozen=True)
class SettingInfo:
    """Description of a setting beside name, type and default.

    `low` and `high` are inclusive. `choices` are the values of a text, or, with a `pattern` that matches them, only
    their description. `common` settings are those that `serve --help` shows.
    """

    help: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    pattern: str = ""
    common: bool = False


def setting(
    default: Any,
    help: str,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    pattern: str = "",
    common: bool = False,
) -> Any:
    """Declare a field with the arguments of `SettingInfo`."""
    metadata = {"info": SettingInfo(help, unit, low, high, choices, pattern, common)}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def read_yaml(file: Path) -> Mapping[str, Any]:
    """The tree in a YAML file. Raises ConfigError: unreadable, a key twice, or no keys."""
    import yaml  # here for the same reason as pydantic

    class Loader(yaml.SafeLoader):
        """PyYAML silently keeps the last of several equal keys."""

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

    def why_not(error: Exception) -> str:
        reason = " ".join(str(error).split())  # a YAML error spans several lines
        remedy = (
            "correct the path, or let this user read it" if isinstance(error, OSError) else "it must be YAML in UTF-8"
        )
        return f"cannot read the configuration file {file}: {reason}; {remedy}"

    with translated((OSError, UnicodeDecodeError, yaml.YAMLError), ConfigError, why_not):
        tree = yaml.load(file.read_text(encoding="utf-8"), Loader)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold sections such as 'server:', not a {type(tree).__name__}")
    return tree


def fill(root: Any, values: Mapping[str, Any], source: str) -> None:
    """Set fields of `root` and its sections from a tree of values; `source` names their origin.

    Raises ConfigError for an unknown key, a wrong type or a value outside its limits.
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
    """Advice on an unknown key: the most similar one of any section, or all of the section at `path`."""
    paths = list(_paths(root))
    similar = closest(name, {path[-1] for path in paths})
    found = [found for found in paths if found[-1] == similar]
    here = [found for found in found if found[:-1] == path] or found
    if here:
        return f"did you mean {' or '.join(repr('.'.join(path)) for path in here)}?"
    return f"known here: {', '.join(found[-1] for found in paths if found[:-1] == path)}"


def _paths(section: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key below a section, such as ("server", "port")."""
    for spec in dataclasses.fields(section):
        yield (*path, spec.name)
        value = getattr(section, spec.name)
        if dataclasses.is_dataclass(value):
            yield from _paths(value, (*path, spec.name))


def closest(name: str, known: set[str]) -> str | None:
    """The known name that a mistyped one probably means, if any."""
    return next(iter(difflib.get_close_matches(name, sorted(known), 1, cutoff=0.7)), None)


def checked(section: Any, name: str, value: Any, place: str) -> Any:
    """`value` as the type of field `name`; `place` names setting and source in messages.

    A text is read as a number where one is wanted; a size may carry a unit: `2`, `2.5`, `2GiB`. Raises ConfigError that
    says what is accepted.
    """
    from pydantic import ValidationError

    kind = typing.get_type_hints(type(section))[name]
    info: SettingInfo = next(spec.metadata["info"] for spec in dataclasses.fields(section) if spec.name == name)
    given = _in_unit(value, info.unit, kind) if isinstance(value, str) and kind in (int, float) else value
    with translated(ValidationError, ConfigError, lambda _: f"{place}={value!r} must be {_accepted(kind, info)}"):
        # Strict, so that true is no 1; but texts, such as those of environment variables, are converted.
        found = _adapter(kind, info).validate_python(given, strict=not isinstance(given, str))
    if kind == list[str]:
        return [at_home(text) for text in found]
    return at_home(found) if isinstance(found, str) else found


def at_home(text: str) -> str:
    """The text with the home directory for a leading `~/`, which shells replace only at an argument's beginning."""
    return str(Path(text).expanduser()) if re.match("~(/|$)", text) else text


@cache
def _adapter(kind: Any, info: SettingInfo) -> "TypeAdapter[Any]":
    from pydantic import AllowInfNan, Field, TypeAdapter

    pattern = info.pattern or "|".join(map(re.escape, info.choices))
    limits = [Field(ge=info.low, le=info.high, pattern=f"^({pattern})$" if pattern else None)]
    return TypeAdapter(Annotated[kind, *limits, *([AllowInfNan(False)] if kind is float else [])])


def _in_unit(text: str, unit: str, kind: type[int] | type[float]) -> str | float:
    """A size such as 1.5GiB in `unit`; any other text as it is."""
    units = {size.lower(): count for size, count in SIZES.items()}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    if match is None or unit not in SIZES or match[2] not in units:
        return text
    number = float(match[1]) * units[match[2]] / SIZES[unit]
    return int(number) if kind is int and number.is_integer() else number


def _accepted(kind: Any, info: SettingInfo) -> str:
    """The accepted values: "a whole number of MiB from 1 to 4096, such as 2, 2MiB or 500MiB"."""
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else info.choices
    if choices:
        return f"one of {', '.join(choices)}"
    if kind not in (int, float):
        words = {
            bool: "true or false",
            str: "a text",
            list[str]: "a list of texts",
            list[int]: "a list of whole numbers",
        }
        return words.get(kind, "keys with values")
    number = f"{'a whole number' if kind is int else 'a number'}{f' of {info.unit}' if info.unit else ''}"
    if info.low is not None:
        number += f" from {info.low} to {info.high}" if info.high is not None else f" of at least {info.low}"
    return (
        f"{number}, such as 2, 2{info.unit} or {'1MiB' if info.unit == 'KiB' else '500MiB'}"
        if info.unit in SIZES
        else number
    )


@dataclass(frozen=True)
class Setting:
    """A setting. `path` is ("sampling", "kv_cache_gib"), whose last part is unique."""

    path: tuple[str, ...]
    type: Any
    default: Any
    info: SettingInfo

    @property
    def name(self) -> str:
        """Such as "kv_cache_gib"."""
        return self.path[-1]

    @property
    def accepted(self) -> str:
        """A word for the value in help: the choices, or NUMBER or TEXT; empty for a switch."""
        if self.info.choices:
            return "|".join(choice.partition(" ")[0] for choice in self.info.choices)
        return "" if self.type is bool else "NUMBER" if self.type in (int, float) else "TEXT"

    @property
    def described(self) -> str:
        """The help with unit and default."""
        default = "" if self.default in ("", []) else f"default: {self.default}"
        notes = ", ".join(note for note in (self.info.unit, default) if note)
        return f"{self.info.help} [{notes}]" if notes else self.info.help

    @property
    def option(self) -> str:
        """Such as "--kv-cache-gib"; in the singular if repeating it fills a list."""
        name = re.sub("ies$", "y", self.name).removesuffix("s") if typing.get_origin(self.type) is list else self.name
        return f"--{name.replace('_', '-')}"

    @property
    def refused(self) -> str:
        """Such as "--no-stand-by", of a switch that is on; else empty."""
        return f"--no-{self.option[2:]}" if self.default is True else ""

    @property
    def variable(self) -> str:
        return f"{_PREFIX}{self.name.upper()}"


def settings_of(section: Any, path: tuple[str, ...] = ()) -> Iterator[Setting]:
    """All settings below a section with their values, in order."""
    hints = typing.get_type_hints(type(section))
    for spec in dataclasses.fields(section):
        value = getattr(section, spec.name)
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, (*path, spec.name))
        else:
            yield Setting((*path, spec.name), hints[spec.name], value, spec.metadata["info"])


def fill_from_environment(config: Any, environment: Mapping[str, str]) -> None:
    """Set what environment variables say. Raises ConfigError as `fill`, and for unknown ones."""
    variables = {each.variable: each for each in settings_of(config)}
    for variable, text in environment.items():
        if not text or not variable.startswith(_PREFIX) or variable.startswith(_TESTS_PREFIX):
            continue
        if variable not in variables:
            raise ConfigError(f"environment: unknown variable {variable}; {_variable_remedy(variable, set(variables))}")
        setting = variables[variable]
        value = _words(text, variable) if typing.get_origin(setting.type) is list else text
        put(config, setting, value, f"environment: {variable}")


def _variable_remedy(variable: str, known: set[str]) -> str:
    names = {name.removeprefix(_PREFIX) for name in known}
    similar = closest(variable.removeprefix(_PREFIX), names)
    if similar:
        return f"did you mean {_PREFIX}{similar}?"
    return f"unset it, or name it after a setting, such as {_PREFIX}PORT; `tinsmith serve --help-all` lists them"


def _words(text: str, variable: str) -> list[str]:
    must = f"environment: {variable}={text!r} must be texts separated by spaces and quoted as in a shell"
    with translated(ValueError, ConfigError, lambda error: f"{must}: {error}"):
        return shlex.split(text)


def put(config: Any, where: Setting, value: Any, place: str) -> None:
    """Set one setting. `place` says where its value stands."""
    section: Any = config
    for part in where.path[:-1]:
        section = getattr(section, part)
    setattr(section, where.name, checked(section, where.name, value, place))


def base_model_source(spec: str) -> tuple[str, str]:
    """Name and source of a base model given as [NAME=]PATH_OR_HUB_ID. Raises ConfigError."""
    name, separator, source = spec.partition("=")  # a path may contain others
    if not separator or re.match(r"[/~.]", spec) or Path(spec).is_dir():
        name, separator, source = "", "", spec
    if separator and not re.fullmatch(r"[^\s:]+", name):
        raise ConfigError(f"base_models: {spec!r} must have a name without spaces and colons before its '='")
    directory = Path(at_home(source))
    if source and directory.is_dir():
        source = str(directory.resolve())
        if not (directory / "config.json").is_file():
            raise ConfigError(f"base_models: {spec!r}: {source} holds no model (there is no config.json in it)")
    # For one word the Hub would be asked a minute: mostly it is a served name
    elif not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        missing = f"{source!r} is a file" if directory.is_file() else f"there is no directory {source!r}"
        served = (
            ""
            if "/" in source
            else f"; if it is the name of a served model, say where that is: {name or source}=PATH_OR_HUB_ID"
        )
        raise ConfigError(f"base_models: {spec!r}: {missing}, and a Hub id looks like ORGANISATION/MODEL{served}")
    return name or source, source
