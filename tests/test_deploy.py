"""What `deploy/` and the workflows say exists in the product: options, variables, settings, paths, routes, targets."""

import itertools
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from tinsmith.cli import app
from tinsmith.config import Config, load, settings
from tinsmith.server.routes import service

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILES = [DEPLOY / "Dockerfile", DEPLOY / "Dockerfile.cuda"]
PROBED = {f"/api/v1{route.path}" for route in service.router.routes}  # type: ignore[attr-defined]


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Each instruction with its text, lines joined."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    whole = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in whole.splitlines() if line.strip()]


def variables(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words if "=" in word)


def accepted(command: list[str], environment: dict[str, str]) -> Config:
    """The configuration of `tinsmith serve ...`. Raises for an option or a variable that does not exist."""
    assert command[0] == "serve"
    known = {each.option: each for each in settings()}
    options: dict[str, Any] = {}
    for option, value in zip(command[1::2], command[2::2], strict=True):
        name = known[option].name
        options[name] = [*options.get(name, []), value] if known[option].type == list[str] else value
    ours = {name: value for name, value in environment.items() if name.startswith("TINSMITH_")}
    return load(options=options, environment=ours)


def commands_in_comments(file: Path) -> Iterator[list[str]]:
    """What comments tell people to run of our program, in or outside a container."""
    for line in file.read_text().splitlines():
        if line.startswith("#"):
            for found in re.findall(r"(?:tinsmith-cuda|tinsmith) ((?:serve|keys)\b[^#;`]*)", line):
                yield shlex.split(found)


def test_commands_that_are_told_exist() -> None:
    group = typer.main.get_group(app)
    found = [words for file in sorted(DEPLOY.iterdir()) for words in commands_in_comments(file)]
    assert len(found) >= 5
    for words in found:
        command: Any = group.commands[words[0]]
        if words[0] == "keys":
            command = command.commands[words[1]]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help-all"}
        assert {word for word in words if word.startswith("--")} <= known, words


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_copies_what_is_there_and_sets_what_exists(dockerfile: Path) -> None:
    steps = instructions(dockerfile)
    for kind, text in steps:
        sources = text.split()[:-1]
        if kind == "COPY" and not text.startswith("--from"):
            assert all((ROOT / source).exists() for source in sources), text
    text_of = {kind: [text for other, text in steps if other == kind] for kind, _ in steps}
    environment = variables(shlex.split(" ".join(text_of["ENV"])))
    config = accepted(json.loads(text_of["CMD"][-1]), environment)
    assert (config.server.host, config.data_dir) == ("0.0.0.0", "/data")
    volumes = json.loads(text_of["VOLUME"][0])
    assert config.data_dir in volumes
    assert not config.models.compile_cache or config.models.compile_cache.startswith("/cache/")
    assert ("/cache" in volumes) == bool(config.models.compile_cache) == dockerfile.name.endswith("cuda")
    assert text_of["EXPOSE"] == [str(config.server.port)]
    assert text_of["USER"] == ["1000"]
    assert json.loads(text_of["ENTRYPOINT"][0]) == ["tinsmith"]
    probed = re.search(r"http://127\.0\.0\.1:(\d+)(/[\w/]+)", text_of["HEALTHCHECK"][0])
    assert probed
    assert (int(probed[1]), probed[2] in PROBED) == (config.server.port, True)
    extras = re.search(r'EXTRAS="([^"]*)"', " ".join(text_of["ARG"]))
    assert extras
    assert set(extras[1].split(",")) <= known_extras()


def known_extras() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return set(re.findall(r"^([\w-]+) = ", text, re.MULTILINE))


def test_compose_sets_what_exists() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    server = compose["services"]["tinsmith"]
    config = accepted(server["command"], server["environment"])
    assert (config.sampling.sampler, config.server.metrics_address) == ("vllm", "0.0.0.0:9100")
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    assert set(server["build"]["args"]["EXTRAS"].split(",")) <= known_extras()
    scraped = yaml.safe_load(compose["configs"]["prometheus"]["content"])["scrape_configs"][0]
    assert scraped["metrics_path"] == "/metrics"
    assert scraped["static_configs"][0]["targets"] == ["tinsmith:9100"]
    used = {mount.partition(":")[0] for each in compose["services"].values() for mount in each.get("volumes", [])}
    assert used == compose["volumes"].keys()
    assert set(server["depends_on"]) <= compose["services"].keys()


def test_kubernetes_probes_and_sets_what_exists() -> None:
    kinds = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    pod = kinds["StatefulSet"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    config = accepted(server["args"], {each["name"]: each["value"] for each in server["env"]})
    ports = {each["name"]: each["containerPort"] for each in server["ports"]}
    assert ports == {"http": config.server.port, "metrics": int(config.server.metrics_address.rpartition(":")[2])}
    assert {server[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness")} == {"/api/v1/readyz"}
    assert server["livenessProbe"]["httpGet"]["path"] == "/api/v1/livez"
    assert {"/api/v1/readyz", "/api/v1/livez"} <= PROBED
    assert pod["enableServiceLinks"] is False  # its variables would be refused
    claims = {each["metadata"]["name"] for each in kinds["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    mounted = {each["name"] for each in server["volumeMounts"]}
    assert mounted == claims | {each["name"] for each in pod["volumes"]}


def test_the_unit_starts_what_exists(tmp_path: Path) -> None:
    """Where systemd is installed, it checks the unit, with programs and users of this machine."""
    unit = (DEPLOY / "tinsmith.service").read_text()
    started = re.search(r"^ExecStart=(\S+) (.*)$", unit, re.MULTILINE)
    assert started
    assert started[2] == "serve --config /etc/tinsmith/tinsmith.yaml"
    config = load(DEPLOY / "tinsmith.yaml")
    assert config.data_dir == "/var/lib/tinsmith"
    assert config.models.compile_cache.startswith("/var/cache/tinsmith/")
    assert "StateDirectory=tinsmith\nCacheDirectory=tinsmith\n" in unit
    if verify := shutil.which("systemd-analyze"):
        there = tmp_path / "tinsmith.service"
        there.write_text(unit.replace(started[1], "/bin/true").replace("User=tinsmith", "User=root"))
        done = subprocess.run([verify, "verify", str(there)], capture_output=True, text=True, check=False)
        complaints = [line for line in done.stderr.splitlines() if "tinsmith.service" in line]
        assert complaints == []


def test_workflows_run_targets_and_files_that_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    told = []
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        workflow = yaml.safe_load(file.read_text())
        told += [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in told
    assert (ROOT / ".ci" / "run").is_file()
    assert "tinsmith.__version__" in " ".join(told)
    for command in told:
        words = command.split()
        if words[0] == "make":
            assert words[1] in targets
        for option, value in itertools.pairwise(words):
            assert option not in ("-f", "--notes-file") or (ROOT / value).is_file()
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["wheel"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12", "3.13"]
