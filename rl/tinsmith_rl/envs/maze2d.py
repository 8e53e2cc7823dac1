"""Find the way to the goal of a maze: each turn shows an image, and the answer is `up`, `down`, `left` or `right`.

A cell is 32 pixels wide and high: white is free, black a wall, blue the player, green the goal. Reward 1 for reaching
the goal. A move into a wall or off the board, and an answer that is no move, end the episode (`bumps_end=False`: they
only cost a move). Only the image says where everything is. It shows the whole board, or with `view="player"` the cells
up to `reach` cells away from the player: cells off the board are black, and a goal farther away appears at the edge, in
its direction. `lines` is the width in pixels of black lines on those sides of each free cell that lead into a wall or
off the board, so that the pixels of a cell say where one can go from it.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tinsmith_rl.env import ChatMessage, Env, Prompt, Step, Teacher, generator, user, visible
from tinsmith_rl.errors import ConfigError

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
LEVELS = {"easy": (4, 2), "medium": (6, 9), "hard": (8, 20)}
"""Level -> (cells on each side, walls)."""
CELL = 32
FREE, WALL, PLAYER, GOAL = (255, 255, 255), (0, 0, 0), (40, 60, 220), (30, 170, 60)

Cell = tuple[int, int]


@dataclass
class Maze2D(Env, Teacher):
    """A random maze of `level`, whose goal is at least `nearest` and at most `moves` moves away."""

    level: Literal["easy", "medium", "hard"] = "easy"
    moves: int = 20
    nearest: int = 2
    bumps_end: bool = True
    view: Literal["board", "player"] = "board"
    reach: int = 2
    lines: int = 0

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ConfigError(f"level={self.level!r} must be one of {', '.join(LEVELS)}")
        if self.view not in ("board", "player"):
            raise ConfigError(f"view={self.view!r} must be board or player")
        if self.reach < 1:
            raise ConfigError(f"reach={self.reach} must be at least 1")
        if not 0 <= self.lines < CELL // 2:
            raise ConfigError(f"lines={self.lines} must be at least 0 and less than {CELL // 2}, half a cell")

    def init(self, prompt: Prompt) -> tuple[list[ChatMessage], dict[str, Any]]:
        """Draw mazes until the goal of one is as far away as it should be, and show that."""
        self.side, walls = LEVELS[self.level]
        random = generator(prompt)
        self.made, self.reached = 0, False
        while True:
            cells = [divmod(int(cell), self.side) for cell in random.permutation(self.side**2)[: walls + 2]]
            self.player, self.goal, self.walls = cells[0], cells[1], frozenset(cells[2:])
            distance = self._distances().get(self.player)
            if distance is not None and self.nearest <= distance <= self.moves:
                return [self._view()], {"distance": distance}

    def step(self, text: str) -> Step:
        """Make a move."""
        self.made += 1
        move = MOVES.get(visible(text).lower())
        target = None if move is None else (self.player[0] + move[0], self.player[1] + move[1])
        if target is None or not self._free(target):
            return self._reply(0.0, self.bumps_end or self.made == self.moves)
        self.player = target
        self.reached = target == self.goal
        return self._reply(float(self.reached), self.reached or self.made == self.moves)

    def demonstrate(self) -> str:
        """A move on a shortest path."""
        distances = self._distances()
        return next(
            name for name, cell in self._neighbours(self.player) if distances.get(cell) == distances[self.player] - 1
        )

    def metrics(self) -> dict[str, float]:
        """Whether the goal was reached, and how many moves were made."""
        return {"reached": float(self.reached), "moves": float(self.made)}

    def _reply(self, reward: float, done: bool) -> Step:
        return Step([] if done else [self._view()], reward, done)

    def _view(self) -> ChatMessage:
        cells = np.full((self.side, self.side, 3), FREE, dtype=np.uint8)
        for wall in self.walls:
            cells[wall] = WALL
        cells[self.goal], cells[self.player] = GOAL, PLAYER
        pixels = cells.repeat(CELL, axis=0).repeat(CELL, axis=1)
        self._draw_lines(pixels)
        return user(Image.fromarray(self._around_player(pixels) if self.view == "player" else pixels), "Move:")

    def _draw_lines(self, pixels: NDArray[np.uint8]) -> None:
        """Draw `lines` into the board [height, width, 3], in place."""
        sides = {
            "up": np.s_[: self.lines, :],
            "down": np.s_[CELL - self.lines :, :],
            "left": np.s_[:, : self.lines],
            "right": np.s_[:, CELL - self.lines :],
        }
        for cell in product(range(self.side), range(self.side)):
            if self._free(cell):
                free = {name for name, _ in self._neighbours(cell)}
                for name in sides.keys() - free:
                    _square(pixels, cell)[sides[name]] = WALL

    def _around_player(self, board: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """[height, width, 3] the part of the board that the player sees, from the whole board of the same form."""
        margin = self.reach * CELL
        wide = np.pad(board, ((margin, margin), (margin, margin), (0, 0)), constant_values=WALL[0])
        down, right = self.player
        seen = wide[down * CELL :, right * CELL :][: 2 * margin + CELL, : 2 * margin + CELL].copy()
        away = np.array(self.goal) - np.array(self.player)
        if np.abs(away).max() > self.reach:
            row, column = np.clip(away, -self.reach, self.reach) + self.reach
            _square(seen, (int(row), int(column)))[:] = GOAL
        return seen

    def _free(self, cell: Cell) -> bool:
        return 0 <= cell[0] < self.side and 0 <= cell[1] < self.side and cell not in self.walls

    def _neighbours(self, cell: Cell) -> Iterator[tuple[str, Cell]]:
        for name, (down, right) in MOVES.items():
            neighbour = (cell[0] + down, cell[1] + right)
            if self._free(neighbour):
                yield name, neighbour

    def _distances(self) -> dict[Cell, int]:
        """Number of moves to the goal, from each cell that can reach it."""
        distances, waiting = {self.goal: 0}, deque([self.goal])
        while waiting:
            cell = waiting.popleft()
            for _, neighbour in self._neighbours(cell):
                if neighbour not in distances:
                    distances[neighbour] = distances[cell] + 1
                    waiting.append(neighbour)
        return distances


def _square(pixels: NDArray[np.uint8], cell: Cell) -> NDArray[np.uint8]:
    """The part of an image [height, width, 3] that shows a cell, as a view: writing to it writes to the image."""
    row, column = cell
    return pixels[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
