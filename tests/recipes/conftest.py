"""Two servers for all recipes: one with random tiny models, one with what `sl_loop` has made of the base model, which
has two workers."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bases import write_family
from tests.recipes.stand_ins import write_stand_ins
from tests.recipes.workshop import (
    BASE_MODEL,
    CHAT_MODEL,
    FAMILIES,
    GPT_OSS,
    LARGE_MIXTURE,
    MIXTURE,
    PYTHON,
    SMALL_MODEL,
    TEXT_ONLY_MODEL,
    Outcome,
    Workshop,
    forking,
)
from tests.running import serving
from tinsmith.models.tiny import write_tiny_model

CACHE = ("--kv-cache-gib", "0.2")


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins for everything that the recipes would load from the Hub."""
    if not PYTHON.exists():
        pytest.exit(f"{PYTHON} is missing: run `make test-recipes`, which sets it up", returncode=2)
    place = tmp_path_factory.mktemp("workshop")
    write_stand_ins(place)
    write_tiny_model("qwen3-5", place / BASE_MODEL)
    write_tiny_model("qwen3-5", place / CHAT_MODEL, hidden=128)
    write_tiny_model("qwen3-5", place / SMALL_MODEL)
    write_tiny_model("qwen3", place / TEXT_ONLY_MODEL)
    write_tiny_model("qwen3-5-moe", place / MIXTURE)
    # With seed 0 a token has two experts that are equally good, but for the rounding of some processors
    write_tiny_model("qwen3-5-moe", place / LARGE_MIXTURE, hidden=128, seed=1)
    write_tiny_model("gpt-oss", place / GPT_OSS)
    for name, family in FAMILIES.items():
        write_family(family, place / name)
    return place


@pytest.fixture(scope="session")
def forks(directory: Path) -> Iterator["subprocess.Popen[str]"]:
    """What recipes are forked from."""
    with forking(directory) as process:
        yield process


@pytest.fixture(scope="session")
def random_models(
    directory: Path, forks: "subprocess.Popen[str]", tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workshop]:
    """A server with models that know nothing."""
    place = tmp_path_factory.mktemp("random")
    names = (BASE_MODEL, CHAT_MODEL, SMALL_MODEL, TEXT_ONLY_MODEL, MIXTURE, LARGE_MIXTURE, GPT_OSS, *FAMILIES)
    models = [option for name in names for option in ("--base-model", f"{name}={directory / name}")]
    with serving(place, *models, *CACHE) as server:
        server.wait_for_health()
        yield Workshop(directory, server.url, place / "data", forks)


@pytest.fixture(scope="session")
def sl_loop(random_models: Workshop) -> Outcome:
    """The base model is taught the form of an answer, by the recipe."""
    return random_models.completed(
        "sl_loop", "log_path=sl_loop", "batch_size=20", "learning_rate=8e-3", "save_every=10"
    )


@pytest.fixture(scope="session")
def taught_model(
    random_models: Workshop, sl_loop: Outcome, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workshop]:
    """A server with two workers whose base model, under the same name, is the end of `sl_loop`: it knows the form of an
    answer."""
    place = tmp_path_factory.mktemp("taught")
    random_models.merge(sl_loop.sampler_path, place / "model")
    with serving(
        place, "--base-model", f"{BASE_MODEL}={place / 'model'}", *CACHE, "--device", "cpu", "--workers", "2"
    ) as server:
        server.wait_for_health()
        yield Workshop(random_models.directory, server.url, place / "data", random_models.forks)
        for rank in range(2):  # both have sampled
            server.wait_for_log(f"worker {rank}: samples: ")
        assert "Traceback" not in server.log.read_text()
