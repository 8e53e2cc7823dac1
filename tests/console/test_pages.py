"""Every page in a real browser: in both themes, at the width of a phone, with data and without."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.console.conftest import PHONE, WIDE, Looking, connect, new_model, step
from tests.console.hostile import HOSTILE
from tests.running import Server, serving, tinsmith_here

PAGES = (
    *("/", "/runs", "/operations", "/operations?status=failed", "/settings"),
    *("/samples", "/playground"),
)
"""Pages that need nothing to be there."""
OF_A_RUN = ("/runs/{run}", "/runs/{run}/batches", "/runs?compare={run}&smooth=0.9", "/operations/{run}/1")
LOOKS = [("light", WIDE), ("dark", WIDE), ("dark", PHONE)]


@pytest.fixture(scope="session")
def run(server: Server) -> str:
    """The id of the run that has trained."""
    found: str = httpx.get(f"{server.url}/runs.json").json()["runs"][-1]["model_id"]
    return found


@pytest.mark.parametrize(("theme", "window"), LOOKS)
@pytest.mark.parametrize("path", [*PAGES, *OF_A_RUN])
def test_a_page_is_shown_with_data(look: Looking, run: str, path: str, theme: Any, window: tuple[int, int]) -> None:
    with look.at(path.replace("{run}", run), theme, window) as page:
        expect(page.locator("main h1")).to_be_attached()
        if ("batches" not in path and "runs/" in path) or "compare" in path:
            expect(page.locator("[data-metric='loss:sum'] canvas")).to_be_visible()


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_shown_where_nothing_has_happened(look_at_empty: Looking, path: str) -> None:
    with look_at_empty.at(path, window=PHONE) as page:
        expect(page.locator("main h1")).to_be_attached()


@pytest.mark.parametrize("path", [*PAGES, *OF_A_RUN])
def test_a_page_is_json_too(server: Server, run: str, path: str) -> None:
    place, question, query = path.replace("{run}", run).partition("?")
    reply = httpx.get(f"{server.url}{'/overview' if place == '/' else place}.json{question}{query}")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert isinstance(reply.json(), dict)


def test_hostile_text_is_shown_as_text(look: Looking, run: str) -> None:
    """Wherever a client can put some: metadata, errors, tokens. `judge` sees that none was obeyed."""
    for path in (f"/runs/{run}", "/runs", "/operations?status=failed", "/"):
        with look.at(path) as page:
            expect(page.get_by_text("<script>").first).to_be_visible()
    with look.at(f"/runs/{run}/batches") as page:
        expect(page.locator(".tokens").first).to_contain_text("<script>document.title=")
    for path in ("/nothing", f"/runs?project={HOSTILE}", f"/runs/{HOSTILE}", f"/operations?status={HOSTILE}"):
        reply = httpx.get(f"{look.url}{path}", headers={"Accept": "text/html"})
        assert reply.headers["content-type"].startswith("text/html")
        assert "<script>document" not in reply.text
        assert "<img" not in reply.text


def test_a_curve_moves_while_a_run_trains(look: Looking, server: Server) -> None:
    with connect(server) as service:
        model = new_model(service)
        step(model)
        with look.at(f"/runs/{model.model_id}") as page:
            before = drawn_steps(page)
            for _ in range(3):
                step(model)
            expect(page.locator("[data-version='4']")).to_be_attached()
            expect(page.locator("[data-curves][data-steps='4']")).to_be_attached()
            points = page.evaluate("document.querySelector(\"[data-metric='loss:sum']\").plot.data[0].length")
            assert before in ("1", None)
            assert points == 4


def drawn_steps(page: Page) -> str | None:
    return page.locator("[data-curves]").get_attribute("data-steps")


def test_a_checkpoint_is_published_and_deleted_from_its_page(look: Looking, server: Server) -> None:
    with connect(server) as service:
        model = new_model(service)
        model.save_state("to-delete").result()
        with look.at(f"/runs/{model.model_id}") as page:
            page.on("dialog", lambda dialog: dialog.accept())
            page.get_by_role("button", name="Publish").click()
            expect(page.get_by_role("button", name="Unpublish")).to_be_visible()
            page.get_by_role("button", name="Delete").click()
            expect(page.locator("#checkpoints .none")).to_be_visible()


def test_runs_are_compared_by_marking_them_and_the_address_says_so(look: Looking, server: Server) -> None:
    with connect(server) as service:
        step(new_model(service))
        with look.at("/runs") as page:
            for box in page.locator("input[name=compare]").all()[:2]:
                box.check()
            page.get_by_role("button", name=re.compile("Compare")).click()
            expect(page.locator("h1")).to_have_text("2 runs compared")
            expect(page.locator("[data-metric='loss:sum'] canvas")).to_be_visible()
            assert "compare=" in page.url


def test_pages_are_reached_by_keys(look: Looking) -> None:
    with look.at("/") as page:
        page.keyboard.press("g")
        page.keyboard.press("o")
        expect(page).to_have_title("Operations · Tinsmith")


def test_a_server_with_keys_asks_for_one_and_shows_each_tenant_its_own(
    browser: Browser, options: list[str], tmp_path: Path
) -> None:
    """Two HTTP servers, so a page, its stream and its cookie are answered by any of them."""
    data = str(tmp_path / "data")
    keys = {
        name: tinsmith_here("keys", "add", name, *more, "--data-dir", data).stdout.split()[-1]
        for name, more in (("vision", ()), ("audio", ()), ("root", ("--role", "admin")))
    }
    with serving(tmp_path, *options, "--http-servers", "2") as server:
        server.wait_for_health()
        with connect(server, keys["vision"]) as service:
            model = new_model(service)
            step(model)
            look = Looking(browser, server.url, tmp_path)
            for name, sees in (("vision", True), ("audio", False), ("root", True)):
                with look.at("/runs?project=") as page:
                    expect(page).to_have_title("Log in · Tinsmith")
                    page.get_by_label("API key").fill(keys[name])
                    page.get_by_role("button", name="Log in").click()
                    expect(page).to_have_title("Runs · Tinsmith")
                    assert page.locator("input[name=compare]").count() == sees
                    assert page.request.get(f"{server.url}/runs/{model.model_id}.json").status == (200 if sees else 404)
                    assert page.request.get(f"{server.url}/settings.json").status == (200 if name == "root" else 403)
                    (cookie,) = page.context.cookies()
                    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
                    page.get_by_role("button", name="Log out").click()
                    expect(page).to_have_title("Log in · Tinsmith")
                    assert page.context.cookies() == []
        reply = httpx.post(f"{server.url}/login", data={"key": "tml-wrong", "next": "//evil.example"})
        assert reply.status_code == 401
        assert "set-cookie" not in reply.headers
        reply = httpx.post(f"{server.url}/login", data={"key": keys["audio"], "next": "//evil.example"})
        assert reply.headers["location"] == "/"
        tampered = {"tinsmith_login": reply.cookies["tinsmith_login"].replace(".", "x.", 1)}
        assert httpx.get(f"{server.url}/runs.json", cookies=tampered).status_code == 401
