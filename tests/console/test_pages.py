"""Every page in a real browser: in both themes, at the width of a phone, with data and without."""

from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from tests.console.conftest import PHONE, WIDE, Looking
from tests.running import Server

PAGES = ("/", "/samples", "/playground")
"""Pages that need nothing to be there."""
LOOKS = [("light", WIDE), ("dark", WIDE), ("dark", PHONE)]


@pytest.mark.parametrize(("theme", "window"), LOOKS)
@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_shown_with_data(look: Looking, path: str, theme: Any, window: tuple[int, int]) -> None:
    with look.at(path, theme, window) as page:
        expect(page.locator("main h1")).to_be_attached()


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_shown_where_nothing_has_happened(look_at_empty: Looking, path: str) -> None:
    with look_at_empty.at(path, window=PHONE) as page:
        expect(page.locator("main h1")).to_be_attached()


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_json_too(server: Server, path: str) -> None:
    place = f"{server.url}{'/overview' if path == '/' else path}.json"
    reply = httpx.get(place)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert isinstance(reply.json(), dict)
