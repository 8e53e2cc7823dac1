"""The shipped environments: a seed fixes the episode, right answers earn everything, wrong ones nothing."""

import io
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tinsmith_rl.env import ChatMessage, Env, Prompt, Step, Teacher, deregister, find, make, register, registered, user
from tinsmith_rl.envs.questions import COLORS, ColorSquare
from tinsmith_rl.errors import ConfigError

SHIPPED = ["arithmetic", "color_square", "digit_sum", "guess_number", "maze2d"]


def fingerprint(messages: list[ChatMessage]) -> list[Any]:
    """Messages with images as PNG bytes, so that they can be compared."""

    def part(item: dict[str, Any]) -> Any:
        if item["type"] == "text":
            return item["text"]
        file = io.BytesIO()
        item["image"].save(file, "PNG")
        return file.getvalue()

    contents = [message["content"] for message in messages]
    return [
        [m["role"], c if isinstance(c, str) else [part(item) for item in c]]
        for m, c in zip(messages, contents, strict=True)
    ]


def play(name: str, seed: int, say: Callable[[Env], str], **options: Any) -> tuple[list[Any], float, dict[str, float]]:
    """Everything that an episode showed, its whole reward, and its metrics."""
    env = make(name, **options)
    messages, metadata = env.init(Prompt(seed))
    shown, reward, done = [fingerprint(messages), metadata], 0.0, False
    while not done:
        observations, earned, done, notes = env.step(say(env))
        shown += [fingerprint(observations), dict(notes)]
        reward += earned
    env.close()
    return shown, reward, env.metrics()


def right(env: Env) -> str:
    assert isinstance(env, Teacher)
    return env.demonstrate()


@pytest.mark.parametrize("name", SHIPPED)
def test_an_episode_follows_from_its_seed_and_right_answers_earn_one(name: str) -> None:
    for seed in range(5):
        assert play(name, seed, right) == play(name, seed, right)
        assert play(name, seed, right)[1] == pytest.approx(1.0)
        assert play(name, seed, lambda _: "tin")[1] == 0.0
    assert play(name, 1, right)[0] != play(name, 2, right)[0]


def test_arithmetic_hears_the_answer_and_not_what_was_thought() -> None:
    messages, metadata = make("arithmetic", largest=20, terms=3).init(Prompt(5))
    assert messages == [
        {"role": "user", "content": "What is {} + {} + {}?".format(*np.random.default_rng([5]).integers(21, size=3))}
    ]
    assert metadata == {"answer": int(np.random.default_rng([5]).integers(21, size=3).sum())}
    assert play("arithmetic", 3, lambda env: f"<think>seven, no</think>\n\n{right(env)}")[1] == 1.0
    assert play("arithmetic", 3, lambda env: f"{right(env)} I think")[1] == 0.0


def test_guess_number_says_where_the_number_lies() -> None:
    env = make("guess_number", largest=7)
    number = env.init(Prompt(0))[1]["number"]
    assert number not in (1, 7)
    assert env.step("1") == Step([user("higher")], 0.0, False)
    assert env.step("7") == Step([user("lower")], 0.0, False)
    assert env.step("7") == Step([user("lower")], 0.0, True)
    assert env.metrics() == {"found": 0.0}
    assert play("guess_number", 0, lambda _: "four")[0][2] == [["user", "That is no number."]]


def test_each_turn_of_color_square_earns_its_half_and_needs_its_own_image() -> None:
    answers = iter([play("color_square", 0, right)[0][1]["colors"][0], "up"])
    assert play("color_square", 0, lambda _: next(answers))[1:] == (0.5, {"first_right": 1.0, "second_right": 0.0})
    for seed in range(6):
        env = make("color_square")
        assert isinstance(env, ColorSquare)
        shown: list[Any] = [env.init(Prompt(seed))[0][0]["content"]]
        named = [env.demonstrate()]
        shown.append(env.step("pink").observations[0]["content"])
        named.append(env.demonstrate())
        assert [parts[0]["image"].getcolors() for parts in shown] == [[(64 * 64, COLORS[name])] for name in named]
        assert named[0] != named[1]
        assert env.step(named[1])[1:3] == (0.5, True)


def test_digit_sum_keeps_held_out_scans_apart() -> None:
    def scans(**options: Any) -> set[bytes]:
        episodes = [play("digit_sum", seed, right, **options)[0] for seed in range(60)]
        parts = [part for episode in episodes for messages in episode[::2] for _, parts in messages for part in parts]
        return {part for part in parts if isinstance(part, bytes)}

    training, held_out = scans(), scans(held_out=True)
    assert len(training) > 100
    assert not training & held_out


WHITE, BLACK, PLAYER, GOAL = (255, 255, 255), (0, 0, 0), (40, 60, 220), (30, 170, 60)


def maze_image(**options: Any) -> Image.Image:
    content = make("maze2d", **options).init(Prompt(1))[0][0]["content"]
    assert isinstance(content, list)
    assert content[1] == {"type": "text", "text": "Move:"}
    image: Image.Image = content[0]["image"]
    return image


def cells(image: Image.Image) -> dict[tuple[int, int], Any]:
    """The colours in the middle of each cell."""
    return {(x, y): image.getpixel((32 * x + 16, 32 * y + 16)) for x, y in product(range(image.width // 32), repeat=2)}


@pytest.mark.parametrize(("level", "side", "walls"), [("easy", 4, 2), ("medium", 6, 9), ("hard", 8, 20)])
def test_a_maze_is_a_image_of_its_cells(level: str, side: int, walls: int) -> None:
    image = maze_image(level=level)
    assert image.size == (32 * side, 32 * side)
    counts = {color: count // 32**2 for count, color in image.getcolors() or ()}
    assert counts == {WHITE: side**2 - walls - 2, BLACK: walls, PLAYER: 1, GOAL: 1}


@pytest.mark.parametrize("reach", [2, 1])
def test_the_player_s_view_is_centred_as_wide_as_its_reach_and_points_to_the_goal(reach: int) -> None:
    board = cells(maze_image())
    at = {color: cell for cell, color in board.items()}
    (px, py), (gx, gy) = at[PLAYER], at[GOAL]
    expected = {
        (x, y): board.get((px + x - reach, py + y - reach), BLACK) for x, y in product(range(2 * reach + 1), repeat=2)
    } | {tuple(reach + max(-reach, min(reach, away)) for away in (gx - px, gy - py)): GOAL}
    assert cells(maze_image(view="player", reach=reach)) == expected


def test_a_bump_ends_the_episode_unless_it_only_costs_a_move() -> None:
    assert play("maze2d", 0, lambda _: "up")[2]["moves"] <= 4
    assert play("maze2d", 0, lambda _: "up", bumps_end=False)[2] == {"reached": 0.0, "moves": 20.0}


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("mine", {}, "env='mine' is not registered"),
        (
            "no_such_module:Env",
            {},
            r"cannot import 'no_such_module': ModuleNotFoundError: No module named 'no_such_module'$",
        ),
        (
            "arithmetic",
            {"speed": 3},
            "env='arithmetic' does not take these options .*: got an unexpected keyword argument 'speed'",
        ),
        ("maze2d", {"level": "brutal"}, "level='brutal' must be one of easy, medium, hard"),
        ("maze2d", {"lines": 16}, "lines=16 must be at least 0 and less than 16, half a cell"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused(name: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make(name, **options)


def test_environments_are_registered_once() -> None:
    register("mine", "tinsmith_rl.envs.questions:Arithmetic")
    try:
        assert registered() == tuple(sorted([*SHIPPED, "mine"]))
        with pytest.raises(ConfigError, match="'mine' is registered already"):
            register("mine", find("maze2d"))
    finally:
        deregister("mine")
    assert list(registered()) == SHIPPED
