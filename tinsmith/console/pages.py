"""Templates of the console, and the files that its pages load.

All text is escaped, an unknown name in a template is an error, and scripts and styles are files: the pages' security
policy allows no others.
"""

import gzip
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tinsmith.console.charts import line, stacked
from tinsmith.console.phases import ORDER

_HERE = Path(__file__).parent
STATIC = "/static/"
"""Beginning of the paths of files."""
POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
"""The Content-Security-Policy of every page: nothing is loaded from elsewhere, and no script or style is inline."""
NAVIGATION = (
    ("/", "Overview"),
    ("/runs", "Runs"),
    ("/samples", "Samples"),
    ("/rollouts", "Rollouts"),
    ("/playground", "Playground"),
    ("/operations", "Operations"),
    ("/settings", "Settings"),
)
"""Paths and titles in the head of every page."""
LIVE_BLOCK = "live_"
"""Prefix of the blocks of a template that are sent anew when they change."""
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".md": "text/markdown"}
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


@dataclass(frozen=True)
class StaticFile:
    """A file that pages load."""

    content: bytes
    packed: bytes
    """The content, compressed with gzip."""
    media_type: str
    version: str
    """The beginning of its hash, which is part of its URL: it may be cached for ever."""


@cache
def static_files() -> dict[str, StaticFile]:
    """Return the files by their names."""
    return {path.name: _read(path) for path in sorted((_HERE / "static").iterdir())}


def _read(path: Path) -> StaticFile:
    content = path.read_bytes()
    version = hashlib.sha256(content).hexdigest()[:12]
    return StaticFile(content, gzip.compress(content, mtime=0), _TYPES[path.suffix], version)


def static_url(name: str) -> str:
    """Return the URL of a file, which changes with its content."""
    return f"{STATIC}{name}?v={static_files()[name].version}"


# ---- Values as people read them


def short(model_id: str) -> str:
    """Shorten the id of a model or session to what tells it apart: `1b9d6bcd-…:train:0` becomes `1b9d6bcd:0`."""
    session, _, number = model_id.partition(":")
    return f"{session[:8]}:{number.rpartition(':')[2]}" if number else session[:8]


def ago(at: float | None, now: float | None = None) -> str:
    """Say how long ago a Unix time was, or how far ahead it lies. It changes once a minute at most."""
    if at is None:
        return "never"
    seconds = (time.time() if now is None else now) - at
    size = abs(seconds)
    if size < _MINUTE_S:
        return "just now" if seconds >= 0 else "in a moment"
    unit, name = next(
        (unit, name)
        for unit, name in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min"))
        if size >= (2 * unit if unit > _MINUTE_S else unit)
    )
    return f"{size / unit:.0f} {name} ago" if seconds >= 0 else f"in {size / unit:.0f} {name}"


def when(at: float | None) -> Markup:
    """Return a `<time>` that shows how long ago it was, and the time itself when it is pointed at."""
    if at is None:
        return Markup("never")
    exact = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    machine = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(machine, exact, ago(at))


def duration(seconds: float | None) -> str:
    """Return seconds in a unit that suits them: `340 ms`, `2.1 s`, `3 min 20 s`, `5 h 2 min`."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < _MINUTE_S:
        return f"{seconds:.1f} s"
    if seconds < _HOUR_S:
        return f"{seconds // _MINUTE_S:.0f} min {seconds % _MINUTE_S:.0f} s"
    if seconds < 2 * _DAY_S:
        return f"{seconds // _HOUR_S:.0f} h {seconds % _HOUR_S // _MINUTE_S:.0f} min"
    return f"{seconds / _DAY_S:.0f} d"


def size(count: float | None) -> str:
    """Return a number of bytes with a binary unit."""
    if count is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with so many significant digits, and a thousands separator."""
    if value is None:
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    """Return a share of 1 as a percentage."""
    return "–" if share is None else f"{share:.0%}"


def plain(value: Any) -> str:
    """Return a value of a configuration as people write it."""
    if value is None:
        return "–"
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def live(name: str) -> Markup:
    """Return the attributes of an element whose content is the block `live_NAME`, which changes while one looks."""
    return Markup('sse-swap="{}" hx-swap="morph:innerHTML"').format(name)


# ---- Templates


@dataclass(frozen=True)
class Viewer:
    """The person who looks at a page, and the page's address."""

    path: str
    """Path of the page, without its query."""
    query: str
    tenant: str
    role: str
    has_keys: bool
    """Whether the server asks for keys; else nobody logs in or out."""


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ago": ago,
        "duration": duration,
        "number": number,
        "percent": percent,
        "plain": plain,
        "short": short,
        "size": size,
        "when": when,
    }
    environment.globals |= {
        "line": line,
        "live": live,
        "has_playground": True,
        "navigation": NAVIGATION,
        "order": ORDER,
        "stacked": stacked,
        "static": static_url,
    }
    for name in ("parts", "curves"):
        environment.globals[name] = environment.get_template(f"{name}.html.jinja").module
    return environment


def render(template: str, data: Mapping[str, Any], viewer: Viewer) -> str:
    """Return a page."""
    return _environment().get_template(template).render(data, viewer=viewer, page_live=is_live(template))


def render_live(template: str, data: Mapping[str, Any], viewer: Viewer) -> dict[str, str]:
    """Return the content of each block of a page that changes while one looks, by its name behind `live_`."""
    found = _environment().get_template(template)
    context = found.new_context({**data, "viewer": viewer})
    return {
        name.removeprefix(LIVE_BLOCK): "".join(block(context))
        for name, block in found.blocks.items()
        if name.startswith(LIVE_BLOCK)
    }


def is_live(template: str) -> bool:
    """Whether a template has blocks that change while one looks."""
    return any(name.startswith(LIVE_BLOCK) for name in _environment().get_template(template).blocks)
