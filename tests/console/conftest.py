"""A real server, trained through the real SDK, and a real browser that looks at its pages.

Without Chromium these tests are skipped.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import tinker
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tinker import types

from tests.console.hostile import HOSTILE
from tests.running import START_S, Server, serving, tinsmith, tinsmith_here
from tinsmith.models.tiny import write_tiny_model

CHROMIUM = Path("/usr/bin/chromium")
Look = tuple[Literal["light", "dark"], tuple[int, int]]
"""A theme, and the size of a window in pixels."""
WIDE, PHONE = (1440, 900), (390, 844)
LIGHT: Look = ("light", WIDE)
DARK: Look = ("dark", WIDE)
DARK_PHONE: Look = ("dark", PHONE)

PICTURES = os.environ.get("TINSMITH_TEST_PICTURES")
"""A directory for pictures of all pages that are looked at; of one that is too wide, there is one in the test's own."""
_IS_RENDERED = """width => innerWidth === width && document.readyState === "complete"
    && document.fonts.status === "loaded"
    && [...document.images].every(image => image.complete || image.loading === "lazy")
    && [...document.querySelectorAll("[data-curves]")].every(charts => Number(charts.dataset.drawn) === width)"""
"""Whether all is there and drawn for this width: charts are drawn again a moment after it has changed."""
_TOO_WIDE = """() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => {
    const root = document.documentElement;
    done(root.scrollWidth - root.clientWidth);
})))"""
"""By how many pixels the page is wider than the window, once it is laid out."""
LOOK_S = 120.0
"""How long tests wait for a page to change: seconds on a machine ten times as busy, for what takes a tenth of one."""
ELSEWHERE = "tinsmith.test"
"""A name that leads to this machine, and to which browsers give less than to 127.0.0.1, as to any without HTTPS."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium without a window. While it is there, an event loop runs in this thread: no test may have one."""
    if not CHROMIUM.exists():
        pytest.skip(f"there is no browser: apt-get install chromium puts one at {CHROMIUM}")
    expect.set_options(timeout=LOOK_S * 1000)
    rules = f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", rules])
        yield found
        found.close()


class Looking:
    """Opens pages of one server, and knows what a page must never do."""

    def __init__(self, browser: Browser, url: str, shots: Path) -> None:
        self.browser, self.url, self.shots = browser, url, shots
        self.complaints: list[str] = []

    @contextmanager
    def at(self, path: str, look: Look = LIGHT) -> Iterator[Page]:
        """A page, once it is loaded, without anything that pages before have left; at the end it is judged."""
        theme, (width, height) = look
        with self.browser.new_context(color_scheme=theme, viewport={"width": width, "height": height}) as context:
            context.set_default_timeout(LOOK_S * 1000)
            page = context.new_page()
            page.on("console", lambda said: self.complaints.append(f"{page.url}: {said.type}: {said.text}"))
            page.on("pageerror", lambda error: self.complaints.append(f"{page.url}: {error}"))
            page.goto(f"{self.url}{path}")
            yield page
            self.judge(page, look)

    def judge(self, page: Page, *looks: Look) -> None:
        """See a page in each of these looks.

        No message in the browser's console, nothing that is wider than the window, no text obeyed as HTML.
        """
        path = page.url.removeprefix(self.url)
        name = re.sub(r"[^\w]+", "-", path).strip("-")[:60] or "overview"
        for theme, (width, height) in looks:
            page.emulate_media(color_scheme=theme)
            page.set_viewport_size({"width": width, "height": height})
            picture = f"{name}-{theme}-{width}.png"
            page.wait_for_function(_IS_RENDERED, arg=width)
            if too_wide := page.evaluate(_TOO_WIDE):
                page.screenshot(path=self.shots / picture, full_page=True)
            assert not too_wide, f"{path} is {too_wide} pixels wider than a window of {width}: {self.shots / picture}"
            if PICTURES:
                page.screenshot(path=Path(PICTURES) / picture, full_page=True, animations="disabled")
        assert self.complaints == []
        assert page.title() != "owned"


@pytest.fixture
def look(browser: Browser, server: Server, tmp_path: Path) -> Looking:
    """The pages of the server that has trained."""
    return Looking(browser, server.url, tmp_path)


@pytest.fixture(scope="session")
def http() -> Iterator[httpx.Client]:
    """A client for all: making one takes a tenth of a second. It keeps no cookie."""
    with httpx.Client(timeout=START_S) as client:
        yield client


@pytest.fixture(scope="session")
def options(family_dir: Callable[[str], Path]) -> list[str]:
    return ["--base-model", f"text={family_dir('qwen3')}", "--kv-cache-gib", "0.1"]


@pytest.fixture(scope="session")
def service(server: Server) -> Iterator[tinker.ServiceClient]:
    """A client of the server that has trained; its models stay in memory."""
    with connect(server) as service:
        yield service


@dataclass(frozen=True)
class Keyed:
    """A server with keys, and two processes that answer HTTP: a page, its stream and its cookie meet any of them."""

    server: Server
    keys: dict[str, str]
    """Of the tenants vision and audio, of one who never does anything, and of the admin root."""

    def log_in(self, page: Page, name: str) -> None:
        """Give the key to the page that asks for it."""
        expect(page).to_have_title("Log in · Tinsmith")
        page.get_by_label("API key").fill(self.keys[name])
        page.get_by_role("button", name="Log in").click()


@pytest.fixture(scope="session")
def keyed(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    directory = tmp_path_factory.mktemp("keyed")
    made = {
        name: tinsmith_here("keys", "add", name, *more, "--data-dir", str(directory / "data"))
        for name, more in (("vision", ()), ("audio", ()), ("idle", ()), ("root", ("--role", "admin")))
    }
    keys = {name: done.stdout.split()[-1] for name, done in made.items()}
    with serving(directory, *options, "--http-servers", "2", "--allowed-host", ELSEWHERE) as running:
        running.wait_for_health()
        yield Keyed(running, keys)


@pytest.fixture(scope="session")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the runs that `server` shows."""
    return tmp_path_factory.mktemp("rollouts")


@pytest.fixture(scope="session")
def server(options: list[str], rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a model that takes pictures and one that does not.

    A run has trained, saved and failed, with hostile text wherever a client may put some, and a run of reinforcement
    learning has played and learnt.
    """
    directory = tmp_path_factory.mktemp("console")
    write_tiny_model("qwen3-vl", directory / "model")
    seeing = ["--base-model", f"seeing={directory / 'model'}", "--run-files", str(rollouts)]
    with serving(directory, *seeing, *options) as running:
        running.wait_for_health()
        with connect(running) as service:
            train(new_model(service), 4)
        learn(running, rollouts / "a run", directory / "run.yaml")
        yield running


def learn(server: Server, output: Path, config: Path) -> None:
    """Run `tinsmith rl`."""
    tree: dict[str, dict[str, Any]] = {
        "server": {"url": server.url, "api_key": "tml-console"},
        "model": {"base_model": "seeing", "rank": 4},
        "env": {"name": "tests.console.shouting:Shouting", "max_failed_share": 1.0, "max_failed_groups": 9},
        "generation": {"max_tokens": 8},
        "training": {"steps": 3, "groups": 7, "group_size": 3},
        "prompts": {"count": 7},
        "output": {"directory": str(output), "trackers": [], "save_every": 1},
    }
    config.write_text(json.dumps(tree))  # which is YAML, too
    done = tinsmith("rl", str(config))  # here, the browser's event loop would be in its way
    assert done.returncode == 0, done.stderr


def connect(server: Server, key: str = "tml-console") -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key=key, user_metadata={HOSTILE: HOSTILE}, project_id=HOSTILE)


def new_model(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("text", rank=4, user_metadata={HOSTILE: HOSTILE}).result()


def datum(model: tinker.TrainingClient, text: str) -> types.Datum:
    """A datum whose first three tokens have no weight."""
    tokens = model.get_tokenizer().encode(text)
    weights = [0.0] * 3 + [1.0] * (len(tokens) - 4)
    inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def step(model: tinker.TrainingClient, text: str = f"A tinsmith mends kettles. {HOSTILE}") -> None:
    """One training step."""
    model.forward_backward([datum(model, text)], "cross_entropy")
    model.optim_step(types.AdamParams(learning_rate=3e-3)).result()


def train(model: tinker.TrainingClient, steps: int) -> None:
    """Train, save checkpoints of each kind, and fail once."""
    for _ in range(steps):
        step(model)
    model.save_state("half-way").result()
    model.save_weights_for_sampler("final").result()
    unknown: Any = HOSTILE
    with pytest.raises(tinker.TinkerError):
        model.forward_backward([datum(model, "a loss that is unknown")], unknown).result()
