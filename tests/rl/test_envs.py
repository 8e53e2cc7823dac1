"""The shipped environments: the same episode from the same seed, the right answers earn everything, wrong ones nothing."""

import io
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tinsmith.errors import ConfigError
from tinsmith.rl.config import load
from tinsmith.rl.env import ChatMessage, Env, Prompt, Step, Teacher, deregister, find, make, register, registered, user
from tinsmith.rl.envs.questions import COLORS, ColorSquare

MAZE_EXAMPLE = Path(__file__).parents[2] / "examples" / "rl" / "maze2d.yaml"
SHIPPED = ["arithmetic", "color_square", "digit_sum", "guess_number", "maze2d"]


def fingerprint(messages: list[ChatMessage]) -> list[Any]:
    """Messages with pictures as PNG bytes, so that they can be compared."""

    def part(item: dict[str, Any]) -> Any:
        if item["type"] == "text":
            return item["text"]
        file = io.BytesIO()
        item["image"].save(file, "PNG")
        return file.getvalue()

    contents = [message["content"] for message in messages]
    return [[m["role"], c if isinstance(c, str) else [part(item) for item in c]] for m, c in zip(messages, contents, strict=True)]


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


def test_what_was_thought_is_not_part_of_the_answer() -> None:
    assert play("arithmetic", 3, lambda env: f"<think>seven, no</think>\n\n{right(env)}")[1] == 1.0
    assert play("arithmetic", 3, lambda env: f"{right(env)} I think")[1] == 0.0


def test_arithmetic_asks_what_the_seed_says() -> None:
    env = make("arithmetic", largest=20, terms=3)
    messages, metadata = env.init(Prompt(5))
    numbers = np.random.default_rng([5]).integers(21, size=3)
    assert messages == [{"role": "user", "content": f"What is {numbers[0]} + {numbers[1]} + {numbers[2]}?"}]
    assert metadata == {"answer": int(numbers.sum())}


def test_guess_number_says_where_the_number_lies() -> None:
    env = make("guess_number", largest=7)
    number = env.init(Prompt(0))[1]["number"]
    assert number not in (1, 7)
    assert env.step("1") == Step([user("higher")], 0.0, False)
    assert env.step("7") == Step([user("lower")], 0.0, False)
    assert env.step("7") == Step([user("lower")], 0.0, True)
    assert env.metrics() == {"found": 0.0}
    assert play("guess_number", 0, lambda _: "four")[0][2] == [["user", "That is no number."]]


def test_each_turn_of_color_square_earns_its_half_and_needs_its_own_picture() -> None:
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
    def pictures(**options: Any) -> set[bytes]:
        shown = [play("digit_sum", seed, right, **options)[0] for seed in range(200)]
        return {
            part for episode in shown for messages in episode[::2] for _, parts in messages for part in parts if isinstance(part, bytes)
        }

    training, held_out = pictures(), pictures(held_out=True)
    assert len(training) > 400
    assert not training & held_out


@pytest.mark.parametrize(("level", "side"), [("easy", 4), ("medium", 6), ("hard", 8)])
def test_a_maze_is_a_picture_of_its_cells(level: str, side: int) -> None:
    picture = maze_picture(level=level)
    assert picture.size == (32 * side, 32 * side)
    counts = {color: count // 32**2 for count, color in picture.getcolors() or ()}
    walls = {"easy": 2, "medium": 9, "hard": 20}[level]
    assert counts == {(255, 255, 255): side**2 - walls - 2, (0, 0, 0): walls, (40, 60, 220): 1, (30, 170, 60): 1}


def maze_picture(**options: Any) -> Image.Image:
    content = make("maze2d", **options).init(Prompt(1))[0][0]["content"]
    assert isinstance(content, list)
    assert content[1] == {"type": "text", "text": "Move:"}
    picture: Image.Image = content[0]["image"]
    return picture


def test_the_player_s_view_is_centred_and_points_to_the_goal() -> None:
    board, around = (maze_picture(view=view) for view in ("board", "player"))
    places = {color: (x, y) for x in range(4) for y in range(4) for color in [board.getpixel((32 * x, 32 * y))]}
    (px, py), (gx, gy) = places[(40, 60, 220)], places[(30, 170, 60)]
    assert around.size == (160, 160)
    assert around.getpixel((70, 70)) == (40, 60, 220)
    x, y = (max(-2, min(2, away)) for away in (gx - px, gy - py))
    assert around.getpixel((70 + 32 * x, 70 + 32 * y)) == (30, 170, 60)


def test_the_player_sees_as_far_as_its_reach() -> None:
    wide, narrow = maze_picture(view="player"), maze_picture(view="player", reach=1)
    assert narrow.size == (96, 96)
    cells = {(x, y): narrow.getpixel((32 * x + 16, 32 * y + 16)) for x in range(3) for y in range(3)}
    farther = {(x, y): wide.getpixel((32 * x + 48, 32 * y + 48)) for x in range(3) for y in range(3)}
    goal = next(cell for cell, color in cells.items() if color == (30, 170, 60))
    assert {cell: color for cell, color in cells.items() if cell != goal} == {c: color for c, color in farther.items() if c != goal}


def test_lines_are_drawn_where_a_cell_cannot_be_left() -> None:
    plain, lined = (maze_picture(lines=lines) for lines in (0, 5))
    black = {(x, y) for x in range(4) for y in range(4) if plain.getpixel((32 * x, 32 * y)) == (0, 0, 0)}
    for x, y in product(range(4), repeat=2):
        middle = plain.getpixel((32 * x + 16, 32 * y + 16))
        for right, down in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            blocked = (x + right, y + down) in black or not (0 <= x + right < 4 and 0 <= y + down < 4)
            outermost, inside = (
                lined.getpixel((32 * x + 16 + right * off - (right < 0), 32 * y + 16 + down * off - (down < 0))) for off in (15, 9)
            )
            assert outermost == ((0, 0, 0) if blocked else middle)
            assert inside == middle


def test_a_bump_ends_the_episode_unless_it_only_costs_a_move() -> None:
    def against_the_border(_: Env) -> str:
        return "up"

    assert play("maze2d", 0, against_the_border)[2]["moves"] <= 4
    assert play("maze2d", 0, against_the_border, bumps_end=False)[2] == {"reached": 0.0, "moves": 20.0}


@pytest.mark.parametrize("options", [{}, load(MAZE_EXAMPLE).env.options], ids=["default", "example"])
def test_a_random_player_seldom_finds_the_goal(options: dict[str, Any]) -> None:
    random = np.random.default_rng(0)
    moves = ["up", "down", "left", "right"]
    rewards = [play("maze2d", seed, lambda _: moves[random.integers(4)], **options)[1] for seed in range(400)]
    assert np.mean(rewards) <= 0.2


def test_environments_are_registered_made_and_deregistered() -> None:
    assert list(registered()) == SHIPPED
    register("mine", "tinsmith.rl.envs.questions:Arithmetic")
    try:
        assert registered() == ("arithmetic", "color_square", "digit_sum", "guess_number", "maze2d", "mine")
        with pytest.raises(ConfigError, match="'mine' is registered already"):
            register("mine", find("maze2d"))
        assert type(make("mine", largest=3)) is type(make("tinsmith.rl.envs.questions:Arithmetic"))
    finally:
        deregister("mine")
    with pytest.raises(ConfigError, match="'mine' is not registered; known are arithmetic, color_square"):
        deregister("mine")
    with pytest.raises(ConfigError, match="env='mine' is not registered"):
        make("mine")
    with pytest.raises(ConfigError, match=r"cannot import 'no_such_module': ModuleNotFoundError: No module named 'no_such_module'$"):
        make("no_such_module:Env")
    with pytest.raises(ConfigError, match=r"env='arithmetic' does not take these options .*: got an unexpected keyword argument 'speed'"):
        make("arithmetic", speed=3)
    with pytest.raises(ConfigError, match="level='brutal' must be one of easy, medium, hard"):
        make("maze2d", level="brutal")
    with pytest.raises(ConfigError, match="reach=0 must be at least 1"):
        make("maze2d", reach=0)
    with pytest.raises(ConfigError, match="lines=16 must be at least 0 and less than 16, half a cell"):
        make("maze2d", lines=16)
