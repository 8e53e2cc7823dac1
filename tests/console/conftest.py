"""A real server, trained through the real SDK, and a real browser that looks at its pages.

Screenshots lie in the test's directory. Without Chromium these tests are skipped.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tinker
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tinker import types

from tests.console.hostile import HOSTILE
from tests.running import START_S, Server, serving, tinsmith
from tinsmith.models.tiny import write_tiny_model

CHROMIUM = Path("/usr/bin/chromium")
WIDE, PHONE = (1440, 900), (390, 844)
"""Sizes of a window, in pixels."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium without a window. While it is there, an event loop runs in this thread: no other test may have one."""
    if not CHROMIUM.exists():
        pytest.skip(f"there is no browser: apt-get install chromium puts one at {CHROMIUM}")
    expect.set_options(timeout=START_S * 1000)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Looking:
    """Opens pages of one server, and knows what a page must never do."""

    def __init__(self, browser: Browser, url: str, shots: Path) -> None:
        self.browser, self.url, self.shots = browser, url, shots
        self.complaints: list[str] = []

    @contextmanager
    def at(
        self, path: str, theme: Any = "light", window: tuple[int, int] = WIDE, cookies: Any = (), **headers: str
    ) -> Iterator[Page]:
        """A page, once it is loaded; at the end it is judged, and kept as a picture."""
        width, height = window
        with self.browser.new_context(
            color_scheme=theme, viewport={"width": width, "height": height}, extra_http_headers=headers
        ) as context:
            context.set_default_timeout(START_S * 1000)
            context.add_cookies(list(cookies))
            page = context.new_page()
            page.on("console", lambda said: self.complaints.append(f"{path}: {said.type}: {said.text}"))
            page.on("pageerror", lambda error: self.complaints.append(f"{path}: {error}"))
            page.goto(f"{self.url}{path}")
            yield page
            self.judge(page, path, f"{theme}-{width}")

    def judge(self, page: Page, path: str, how: str) -> None:
        """No message in the browser's console, nothing that is wider than the window, no text obeyed as HTML."""
        name = re.sub(r"[^\w]+", "-", path).strip("-") or "overview"
        page.screenshot(path=self.shots / f"{name[:60]}-{how}.png", full_page=True)
        assert self.complaints == []
        root = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert root[0] <= root[1], f"{path} is {root[0]} pixels wide in a window of {root[1]}"
        assert page.title() != "owned"


@pytest.fixture
def look(browser: Browser, server: Server, tmp_path: Path) -> Looking:
    """The pages of a server that has trained."""
    return Looking(browser, server.url, tmp_path)


@pytest.fixture
def look_at_empty(browser: Browser, empty_server: Server, tmp_path: Path) -> Looking:
    """The pages of a server on which nothing has happened."""
    return Looking(browser, empty_server.url, tmp_path)


@pytest.fixture
def look_at_seeing(browser: Browser, seeing_server: Server, tmp_path: Path) -> Looking:
    """The pages of a server whose model takes pictures."""
    return Looking(browser, seeing_server.url, tmp_path)


@pytest.fixture(scope="session")
def options(family_dir: Callable[[str], Path]) -> list[str]:
    return ["--base-model", f"text={family_dir('qwen3')}", "--kv-cache-gib", "0.1"]


@pytest.fixture(scope="session")
def empty_server(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("empty"), *options) as running:
        running.wait_for_health()
        yield running


@pytest.fixture(scope="session")
def server(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on which a run has trained, saved and failed, with hostile text wherever a client may put some."""
    with serving(tmp_path_factory.mktemp("console"), *options) as running:
        running.wait_for_health()
        with connect(running) as service:
            train(new_model(service), 12)
        yield running


@pytest.fixture(scope="session")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the runs that `seeing_server` shows."""
    return tmp_path_factory.mktemp("rollouts")


@pytest.fixture(scope="session")
def seeing_server(rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model takes pictures, and on which a run of reinforcement learning has played and learnt."""
    directory, options = tmp_path_factory.mktemp("seeing"), ["--kv-cache-gib", "0.1", "--run-files", str(rollouts)]
    write_tiny_model("qwen3-vl", directory / "model")
    with serving(directory, "--base-model", f"seeing={directory / 'model'}", *options) as running:
        running.wait_for_health()
        tree: dict[str, dict[str, Any]] = {
            "server": {"url": running.url, "api_key": "tml-console"},
            "model": {"base_model": "seeing", "rank": 4},
            "env": {"name": "tests.console.shouting:Shouting", "max_failed_share": 1.0, "max_failed_groups": 9},
            "generation": {"max_tokens": 8},
            "training": {"steps": 3, "groups": 7, "group_size": 4},
            "prompts": {"count": 7},
            "output": {"directory": str(rollouts / "a run"), "trackers": [], "save_every": 1},
        }
        (directory / "run.yaml").write_text(json.dumps(tree))  # which is YAML, too
        done = tinsmith("rl", str(directory / "run.yaml"))  # here, the browser's event loop would be in its way
        assert done.returncode == 0, done.stderr
        yield running


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
