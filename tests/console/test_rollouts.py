"""The episodes of a real run, in a server's console and in `tinsmith view`."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import zstandard
from playwright.sync_api import Browser, expect

from tests.console.conftest import DARK_PHONE, LIGHT, Looking
from tests.console.hostile import HOSTILE
from tests.preloaded import REAL_PYTHON
from tests.running import PROGRAM, START_S, Server
from tinsmith.console.rollouts import group_page, step_page, trajectory_page
from tinsmith.console.run_files import KeptContents, RunFiles, checkpoint_before
from tinsmith.errors import NotFoundError, UserError

RUN = "/rollouts/a%20run"
PAGES = ("/rollouts", RUN, f"{RUN}/step-000002", f"{RUN}/step-000002/7", f"{RUN}/step-000002/7/1")


@pytest.fixture(scope="session")
def files(server: Server, rollouts: Path) -> RunFiles:
    """The files of the run."""
    return RunFiles(rollouts)


@pytest.fixture(scope="module")
def viewed(files: RunFiles, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of `tinsmith view`."""
    log = tmp_path_factory.mktemp("view") / "log"
    command = [*PROGRAM, "view", str(files.root), "--port", "0", "--server", server.url]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        while not (told := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            with pytest.raises(subprocess.TimeoutExpired):  # it has ended, which its log explains
                process.wait(0.05)
        yield told[0]
        process.terminate()
        process.wait(START_S)


def test_rollouts_are_shown(look: Looking) -> None:
    with look.at(PAGES[0], DARK_PHONE) as page:
        for path in PAGES:
            page.goto(f"{look.url}{path}")
            expect(page.locator("main section").first).to_be_visible()
            look.judge(page, DARK_PHONE, LIGHT)


def test_a_directory_is_viewed_as_in_the_console(
    browser: Browser, viewed: str, server: Server, http: httpx.Client, tmp_path: Path
) -> None:
    for path in PAGES:
        assert ">Playground</a>" in http.get(f"{server.url}{path}").text
        assert ">Playground</a>" not in http.get(f"{viewed}{path}").text
        shown, same = (http.get(f"{place}{path}.json").json() for place in (viewed, server.url))
        assert shown.keys() == same.keys()
        assert shown.get("groups") == same.get("groups")
    with Looking(browser, viewed, tmp_path).at(f"{RUN}/step-000002") as page:
        link = page.get_by_role("link", name="Chat with the weights after step 1")
        expect(link).to_have_attribute("href", re.compile(f"^{re.escape(server.url)}/playground"))
    assert http.get(f"{viewed}/rollouts", headers={"Host": "evil.example"}).status_code == 400
    for wrong in ("/rollouts/other", f"{RUN}/step-000009", f"{RUN}/step-000002/99", f"{RUN}/step-000002/7/x", "/other"):
        assert http.get(f"{viewed}{wrong}").status_code == 404
    assert http.get(f"{viewed}/rollout-images/a%20run/..%2F..%2Fstate.json").status_code == 404
    assert http.get(f"{viewed}{RUN}/step-000002.json?sort=colour").status_code == 400


def test_one_goes_from_a_run_to_a_chat(look: Looking) -> None:
    """A point of a curve, a bar of the histogram, a group, a member, and the weights that sampled it."""
    with look.at(RUN) as page:
        page.locator(".curve").first.locator("a[href]").last.press("Enter")
        expect(page.locator("h1")).to_contain_text("Step 3")
        page.locator(".slider input").fill("1")
        page.locator(".slider input").dispatch_event("change")
        expect(page.locator("h1")).to_contain_text("Step 2")
        bar = page.locator(".histogram a").first
        count = int(bar.locator(".count").inner_text())
        bar.click()
        expect(page.locator(".chip")).to_have_count(count)
        page.locator(".groups td a").first.click()
        expect(page.locator(".member")).to_have_count(3)
        assert page.locator(".opening img").evaluate("image => image.naturalWidth") == 64
        page.locator(".member h2 a").nth(1).click()
        page.get_by_role("link", name="surprise").click()
        expect(page.locator(".t.h5[title]").first).to_be_visible()  # the tiny model hardly knows its tokens
        page.keyboard.press("ArrowRight")
        expect(page.locator(".crumbs b")).to_have_text("Member 2")
        page.get_by_role("link", name="Chat with the weights after step 1").click()
        page.wait_for_selector("#playground[data-ready]")
        assert page.locator("#model").input_value().endswith("/sampler_weights/step-000001")


def test_pages_say_what_the_files_hold(files: RunFiles) -> None:
    run = files.run("a run")
    asked = {"run": "a run", "file": "step-000002"}
    episodes = run.episodes("step-000002")
    step = step_page(files, asked)
    usable = [each["reward"] for each in episodes if each["usable"]]
    assert sum(bar["count"] for bar in step["histogram"]) == len(usable)
    assert [group["number"] for group in step["groups"]] == sorted({each["group"] for each in episodes})
    by_reward = step_page(files, {**asked, "sort": "-reward"})["groups"]
    means = [-9.0 if group["reward"] is None else group["reward"] for group in by_reward]
    assert means == sorted(means, reverse=True)
    one = episodes[0]
    found = step_page(files, {**asked, "q": f"NUMBER {one['seed']} "})["groups"]
    assert {one["group"]} <= {group["number"] for group in found} < {each["group"] for each in episodes}
    broken = next(each for each in episodes if not each["usable"])
    where = {**asked, "group": str(broken["group"]), "member": str(broken["member"])}
    assert HOSTILE in trajectory_page(files, where)["episode"]["error"]
    taught = next(each for each in episodes if each["usable"] and (each["samples"][0]["advantages"] or [0])[0] > 0)
    where = {**asked, "group": str(taught["group"]), "member": str(taught["member"]), "colour": "advantage"}
    turns = trajectory_page(files, where)["episode"]["samples"][0]["turns"]
    assert "".join(span.get("text", "") for turn in turns for span in turn["spans"]) == taught["samples"][0]["text"]
    said = [turn for turn in turns if turn["said"]]
    assert sum(turn["reward"] for turn in said) == pytest.approx(taught["reward"])
    assert {span["shade"] for turn in said for span in turn["spans"]} <= {"p1", "p2", "p3", "p4", "p5"}
    assert "trainer" in said[0]["spans"][0]["about"]
    # The prompt is the same for all, so it is shown once
    whole = group_page(files, {**asked, "group": str(taught["group"])})
    assert sum("image" in span for span in whole["opening"]["spans"]) == 1
    assert all(each["samples"][0]["turns"][0]["said"] for each in whole["episodes"])


def test_files_that_cannot_be_read_are_named(tmp_path: Path, files: RunFiles) -> None:
    place = tmp_path / "run" / "trajectories"
    place.mkdir(parents=True)
    whole = (files.root / "a run" / "trajectories" / "step-000001.jsonl.zst").read_bytes()
    for broken in (b"", b"nothing", whole[:40]):
        (place / "step-000001.jsonl.zst").write_bytes(broken)
        with pytest.raises(UserError, match=r"step-000001\.jsonl\.zst cannot be read"):
            RunFiles(tmp_path).run("run").headings()
    (place / "step-000001.jsonl.zst").write_bytes(whole[:-20])
    with pytest.raises(UserError, match="ends in the middle"):
        RunFiles(tmp_path).run("run").episodes("step-000001")
    (place.parent / "metrics.jsonl").write_text('{"step": 1, "reward": NaN}\n{"step": 2, "rew')
    assert RunFiles(tmp_path).run("run").metrics() == [{"step": 1, "reward": None}]
    with pytest.raises(NotFoundError):
        RunFiles(tmp_path).run("../run")
    assert RunFiles(tmp_path / "absent").runs() == []


def test_a_file_that_unpacks_to_gigabytes_is_refused_before_it_has(tmp_path: Path) -> None:
    place = tmp_path / "run" / "trajectories"
    place.mkdir(parents=True)
    heading = b'{"format": 1, "env": "e", "groups": 1, "trajectories": 1}\n'
    packing, zeros = zstandard.ZstdCompressor().compressobj(), bytes(2**20)
    bomb = b"".join(packing.compress(zeros) for _ in range(512)) + packing.flush()
    (place / "step-000001.jsonl.zst").write_bytes(zstandard.compress(heading) + bomb)
    code = (
        "import resource, sys; from pathlib import Path; from tinsmith.console import run_files\n"
        "run_files.MOST_BYTES = 2**20\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: run_files.RunFiles(Path(sys.argv[1])).run('run').episodes('step-000001')\n"
        "except run_files.UserError as error: print(error)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    command = [REAL_PYTHON, "-c", code, str(tmp_path)]
    told, grown = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=START_S
    ).stdout.splitlines()
    assert "holds more than 256 MiB" in told
    assert int(grown) < 200


def test_many_threads_read_files_that_push_each_other_out(tmp_path: Path) -> None:
    files, kept = [tmp_path / str(number) for number in range(4)], KeptContents(1)
    for file in files:
        file.write_text(file.name)

    def parse(file: Path) -> str:
        time.sleep(0.001)
        return file.read_text()

    with ThreadPoolExecutor(8) as threads:
        read = list(threads.map(lambda file: kept.read(file, parse), files * 20))
    assert read == [file.name for file in files] * 20


def test_a_file_that_grows_is_kept_once(tmp_path: Path) -> None:
    """Invariant: Of files of runs, what was read last stays in memory, within a size; no length that they once had."""
    file, kept = tmp_path / "metrics.jsonl", KeptContents(100, len)
    for length in range(1, 50):
        file.write_text("x" * length)
        assert kept.read(file, Path.read_text) == "x" * length
    assert sum(len(text) for _, text in kept._values.values()) == 49
    others = [tmp_path / str(number) for number in range(9)]
    for other in others:
        other.write_text("y" * 30)
        kept.read(other, Path.read_text)
    assert sum(len(text) for _, text in kept._values.values()) == 90


def test_a_run_is_found_beside_others_whose_files_are_broken(tmp_path: Path) -> None:
    for number, state in enumerate(('{"weights": "tinker://a:train:0/weights/x"}', "[", '{"kept": 1}', None)):
        place = tmp_path / str(number)
        (place / "trajectories").mkdir(parents=True)
        if state is None:
            (place / "state.json").mkdir()
        else:
            (place / "state.json").write_text(state)
        os.utime(place, (number, number))  # the newest are looked at first
    found = RunFiles(tmp_path).of_model("a:train:0")
    assert found is not None
    assert found.name == "0"
    for line in ('{"reward": 1}', '{"step": null}', "[]"):
        (found.directory / "metrics.jsonl").write_text(f"{line}\n")
        with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read"):
            found.metrics()


def test_the_weights_that_sampled_are_the_newest_before() -> None:
    assert checkpoint_before({10: "a", 20: "b"}, 19) == (10, "a")
    assert checkpoint_before({10: "a", 20: "b"}, 3) == (10, "a")
    assert checkpoint_before({}, 3) is None


def test_viewing_needs_no_torch_and_names_what_is_wrong(tmp_path: Path) -> None:
    code = "import sys, tinsmith.commands.view; print(sorted({'torch', 'transformers', 'fastapi'} & set(sys.modules)))"
    done = subprocess.run([REAL_PYTHON, "-c", code], capture_output=True, text=True, check=True, timeout=START_S)
    assert json.loads(done.stdout) == []
    command = [*PROGRAM, "view", str(tmp_path / "absent")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_S)
    assert (done.returncode, "is no directory" in done.stderr) == (2, True)
    assert sys.executable
