"""The site that `make docs` makes: strict, complete, and without a word to other hosts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from tests.running import START_S
from tinsmith.cli import app
from tinsmith.config import settings

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; a link or an anchor that leads nowhere ends its making."""
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        timeout=START_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return target


def test_every_page_is_in_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    made = {path.relative_to(site) for path in site.rglob("*.html")}
    assert pages <= made
    assert {Path(name) for name in ("index.html", "contributing.html", "changelog.html", "benchmarks.html")} <= made


def test_pictures_are_where_pages_look_for_them(site: Path) -> None:
    shown = [
        (page, picture)
        for page in site.rglob("*.html")
        for picture in re.findall(r'<(?:img|source)\b[^>]*\b(?:src|srcset)="?([^"> ]+)', page.read_text())
    ]
    assert len(shown) > 5
    assert [(page.name, picture) for page, picture in shown if not (page.parent / picture).is_file()] == []


def test_the_reference_has_all_there_is(site: Path) -> None:
    def page(name: str) -> str:
        return (site / "reference" / f"{name}.html").read_text()

    group = typer.main.get_group(app)
    inner = {f"{name} {key}" for name, each in group.commands.items() for key in getattr(each, "commands", {})}
    outer = {name for name, each in group.commands.items() if not hasattr(each, "commands")}
    for words in inner | outer:
        assert f"tinsmith {words}" in page("commands")
    for setting in settings():
        assert f"<code>{setting.option}</code> <code>{setting.variable}</code>" in page("settings")
    assert "POST /api/v1/forward_backward" in page("http")
    assert len(re.findall("<h2", page("http"))) > 50
    assert "tinsmith_operation_seconds" in page("metrics")
    assert "<td><code>BackpressureError</code></td>\n<td>429</td>" in page("errors")
    assert "tinsmith_rl.env" in page("python")


def test_a_reader_fetches_nothing_from_elsewhere(site: Path) -> None:
    """Links may lead to other sites; what a page loads may not."""
    loads = re.compile(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="?(?:https?:)?//[^"> ]+')
    found = [match for file in site.rglob("*.html") for match in loads.findall(file.read_text())]
    assert found == []
    assert "fonts.g" not in "".join(file.read_text() for file in site.rglob("*.css"))
