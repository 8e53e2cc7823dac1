"""Every page in a real browser: in both themes, at the width of a phone, with data and without."""

import json
import math
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from playwright.sync_api import APIResponse, Browser, Locator, Page, Route, expect
from tinker import types

from tests.console.conftest import DARK, DARK_PHONE, LIGHT, Keyed, Looking, connect, new_model, step
from tests.console.hostile import HOSTILE
from tests.running import Server

PAGES = (
    *("/", "/runs", "/operations", "/operations?status=failed", "/settings"),
    *("/samples", "/playground"),
)
"""Pages that need nothing to be there."""
OF_A_RUN = ("/runs/{run}", "/runs/{run}/batches", "/runs?compare={run}&smooth=0.9", "/operations/{run}/1")


@pytest.fixture(scope="session")
def run(server: Server, http: httpx.Client) -> str:
    """The id of the run that has trained."""
    return oldest_run(server, http, "text")


def oldest_run(server: Server, http: httpx.Client, base_model: str) -> str:
    runs = http.get(f"{server.url}/runs.json").json()["runs"]
    found: str = [each["model_id"] for each in runs if each["base_model"] == base_model][-1]
    return found


HOSTILE_PAGES = ("/", "/runs", "/operations?status=failed", "/runs/{run}", "/runs/{run}/batches")
"""Pages with a text that somebody has sent: metadata, errors, tokens."""


def test_pages_are_shown_with_data(look: Looking, run: str) -> None:
    """Hostile text is shown as text; `judge` sees that none was obeyed."""
    with look.at("/", DARK_PHONE) as page:
        for template in (*PAGES, *OF_A_RUN):
            path = template.replace("{run}", run)
            page.goto(f"{look.url}{path}")
            expect(page.locator("main h1")).to_be_attached()
            if template in ("/runs/{run}", "/runs?compare={run}&smooth=0.9"):
                expect(page.locator("[data-metric='loss:sum'] canvas")).to_be_visible()
            if template.endswith("batches"):
                expect(page.locator(".tokens").first).to_contain_text("<script>document.title=")
            elif template in HOSTILE_PAGES:
                expect(page.get_by_text("<script>").first).to_be_visible()
            look.judge(page, DARK_PHONE, DARK, LIGHT)


def test_pages_are_shown_where_nothing_has_happened(browser: Browser, keyed: Keyed, tmp_path: Path) -> None:
    look = Looking(browser, keyed.server.url, tmp_path)
    with look.at("/runs", DARK_PHONE) as page:
        keyed.log_in(page, "idle")
        for path in PAGES:
            if path != "/settings":  # for admins
                page.goto(f"{look.url}{path}")
                expect(page.locator("main h1")).to_be_attached()
                assert page.locator("main tbody tr:not(:has(.none))").count() == 0 or path == "/"
                look.judge(page, DARK_PHONE)


def test_pages_are_json_too(server: Server, run: str, http: httpx.Client) -> None:
    for path in (*PAGES, *OF_A_RUN):
        place, question, query = path.replace("{run}", run).partition("?")
        reply = http.get(f"{server.url}{'/overview' if place == '/' else place}.json{question}{query}")
        assert reply.status_code == 200, path
        assert reply.headers["content-type"] == "application/json"
        assert isinstance(reply.json(), dict)


def test_hostile_text_in_an_address_is_shown_as_text(server: Server, http: httpx.Client) -> None:
    for path in ("/nothing", f"/runs?project={HOSTILE}", f"/runs/{HOSTILE}", f"/operations?status={HOSTILE}"):
        reply = http.get(f"{server.url}{path}", headers={"Accept": "text/html"})
        assert reply.headers["content-type"].startswith("text/html")
        assert "<script>document" not in reply.text
        assert "<img" not in reply.text


def test_a_curve_moves_while_a_run_trains_whose_checkpoint_is_published_and_deleted(
    look: Looking, service: tinker.ServiceClient
) -> None:
    model = new_model(service)
    step(model)
    with look.at(f"/runs/{model.model_id}") as page:
        expect(page.locator("[data-curves][data-steps='1']")).to_be_attached()
        slow = list[tuple[Route, APIResponse]]()

        def answer(route: Route) -> None:
            if slow:
                route.continue_()
            else:
                slow.append((route, route.fetch()))

        page.route("**/curves.json*", answer)
        step(model)
        while not slow:
            page.wait_for_timeout(50)
        for _ in range(2):
            step(model)
        expect(page.locator("[data-version='4']")).to_be_attached()
        for route, reply in slow:  # of the second step; no further message tells of those after it
            route.fulfill(response=reply)
        expect(page.locator("[data-curves][data-steps='4']")).to_be_attached()
        assert page.evaluate("document.querySelector(\"[data-metric='loss:sum']\").plot.data[0].length") == 4
        model.save_state("to-delete").result()
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Publish").click()
        expect(page.get_by_role("button", name="Unpublish")).to_be_visible()
        page.get_by_role("button", name="Delete").click()
        expect(page.locator("#checkpoints .none")).to_be_visible()


def test_runs_are_compared_by_marking_them_and_the_address_says_so(
    look: Looking, run: str, service: tinker.ServiceClient
) -> None:
    other = new_model(service)
    step(other)
    with look.at("/runs") as page:
        page.locator(f"input[name=compare][value='{run}']").check()
        row = page.locator("#runs tr", has=page.locator(f"input[value='{other.model_id}']"))
        operations = row.locator("td").nth(5)
        before = operations.inner_text()
        step(other)
        expect(operations).not_to_have_text(before)  # the page has changed, and the mark is still there
        page.locator(f"input[name=compare][value='{other.model_id}']").check()
        page.get_by_role("button", name=re.compile("Compare")).click()
        expect(page.locator("h1")).to_have_text("2 runs compared")
        expect(page.locator("[data-metric='loss:sum'] canvas")).to_be_visible()
        assert "compare=" in page.url


def test_the_page_of_a_run_shows_what_tinsmith_rl_has_written(
    look: Looking, server: Server, rollouts: Path, http: httpx.Client
) -> None:
    """Rewards, and the divergence of sampler and trainer, which operations do not return; a link to the episodes."""
    written = [json.loads(line) for line in (rollouts / "a run" / "metrics.jsonl").read_text().splitlines()]
    url = look.url
    run = oldest_run(server, http, "seeing")
    drawn = http.get(f"{url}/curves.json?runs={run}").json()["runs"][0]["curves"]
    for name in ("reward", "kl_sampler_trainer"):
        points = [(line["step"], line[name]) for line in written if name in line]
        assert list(zip(drawn[f"rl/{name}"]["x"], drawn[f"rl/{name}"]["y"], strict=True)) == points
        assert len(points) == 3
    with look.at(f"/runs/{run}") as page:
        expect(page.locator("[data-metric='rl/reward'] canvas")).to_be_visible()
        expect(page.locator("[data-metric='rl/kl_sampler_trainer'] .meaning")).to_contain_text("KL of sampler")
        page.get_by_role("link", name="Episodes of a run").click()
        expect(page).to_have_title("a run · Tinsmith")


def test_a_run_of_any_client_shows_how_far_trainer_and_sampler_are_apart(
    look: Looking, service: tinker.ServiceClient, http: httpx.Client
) -> None:
    """Of two models in the same passes, each step in two requests; replies have no more than they had."""
    models = [new_model(service) for _ in range(2)]
    wanted: list[list[list[float]]] = [[], []]
    for of_step in range(2):
        replies: list[tuple[int, list[types.Datum], Any]] = []
        for size in (3, 1):
            for place, model in enumerate(models):
                data = [policy_datum(1 + place + 4 * of_step + each, 6 + each + size) for each in range(size)]
                replies.append((place, data, model.forward_backward(data, "importance_sampling")))
        for model in models:
            model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        gaps: list[list[float]] = [[], []]
        for place, data, future in replies:
            assert future.result().metrics.keys() == {"loss:sum"}
            for item, output in zip(data, future.result().loss_fn_outputs, strict=True):
                inputs = {name: tensor.to_numpy().astype(float) for name, tensor in item.loss_fn_inputs.items()}
                apart = output["logprobs"].to_numpy().astype(float) - inputs["logprobs"]
                gaps[place] += apart[inputs["advantages"] != 0].tolist()
        for place, each in enumerate(gaps):
            k3 = sum(math.exp(gap) - 1 - gap for gap in each) / len(each)
            wanted[place].append([-sum(each) / len(each), k3])
    for model, steps in zip(models, wanted, strict=True):
        drawn = http.get(f"{look.url}/curves.json?runs={model.model_id}").json()["runs"][0]["curves"]
        found = [drawn[f"kl_sampler_trainer/{name}"]["y"] for name in ("k1", "k3")]
        assert list(map(list, zip(*found, strict=True))) == [pytest.approx(each, rel=1e-5) for each in steps]
        assert not [name for name in drawn if "kl" in name and ":sum" in name]
    with look.at(f"/runs/{models[0].model_id}") as page:
        expect(page.locator("[data-metric='kl_sampler_trainer/k3'] canvas")).to_be_visible()
        expect(page.locator("[data-metric='kl_sampler_trainer/k1'] .meaning")).to_contain_text("minus the trainer's")


def policy_datum(seed: int, length: int) -> types.Datum:
    """Random tokens, of which the first two are a prompt."""
    random = np.random.default_rng(seed)
    tokens = random.integers(5, 1500, length + 1).tolist()
    inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
    for name, values in (("logprobs", -7.5 + random.normal(size=length)), ("advantages", random.normal(size=length))):
        inputs[name] = [0.0, 0.0, *values.astype(np.float32).tolist()[2:]]
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def test_pages_are_reached_by_keys(look: Looking) -> None:
    with look.at("/runs") as page:
        for title in ("Samples", "Overview", "Operations", "Runs", "Rollouts"):
            page.wait_for_load_state()
            page.keyboard.press("g")
            page.keyboard.press(title[0].lower())
            expect(page).to_have_title(f"{title} · Tinsmith")


def test_a_server_with_keys_asks_for_one_and_shows_each_tenant_its_own(
    browser: Browser, keyed: Keyed, http: httpx.Client, tmp_path: Path
) -> None:
    url = keyed.server.url
    with connect(keyed.server, keyed.keys["vision"]) as service:
        model = new_model(service)
        step(model)
        with Looking(browser, url, tmp_path).at("/runs?project=") as page:
            for name, sees in (("vision", True), ("audio", False), ("root", True)):
                page.goto(f"{url}/runs?project=")
                keyed.log_in(page, name)
                expect(page).to_have_title("Runs · Tinsmith")
                assert page.locator("input[name=compare]").count() == sees
                assert page.request.get(f"{url}/runs/{model.model_id}.json").status == (200 if sees else 404)
                assert page.request.get(f"{url}/settings.json").status == (200 if name == "root" else 403)
                (cookie,) = page.context.cookies()
                assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
                page.get_by_role("button", name="Log out").click()
                expect(page).to_have_title("Log in · Tinsmith")
                assert page.context.cookies() == []
    reply = http.post(f"{url}/login", data={"key": "tml-wrong", "next": "//evil.example"})
    assert reply.status_code == 401
    assert "set-cookie" not in reply.headers
    reply = http.post(f"{url}/login", data={"key": keyed.keys["audio"], "next": "//evil.example"})
    http.cookies.clear()
    assert reply.headers["location"] == "/"
    tampered = {"Cookie": f"tinsmith_login=x{reply.cookies['tinsmith_login']}"}
    assert http.get(f"{url}/runs.json", headers=tampered).status_code == 401


def test_many_open_pages_leave_connections_for_others(look: Looking) -> None:
    """A browser has six connections to a server: the streams of the newest pages that are shown take three."""
    with look.at("/") as first:
        expect(streaming(first, "open")).to_be_attached()
        first.clock.install()
        others = [first.context.new_page() for _ in range(6)]
        for page in others:
            page.goto(f"{look.url}/runs")
            expect(streaming(page, "open")).to_be_attached()
        expect(streaming(first, "paused")).to_be_attached()
        expect(first.locator("#notice")).to_contain_text("Many pages")
        first.clock.fast_forward(3_600_000)  # a page that does not change says so as long as it does not
        expect(first.locator("#notice")).to_be_visible()
        first.locator("#health").click()
        expect(streaming(first, "open")).to_be_attached()
        expect(first.locator("#notice")).to_be_hidden()
        hide(first, "hidden")
        expect(streaming(first, "paused")).to_be_attached()
        hide(first, "visible")
        expect(streaming(first, "open")).to_be_attached()
        for page in others[:4]:
            expect(streaming(page, "paused")).to_be_attached()


def streaming(page: Page, state: str) -> Locator:
    return page.locator(f"html[data-stream='{state}']")


def hide(page: Page, state: str) -> None:
    """As a browser with a window does with the page of a tab that is not shown; one without shows all."""
    page.evaluate(
        """state => {
            Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        state,
    )
