"""Mistakes that people make: each is answered with a line that says what to do, before anything slow is imported.

Invariant: A command that cannot work says in one line what to do, before torch is imported. Also: `tests/test_cli.py`.
"""

import json
import os
import resource
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import tinker

from tests.bases import random_adapter, write_family
from tests.preloaded import REAL_PYTHON
from tests.running import PROGRAM, START_S, Server, serving, tinsmith_here
from tinsmith.commands.exchange import import_adapter
from tinsmith.models.base import BaseModel
from tinsmith.store.store import Store
from tinsmith.training.peft_format import write_peft

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mistake:
    """A command and what its answer has. Words in capitals stand for what `places` made."""

    command: str
    says: str
    environment: dict[str, str] = field(default_factory=dict)
    without: str = ""
    """A package that is not there."""
    room: int = 0
    """Bytes that a file may have, as on a disk that is full; 0 sets no limit."""


MISTAKES = [
    Mistake("srve", "Did you mean 'serve'?"),
    Mistake("serve", "give at least one --base-model [NAME=]PATH_OR_HUB_ID"),
    Mistake("serve --base-model /no/model", "there is no directory '/no/model', and a Hub id looks like ORG"),
    Mistake("serve --base-model Qwen3-4B", "say where that is: Qwen3-4B=PATH_OR_HUB_ID"),
    Mistake("serve --base-model EMPTY", "holds no model (there is no config.json in it)"),
    Mistake("serve --base-model POINTER", "model.safetensors is a pointer of Git LFS"),
    Mistake("serve --base-model org/absent", "(HTTP 404): correct the name; or, for a model with conditions, accept"),
    Mistake(
        "serve --base-model org/absent", "unset it, or download it elsewhere, and name its", {"HF_HUB_OFFLINE": "1"}
    ),
    Mistake("serve --base-model m=MODEL --port PORT", "stop it, or choose another port with --port"),
    Mistake("serve --base-model m=MODEL --port many", "--port='many' must be a whole number from 0 to 65535"),
    Mistake("serve --base-model m=MODEL --prot 80", "No such option: --prot (Possible options: --host, --port)"),
    Mistake("serve --base-model m=MODEL --kv-cache-gib 2GB", "must be a number of GiB of at least 0, such as 2, 2GiB"),
    Mistake("serve --base-model m=MODEL --device gpu", "must be one of auto, cpu, cuda, cuda:N with a number N"),
    Mistake(
        "serve --base-model m=MODEL --device cuda",
        "leave --device out, or use --device cpu",
        {"CUDA_VISIBLE_DEVICES": ""},
    ),
    Mistake(
        "serve --base-model m=MODEL --workers 3",
        "each worker needs its own; ask for 2 or",
        {"CUDA_VISIBLE_DEVICES": "0,1"},
    ),
    Mistake("serve --base-model m=MODEL --host 0.0.0.0", "make one with `tinsmith keys add NAME --data-dir"),
    Mistake("serve --base-model m=MODEL --host 192.0.2.1", "give --host an address of this machine, such as 127.0.0.1"),
    Mistake("serve --base-model m=MODEL --sampler vllm", "sampler=vllm needs vLLM: pip install"),
    Mistake("serve --base-model m=MODEL --vllm-url http://127.0.0.1:1", "add --sampler vllm, or leave it out"),
    Mistake("serve --base-model m=MODEL --data-dir USED", "is used by another server; stop it or choose another"),
    Mistake("serve --base-model m=MODEL --data-dir FILE", "choose another with --data-dir, or let this user write"),
    Mistake("serve --base-model m=MODEL --data-dir NEWER", "made by a newer Tinsmith; this one knows up to"),
    Mistake(
        "serve --base-model m=MODEL --data-dir DAMAGED", "tinsmith.db is damaged: file is not a database. Put back"
    ),
    Mistake("serve --base-model m=MODEL", "look for a full or broken disk", room=8000),
    Mistake(  # before the next, which imports it
        "serve --base-model m=MODEL --database-url postgresql+psycopg://u@127.0.0.1:1/x",
        "database_url needs the package psycopg; install it with: pip install",
        without="psycopg",
    ),
    Mistake(
        "serve --base-model m=MODEL --database-url postgresql+psycopg://u@127.0.0.1:1/x",
        "look whether PostgreSQL runs and can be reached",
    ),
    Mistake(
        "serve --base-model m=MODEL --database-url mysql://u@h/x", "postgresql+psycopg://USER:PASSWORD@HOST/DATABASE"
    ),
    Mistake("serve --base-model m=MODEL --tls-cert /no/cert.pem", "No such file or directory; give PEM files"),
    Mistake("serve --base-model m=MODEL --config YAML", "unknown key 'server.prot'; did you mean 'server.port'?"),
    Mistake("serve --base-model m=MODEL --config /no/file.yaml", "correct the path, or let this user read it"),
    Mistake("serve --base-model m=MODEL", "TINSMITH_PROT; did you mean TINSMITH_PORT?", {"TINSMITH_PROT": "1"}),
    Mistake("plan /no/model", "there is no directory '/no/model'"),
    Mistake(
        "status http://127.0.0.1:1",
        "no Tinsmith server answers at http://127.0.0.1:1: [Errno 111] Connection refused; `",
    ),
    Mistake("ping http://127.0.0.1:1", "start the server (tinsmith serve --port 1), or correct the port"),
    Mistake("ping http://127.0.0.1:PORT/v2", "leave the path out, clients add /api/v1 to the URL by themselves"),
    Mistake("ping https://127.0.0.1:PORT", "speaks no TLS: write http://127.0.0.1:"),
    Mistake("ping http://127.0.0.1:PORT --base-model m", "base model 'm' is not served at"),
    Mistake("export tinker://a/weights/b new --data-dir USED", "correct the path, or ask its server"),
    Mistake("export my-checkpoint new --data-dir USED", "is not tinker://MODEL_ID/SEGMENT/NAME"),
    Mistake("export tinker://a/weights/b new --data-dir EMPTY", "holds no data of a server"),
    Mistake(
        "export tinker://imported/weights/a new --data-dir CORRUPTED", "adapter.safetensors is damaged: the SHA-256"
    ),
    Mistake(
        "export tinker://imported/weights/a MODEL --data-dir CORRUPTED", "is not an empty directory; name a new one"
    ),
    Mistake(
        "import EMPTY a --base-model MODEL --data-dir USED", "is no PEFT adapter: it must hold adapter_config.json"
    ),
    Mistake("keys add me --expires tomorrow --data-dir USED", "is no time such as 90d, 12h, 30m or 4w"),
    Mistake("keys revoke nobody --data-dir USED", "`tinsmith keys list` lists them"),
    Mistake("restore EMPTY --data-dir new", "holds no data of a server"),
    Mistake("rl /no/run.yaml", "correct the path, or let this user read it"),
]


class _Hub(BaseHTTPRequestHandler):
    """A model hub that has no models."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a tiny model, named tiny."""
    directory = tmp_path_factory.mktemp("served")
    write_family("qwen3", directory / "model")
    with serving(directory, "--base-model", f"tiny={directory / 'model'}") as server:
        server.wait_for_health()
        yield server


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{hub.server_port}"
        hub.shutdown()


@pytest.fixture
def places(server: Server, text_base: BaseModel, tmp_path: Path) -> dict[str, str]:
    """What the words in the commands stand for."""
    model = server.log.parent / "model"
    for name in ("newer", "damaged", "corrupted", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("no directory")
    (tmp_path / "settings.yaml").write_text("server: {prot: 1}\n")
    pointer = Path(shutil.copytree(model, tmp_path / "pointer"))
    (pointer / "model.safetensors").write_bytes(b"version https://git-lfs")
    (tmp_path / "damaged" / "tinsmith.db").write_bytes(b"no database" * 1000)
    for name in ("newer", "corrupted"):
        Store.open(tmp_path / name).close()
    with sqlite3.connect(tmp_path / "newer" / "tinsmith.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    database.close()
    write_peft(random_adapter(text_base), text_base.layout, "x", tmp_path / "adapter")
    import_adapter(tmp_path / "corrupted", tmp_path / "adapter", "a", f"m={model}")
    for weights in (tmp_path / "corrupted").rglob("adapter.safetensors"):
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    return {
        "PORT": server.url.rpartition(":")[2],
        "MODEL": str(model),
        "USED": str(server.data_dir),
        "YAML": str(tmp_path / "settings.yaml"),
        **{
            name.upper(): str(tmp_path / name) for name in ("newer", "damaged", "corrupted", "empty", "file", "pointer")
        },
    }


def arguments(mistake: Mistake, places: dict[str, str], number: int) -> list[str]:
    """The command line of a mistake, with a port and a data directory of its own where it names none."""
    words = mistake.command.split()
    if words[0] == "serve":
        words += [
            word
            for option, word in (("--port", "0"), ("--data-dir", f"data-{number}"))
            if option not in words
            for word in (option, word)
        ]
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    return words


ONE_AFTER_THE_OTHER = """
import json, os, resource, sys, time
before = dict(os.environ)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
class NoTorch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("torch", "transformers"):
            raise SystemExit(f"{name} is imported")
sys.meta_path.insert(0, NoTorch)
from tinsmith.cli import main
for words, environment, without, room in json.load(sys.stdin):
    os.environ.clear()
    os.environ.update(before | environment)
    if "huggingface_hub.constants" in sys.modules:
        sys.modules["huggingface_hub.constants"].HF_HUB_OFFLINE = "HF_HUB_OFFLINE" in environment
    gone = {name: sys.modules.pop(name) for name in list(sys.modules) if without and name.partition(".")[0] == without}
    if without:
        sys.modules[without] = None
    resource.setrlimit(resource.RLIMIT_FSIZE, (room or limits[0], limits[1]))
    sys.argv = ["tinsmith", *words]
    sys.stdout.flush()
    code = None
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if without:
            del sys.modules[without]
        sys.modules.update(gone)
    print(f"=== {code}", file=sys.stderr, flush=True)
"""


def test_each_mistake_is_answered_in_a_line_that_says_what_to_do_and_without_torch(
    places: dict[str, str], hub: str, tmp_path: Path
) -> None:
    """All in one process, in which torch cannot be imported."""
    given = json.dumps(
        [
            [arguments(mistake, places, number), mistake.environment, mistake.without, mistake.room]
            for number, mistake in enumerate(MISTAKES)
        ]
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'rl'}", "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)}
    command = [REAL_PYTHON, "-c", ONE_AFTER_THE_OTHER]
    done = subprocess.run(
        command,
        input=given,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
        timeout=START_S,
    )
    answers = done.stderr.split("=== 2\n")
    assert len(answers) == len(MISTAKES) + 1, done.stderr
    wrong = {
        mistake.command: answer for mistake, answer in zip(MISTAKES, answers, strict=False) if not told(mistake, answer)
    }
    assert wrong == {}
    assert len(MISTAKES) >= 30


def told(mistake: Mistake, answer: str) -> bool:
    """Whether an answer is one line that says what to do; the library of the command line adds how to get help."""
    lines = [line for line in answer.splitlines() if line and not line.startswith(("Usage: ", "Try '"))]
    # It may say before in which database it looks
    return mistake.says in lines[-1] and all(" INFO server: " in line for line in lines[:-1])


@pytest.mark.slow  # each again in a process of its own, as a person starts it
@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_each_mistake_ends_its_process_soon(number: int, places: dict[str, str], hub: str, tmp_path: Path) -> None:
    """In 0.3 to 1.3 s of a quiet processor. Those of a clock depend on what else the machine does."""
    mistake = MISTAKES[number]
    code = f"import sys; sys.modules[{mistake.without!r}] = None; " if mistake.without else ""
    if mistake.room:
        code += f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({mistake.room}, -1)); "
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'rl'}", "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)}
    command = [REAL_PYTHON, "-c", code + PROGRAM[2], *arguments(mistake, places, number)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment | mistake.environment,
        timeout=START_S,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{took:.2f} s: tinsmith {mistake.command}")
    assert (done.returncode, told(mistake, done.stderr)) == (2, True), done.stderr
    assert took < 5  # torch alone takes longer


CLIENT_MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown model": (
        {"base_model": "Qwen/Qwen3-4B"},
        "base_model 'Qwen/Qwen3-4B' is not served here; there are: tiny",
    ),
    "too high a rank": ({"base_model": "tiny", "rank": 100_000}, "lora_config.rank=100000"),
    "path in base_url": ({"path": "/api/v1"}, "leave out what stands before, as in base_url='http://127.0.0.1:"),
    "other path in base_url": ({"path": "/v2"}, "leave out what stands before, as in base_url='http://127.0.0.1:"),
    "no key": ({"key": None}, "by setting the TINKER_API_KEY environment variable"),
}


def create(server: str, base_model: str = "tiny", rank: int = 4, path: str = "", key: str | None = "tml-any") -> None:
    client = tinker.ServiceClient(base_url=server + path, api_key=key)
    client.create_lora_training_client(base_model, rank=rank).result()


@pytest.mark.parametrize("mistake", CLIENT_MISTAKES)
def test_a_client_is_told_at_once(mistake: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    given, says = CLIENT_MISTAKES[mistake]
    with pytest.raises((tinker.TinkerError, tinker.APIError)) as raised:
        create(server.url, **given)
    assert says in str(raised.value)


def test_a_client_without_the_key_that_a_server_wants_is_told_how_to_get_one(tmp_path: Path) -> None:
    write_family("qwen3", tmp_path / "model")
    assert tinsmith_here("keys", "add", "me", "--data-dir", str(tmp_path / "data")).returncode == 0
    with (
        serving(tmp_path, "--base-model", f"tiny={tmp_path / 'model'}") as server,
        pytest.raises(tinker.AuthenticationError, match="set TINKER_API_KEY; `tinsmith keys add` beside the"),
    ):
        create(server.url, key="tml-wrong")


def test_an_old_python_is_told_of_before_anything_is_installed(tmp_path: Path) -> None:
    """The Makefile asks the first `python3`; that pip refuses an older one is in the project's `requires-python`."""
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.13\n[ "$1" = --version ]\n')
    old.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt", "rl/pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["make", "setup"], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode != 0
    assert (
        "Tinsmith needs python3 3.11 or newer; this is Python 3.10.13. Put a newer python3 first in PATH."
        in done.stderr
    )
    assert not (tmp_path / ".venv").exists()
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text()
