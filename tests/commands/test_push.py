"""Exports with their model cards, and their way to a hub: a server on this machine that speaks what uploading asks."""

import base64
import hashlib
import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tests.bases import random_adapter
from tests.preloaded import REAL_PYTHON
from tests.running import PROGRAM, START_S, tinsmith_here
from tinsmith.commands.exchange import import_adapter
from tinsmith.models.base import BaseModel
from tinsmith.store.store import Store
from tinsmith.training.peft_format import write_peft

ROOT = Path(__file__).parents[2]
TOKEN = "hf_of_the_owner"


class Hub(ThreadingHTTPServer):
    """A model hub with one user. Files of 1 kB and more are uploaded apart, as large ones are."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.repositories: dict[str, bool] = {}
        """Whether each is private."""
        self.files: dict[str, bytes] = {}
        self.uploaded: dict[str, bytes] = {}
        self.hangs_up_at = ""
        """Part of the paths at which it ends connections without an answer."""
        self.url = f"http://127.0.0.1:{self.server_port}"


class HubRequest(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, body: object, status: int = 200) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_PUT(self) -> None:
        content = self.body()
        self.server.uploaded[hashlib.sha256(content).hexdigest()] = content
        self.answer({})

    def do_GET(self) -> None:
        self.answer({"sha": "0" * 40, "siblings": [], "id": "me/kettle"} if "/api/models/" in self.path else {})

    def do_POST(self) -> None:
        content = self.body()
        if self.server.hangs_up_at and self.server.hangs_up_at in self.path:
            self.close_connection = True
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid credentials"}, 401)
        elif self.path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.server.repositories[name] = asked.get("private", asked.get("visibility") == "private")
            self.answer({"url": f"{self.server.url}/{name}"})
        elif self.path.endswith("/preupload/main"):
            files = json.loads(content)["files"]
            self.answer({"files": [self.mode_of(file) for file in files]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            asked = json.loads(content)
            self.answer({"transfer": "basic", "objects": [self.place_of(each) for each in asked["objects"]]})
        elif "/commit/main" in self.path:
            self.commit([json.loads(line) for line in content.splitlines()])
            self.answer({"commitUrl": f"{self.server.url}/me/kettle/commit/1", "commitOid": "1" * 40, "success": True})
        else:
            self.answer({})

    def mode_of(self, file: dict[str, object]) -> dict[str, object]:
        return {
            "path": file["path"],
            "uploadMode": "lfs" if int(str(file["size"])) >= 1000 else "regular",
            "shouldIgnore": False,
        }

    def place_of(self, wanted: dict[str, object]) -> dict[str, object]:
        return wanted | {"actions": {"upload": {"href": f"{self.server.url}/put/{wanted['oid']}", "header": {}}}}

    def commit(self, lines: list[dict[str, dict[str, str]]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":  # type: ignore[comparison-overlap]
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":  # type: ignore[comparison-overlap]
                self.server.files[value["path"]] = self.server.uploaded[value["oid"]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


@pytest.fixture
def base(family_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A base model whose own card names a licence."""
    target = tmp_path / "base"
    target.mkdir()
    for file in family_dir("llama").iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    (target / "README.md").write_text("---\nlicense: apache-2.0\ntags: [a]\n---\n# Base\n")
    return target


@pytest.fixture
def checkpoint(base: Path, family_base: Callable[[str], BaseModel], tmp_path: Path) -> str:
    """The path of an adapter in the data directory `data`."""
    (tmp_path / "data").mkdir()
    Store.open(tmp_path / "data").close()
    llama = family_base("llama")
    write_peft(random_adapter(llama), llama.layout, "x", tmp_path / "adapter")
    return import_adapter(tmp_path / "data", tmp_path / "adapter", "kettle", f"Tiny/Llama={base}")[0]


def push(hub: Hub, token: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own, because the hub's library reads its environment once."""
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "PYTHONPATH": f"{ROOT}:{ROOT / 'rl'}"}
    return subprocess.run(
        [REAL_PYTHON, *PROGRAM[1:], "push-hf", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"HF_HUB_DISABLE_XET": "1"},
        timeout=START_S,
    )


def card_of(text: str) -> dict[str, object]:
    """What the front of a model card says."""
    front: dict[str, object] = yaml.safe_load(text.split("---\n")[1])
    return front


def test_an_export_has_a_card_and_names_its_base_as_others_do(checkpoint: str, base: Path, tmp_path: Path) -> None:
    beside = ["--data-dir", str(tmp_path / "data")]
    assert tinsmith_here("export", checkpoint, str(tmp_path / "peft"), *beside).returncode == 0
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    card = (tmp_path / "peft" / "README.md").read_text()
    assert config["base_model_name_or_path"] == "Tiny/Llama"
    assert card_of(card) == {
        "base_model": "Tiny/Llama",
        "base_model_relation": "adapter",
        "license": "apache-2.0",
        "library_name": "peft",
        "tags": ["tinsmith", "lora"],
    }
    assert re.search(r"LoRA of rank 4, alpha 32, seed \d+, on: attention, MLP, output projection", card)
    assert "vllm serve Tiny/Llama --enable-lora --max-lora-rank 4 --lora-modules NAME=DIR" in card
    assert str(tmp_path) not in card
    renamed = ["--base-model", f"Other/Name={base}", "--merge"]
    assert tinsmith_here("export", checkpoint, str(tmp_path / "merged"), *renamed, *beside).returncode == 0
    card = (tmp_path / "merged" / "README.md").read_text()
    assert card_of(card)["base_model"] == "Other/Name"
    assert "\nvllm serve DIR\n" in card


@pytest.mark.parametrize("merge", [False, True])
def test_gguf_is_written_with_a_modelfile(merge: bool, checkpoint: str, tmp_path: Path) -> None:
    options = ["--gguf", *(["--merge"] if merge else []), "--data-dir", str(tmp_path / "data")]
    done = tinsmith_here("export", checkpoint, str(tmp_path / "out"), *options)
    assert (done.returncode, done.stderr) == (0, "")
    file = "model.gguf" if merge else "adapter.gguf"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {file, "Modelfile", "README.md"}
    modelfile = (tmp_path / "out" / "Modelfile").read_text().splitlines()
    used = [line for line in modelfile if not line.startswith("#")]
    assert used == (["FROM ./model.gguf"] if merge else ["FROM ./base.gguf", "ADAPTER ./adapter.gguf"])
    assert merge or "Tiny/Llama" in modelfile[0]
    assert card_of((tmp_path / "out" / "README.md").read_text())["library_name"] == "gguf"


def test_an_export_comes_whole_to_a_hub(hub: Hub, checkpoint: str, tmp_path: Path) -> None:
    beside = ["--data-dir", str(tmp_path / "data")]
    done = push(hub, TOKEN, checkpoint, "me/kettle", *beside)
    assert (done.returncode, done.stdout) == (0, f"{hub.url}/me/kettle/commit/1\n"), done.stderr
    assert hub.repositories == {"me/kettle": True}
    assert tinsmith_here("export", checkpoint, str(tmp_path / "peft"), *beside).returncode == 0
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "peft").iterdir()}
    assert hub.uploaded  # the weights went apart


def test_what_a_hub_refuses_is_said_before_anything_is_exported(hub: Hub, checkpoint: str, tmp_path: Path) -> None:
    beside = ["--data-dir", str(tmp_path / "data")]
    for token, repository, said in (
        ("hf_wrong", "me/kettle", "(HTTP 401): Invalid credentials; set HF_TOKEN to a token that may write there"),
        (TOKEN, "me/ket tle", "'me/ket tle' names no repository: give it as OWNER/NAME"),
    ):
        done = push(hub, token, checkpoint, repository, *beside)
        assert (done.returncode, done.stderr.count("\n"), said in done.stderr) == (2, 1, True), done.stderr
    hub.hangs_up_at = "/api/repos/create"
    broken = push(hub, TOKEN, checkpoint, "me/kettle", *beside)
    assert (broken.returncode, broken.stderr.count("\n")) == (2, 1), broken.stderr
    assert "broke: Server disconnected without sending a response.; push again" in broken.stderr
    assert not hub.files
    hub.url = "http://127.0.0.1:1"
    gone = push(hub, TOKEN, checkpoint, "me/kettle", *beside)
    assert (gone.returncode, "does not answer" in gone.stderr) == (2, True), gone.stderr
