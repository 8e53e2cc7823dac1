"""Trainer and vLLM servers take turns: who has much to do keeps the GPU for a turn, and never longer while the other
waits.

Invariant: Trainer and vLLM servers that take turns on a device both go on, however much the other has to do; kept
samples have right numbers; what sleeps is not written to, and a server that does not obey is ended. Also:
`tests/sampling/vllm/test_sleep.py`, `tests/with_vllm/test_turns.py`.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from tinsmith.worker.device_turns import IDLE_S, DeviceTurns

TURN_S = 10.0


@dataclass
class Servers:
    """Servers that fall asleep and wake when the test says so."""

    has_samples: bool = False
    asked: list[str] = field(default_factory=list)
    switching: "Future[None]" = field(default_factory=Future)

    def fall_asleep(self) -> "Future[None]":
        return self._switch("sleep")

    def wake_up(self) -> "Future[None]":
        return self._switch("wake")

    def _switch(self, what: str) -> "Future[None]":
        self.asked.append(what)
        self.switching = Future()
        return self.switching


class Story:
    """Turns with a clock that the test moves."""

    def __init__(self, turn_s: float = TURN_S, count: int = 1) -> None:
        self.now = 0.0
        self.left: list[float] = []
        self.servers = [Servers() for _ in range(count)]
        self.turns = DeviceTurns(self.servers, turn_s, lambda: self.left.append(self.now), lambda: self.now)

    def after(self, seconds: float, wanted: bool, sampled: bool) -> bool:
        """Whether the trainer has it then, if it wants it or not, and the servers have samples or none."""
        self.now += seconds
        for servers in self.servers:
            servers.has_samples = sampled
        return self.turns.look(wanted)

    def switched(self) -> None:
        """All servers have obeyed."""
        for servers in self.servers:
            servers.switching.set_result(None)


def test_without_turns_the_trainer_always_has_the_device() -> None:
    story = Story(turn_s=0.0)
    assert [story.after(0, wanted=True, sampled=True), story.after(100, wanted=False, sampled=True)] == [True, True]
    assert (story.servers[0].asked, story.turns.patience_s(1.0)) == ([], 1.0)


def test_each_has_a_turn_when_both_have_work_without_end() -> None:
    """It is the trainer's when the servers sleep, and theirs when they have woken; its memory is given back each time
    before that."""
    story = Story()
    for _ in range(3):
        assert [story.after(seconds, wanted=True, sampled=True) for seconds in (0, TURN_S - 0.1)] == [False, False]
        assert story.turns.state == "sampling"
        assert [story.after(seconds, wanted=True, sampled=True) for seconds in (0.2, 5)] == [False, False]
        story.switched()
        assert [story.after(seconds, wanted=True, sampled=True) for seconds in (0, TURN_S - 0.1)] == [True, True]
        assert [story.after(seconds, wanted=True, sampled=True) for seconds in (0.2, 5)] == [False, False]
        story.switched()
    assert (story.servers[0].asked, len(story.left)) == (["sleep", "wake"] * 3, 3)


def test_a_side_without_work_gives_way_after_a_moment_and_stays_if_nobody_waits() -> None:
    story = Story()
    assert not story.after(60, wanted=False, sampled=False)
    assert story.servers[0].asked == []
    assert not story.after(0, wanted=True, sampled=False)
    assert story.servers[0].asked == ["sleep"]
    story.switched()
    assert story.after(0, wanted=True, sampled=True)
    assert story.after(IDLE_S / 2, wanted=False, sampled=True), "another pass may come at once"
    story.now += TURN_S / 2
    story.turns.has_trained()
    assert story.after(IDLE_S / 2, wanted=False, sampled=True), "so after a long one"
    assert not story.after(IDLE_S, wanted=False, sampled=True)
    assert story.servers[0].asked == ["sleep", "wake"]
    story.switched()
    assert not story.after(0, wanted=True, sampled=False)
    assert not story.after(IDLE_S, wanted=True, sampled=False)
    story.switched()
    assert story.after(0, wanted=False, sampled=False)
    assert story.after(600, wanted=False, sampled=False)


def test_it_is_the_trainers_when_all_servers_sleep_and_what_keeps_one_from_it_is_raised() -> None:
    story = Story(count=2)
    for servers in story.servers:
        assert not story.after(1, wanted=True, sampled=False)
        servers.switching.set_result(None)
    assert story.after(0, wanted=True, sampled=False)
    story = Story()
    story.after(1, wanted=True, sampled=False)
    story.servers[0].switching.set_exception(RuntimeError("no sleep"))
    with pytest.raises(RuntimeError, match="no sleep"):
        story.after(0, wanted=True, sampled=False)
