"""Environments that raise, hang or die end their own trajectory, in threads and in processes."""

import asyncio
import os
import shutil
import subprocess
import threading
from multiprocessing import resource_tracker, spawn
from pathlib import Path
from typing import Literal

import pytest

from tests.preloaded import REAL_PYTHON
from tests.rl.moody import CLOSED, FREED, Moody
from tests.rl.scripted import Scripted, ids, settings
from tinsmith_rl.chat import ChatTemplate
from tinsmith_rl.env import Prompt, deregister, register
from tinsmith_rl.errors import ConfigError
from tinsmith_rl.rollouts import EnvRollouts
from tinsmith_rl.trajectory import EpisodeId, Trajectory
from tinsmith_rl.workers import ProcessWorkers, make_workers

Kind = Literal["inline", "thread", "process"]

LONG_S = 600.0
"""A time-out of environments that nobody reaches."""
SHORT_S = (1.0, 4.0, 16.0, 64.0)
"""Time-outs for those that never end. All others must end in one of them: which, is up to the machine."""


def play(
    kind: Kind, template: ChatTemplate, moods: list[str], count: int = 2, env: str = "Moody", timeout_s: float = LONG_S
) -> list[Trajectory]:
    """Episodes of these moods, at once, on `count` workers."""

    async def all_of_them() -> list[Trajectory]:
        workers = make_workers(kind, count, timeout_s=timeout_s)
        rollouts = EnvRollouts(f"tests.rl.moody:{env}", {}, settings(), template, workers)
        said = [(ids(template, "hot<|im_end|>"), True)]
        prompts = [Prompt(0, fields={"mood": mood}) for mood in moods]
        try:
            return await asyncio.gather(
                *(rollouts.play(Scripted(said), prompt, EpisodeId("moody", 0)) for prompt in prompts)
            )
        finally:
            workers.shutdown()

    return asyncio.run(all_of_them())


def play_late(kind: Kind, template: ChatTemplate, moods: list[str], env: str) -> tuple[list[Trajectory], float]:
    """Episodes of which the slow ones alone time out, and in how many seconds: the fewest in which the others end and
    these begin."""
    for timeout_s in SHORT_S:
        made = play(kind, template, moods, env=env, timeout_s=timeout_s)
        if [each.stop_reason == "env_timeout" and each.turns == 1 for each in made] == [
            mood == "slow" for mood in moods
        ]:
            break
    return made, timeout_s


def ending(trajectory: Trajectory) -> tuple[str, str]:
    return trajectory.stop_reason, trajectory.error


GOOD = ("done", "")
ENDINGS = {
    "good": GOOD,
    "raises": ("env_error", "KeyError: 'lost'"),
    "unwilling": ("env_error", "ValueError: no game today"),
    "leaves": ("env_error", "SystemExit: enough"),
}


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
@pytest.mark.parametrize(
    ("env", "gave_up"), [("Moody", "CancelledError: "), ("Patient", "the environment cancelled its own task")]
)
def test_what_an_environment_does_ends_its_trajectory_only(
    kind: Kind, env: str, gave_up: str, plain: ChatTemplate
) -> None:
    """Not the program, either. The first exception is the one that is told: closing the unwilling one fails too."""
    CLOSED.clear()
    moods = [*ENDINGS, "gives up", "good"]
    made = play(kind, plain, moods, env=env)
    assert [ending(trajectory) for trajectory in made[:4]] == list(ENDINGS.values())
    assert ending(made[4])[0] == "env_error"
    assert kind == "process" or made[4].error == gave_up
    assert ending(made[5]) == GOOD
    assert [trajectory.usable for trajectory in made] == [mood == "good" for mood in moods]
    if kind != "process":
        assert sorted(CLOSED) == sorted(moods)


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_asynchronous_methods_have_a_time_out_and_an_environment_that_cannot_be_made_is_told(
    kind: Kind, plain: ChatTemplate
) -> None:
    (late,), _ = play_late(kind, plain, ["slow"], "Patient")
    assert (late.stop_reason, late.turns) == ("env_timeout", 1)
    busy = ("env_error", "ConnectionError: the simulator is busy")
    assert [ending(trajectory) for trajectory in play(kind, plain, ["good", "good"], env="Absent")] == [busy, busy]
    if kind != "process":
        with pytest.raises(ConfigError, match="does not take these options"):
            asyncio.run(make_workers(kind, 1, 5.0).open("tests.rl.moody:Moody", {"colour": "red"}))


HANGING = """
import asyncio, time
from tinsmith_rl.workers import EnvTimeoutError, make_workers

class Forever:
    def step(self): time.sleep(300)

async def run():
    session = await make_workers("thread", 1, 0.2).open("__main__:Forever", {})
    try:
        await session.call("step")
    except EnvTimeoutError:
        print("late")

asyncio.run(run())
"""


def test_a_call_that_never_returns_does_not_keep_the_program() -> None:
    done = subprocess.run([REAL_PYTHON, "-c", HANGING], capture_output=True, text=True, check=False, timeout=LONG_S)
    assert (done.returncode, done.stdout) == (0, "late\n"), done.stderr


def test_a_timeout_ends_its_trajectory_and_leaves_as_many_threads(plain: ChatTemplate) -> None:
    """The others do not wait for the two that sleep on until the test is over."""
    try:
        made, timeout_s = play_late("thread", plain, ["slow", "slow", "good", "good", "good"], "Moody")
    finally:
        FREED.set()
        FREED.clear()
    late = ("env_timeout", f"the environment took longer than its time-out of {timeout_s:g} s")
    assert [ending(trajectory) for trajectory in made] == [late, late, GOOD, GOOD, GOOD]
    assert all(trajectory.notes["thread"] != threading.get_ident() for trajectory in made)


def test_processes_are_replaced_when_they_die(plain: ChatTemplate) -> None:
    register("moody", Moody)
    try:
        made = play("process", plain, ["good", "raises", "dies", "good"], count=1)
    finally:
        deregister("moody")
    assert [ending(made[i]) for i in (0, 1, 3)] == [GOOD, ENDINGS["raises"], GOOD]
    assert (made[2].stop_reason, "the environment's process ended" in made[2].error) == ("env_error", True)
    processes = [trajectory.notes.get("process") for trajectory in made]
    assert processes[0] == processes[1] != os.getpid()
    assert processes[3] not in (None, processes[0])


def test_a_process_that_cannot_start_fails_its_episode_and_another_takes_its_place(
    plain: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource_tracker.ensure_running()  # which would be started as this program, too
    monkeypatch.setattr(spawn, "_python_exe", os.fsencode(shutil.which("false") or ""))
    made = play("process", plain, ["good", "good", "good"], count=1)
    assert [(each.stop_reason, "the environment's process ended" in each.error) for each in made] == [
        ("env_error", True)
    ] * 3


def test_an_episode_that_is_cancelled_while_its_environment_is_made_gives_its_process_back() -> None:
    async def cancel_then_open() -> None:
        workers = ProcessWorkers(1, timeout_s=LONG_S)
        opening = asyncio.create_task(workers.open("tests.rl.moody:Moody", {}))
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        assert (opening.cancelled(), workers.free.qsize()) == (True, 1)
        session = await workers.open("tests.rl.moody:Moody", {})
        assert await session.call("metrics") == {}
        workers.shutdown()

    asyncio.run(cancel_then_open())


GAME = """
import os
class Game:
    def metrics(self): return {"PYTHONSAFEPATH": float("PYTHONSAFEPATH" in os.environ)}
"""

IN_ITS_DIRECTORY = """
import asyncio
from tinsmith_rl.workers import make_workers

async def run():
    workers = make_workers("process", 1, 600.0)
    session = await workers.open("game:Game", {})
    print(await session.call("metrics"))
    workers.shutdown()

if __name__ == "__main__":
    asyncio.run(run())
"""


def test_a_process_imports_the_environment_of_the_working_directory_and_runs_nothing_else_there(tmp_path: Path) -> None:
    """Not even what has the name of a module that Python's own processes import.

    Programs of the environment start as they always do.
    """
    (tmp_path / "game.py").write_text(GAME)
    for name in ("socket", "tempfile", "signal"):
        (tmp_path / f"{name}.py").write_text(f"import os\nprint({name!r}, flush=True)\nos._exit(9)\n")
    program = tmp_path / "bin" / "program.py"
    program.parent.mkdir()
    program.write_text(IN_ITS_DIRECTORY)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "rl")
    command = [REAL_PYTHON, str(program)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=LONG_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "{'PYTHONSAFEPATH': 0.0}\n", "")


def test_a_process_that_hangs_is_killed(plain: ChatTemplate) -> None:
    async def hang_then_play() -> list[Trajectory]:
        workers = ProcessWorkers(1, timeout_s=LONG_S)
        rollouts = EnvRollouts("tests.rl.moody:Moody", {}, settings(), plain, workers)
        said = [(ids(plain, "hot<|im_end|>"), True)]
        made = []
        for mood, workers.timeout_s in (("good", LONG_S), ("slow", 0.5), ("good", LONG_S)):
            made.append(await rollouts.play(Scripted(said), Prompt(0, fields={"mood": mood}), EpisodeId("moody", 0)))
        workers.shutdown()
        return made

    made = asyncio.run(hang_then_play())
    assert [trajectory.stop_reason for trajectory in made] == ["done", "env_timeout", "done"]
    assert made[0].notes["process"] != made[2].notes["process"]
