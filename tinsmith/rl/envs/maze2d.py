"""Find the way to the goal: every turn shows the maze from above, the answer is `up`, `down`, `left` or `right`.

A cell is 32 pixels a side: white is free, black a wall, blue the player, green the goal. Reward 1 for the goal. A move into a wall or off
the board, and a word that is no move, end the episode (`bumps_end=False`: they only cost a move). Nothing but the picture says where
anything is. It shows the board, or with `view="player"` the 5 x 5 cells around the player: what is off the board is black, and a goal
farther away stands at the edge, in its direction.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tinsmith.errors import ConfigError
from tinsmith.rl.env import Env, Message, Prompt, Step, Teacher, generator, user, visible

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
LEVELS = {"easy": (4, 3), "medium": (6, 9), "hard": (8, 20)}
"""Level -> (cells a side, walls)."""
CELL = 32
REACH = 2
"""Cells that the player sees to every side."""
FREE, WALL, PLAYER, GOAL = (255, 255, 255), (0, 0, 0), (40, 60, 220), (30, 170, 60)

Cell = tuple[int, int]


@dataclass
class Maze2D(Env, Teacher):
    """A random maze of `level` in which the goal is at least `nearest` moves away and can be reached within `moves`."""

    level: Literal["easy", "medium", "hard"] = "easy"
    moves: int = 20
    nearest: int = 2
    bumps_end: bool = True
    view: Literal["board", "player"] = "board"

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ConfigError(f"level={self.level!r} must be one of {', '.join(LEVELS)}")
        if self.view not in ("board", "player"):
            raise ConfigError(f"view={self.view!r} must be board or player")

    def init(self, prompt: Prompt) -> tuple[list[Message], dict[str, Any]]:
        """Build a maze and show it."""
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
            return self._seen(0.0, self.bumps_end or self.made == self.moves)
        self.player = target
        self.reached = target == self.goal
        return self._seen(float(self.reached), self.reached or self.made == self.moves)

    def demonstrate(self) -> str:
        """A move on a shortest way."""
        distances = self._distances()
        return next(name for name, cell in self._neighbours(self.player) if distances.get(cell) == distances[self.player] - 1)

    def metrics(self) -> dict[str, float]:
        """Whether the goal was reached, and the moves made."""
        return {"reached": float(self.reached), "moves": float(self.made)}

    def _seen(self, reward: float, done: bool) -> Step:
        return Step([] if done else [self._view()], reward, done)

    def _view(self) -> Message:
        board = np.full((self.side, self.side, 3), FREE, dtype=np.uint8)
        for wall in self.walls:
            board[wall] = WALL
        board[self.goal], board[self.player] = GOAL, PLAYER
        if self.view == "player":
            board = self._around_player(board)
        return user(Image.fromarray(board.repeat(CELL, axis=0).repeat(CELL, axis=1)), "Move:")

    def _around_player(self, board: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """[5, 5, 3] of the board [side, side, 3]."""
        down, right = self.player
        wide = np.pad(board, ((REACH, REACH), (REACH, REACH), (0, 0)), constant_values=WALL[0])
        around = wide[down : down + 2 * REACH + 1, right : right + 2 * REACH + 1].copy()
        away = np.array(self.goal) - np.array(self.player)
        around[tuple(np.clip(away, -REACH, REACH) + REACH)] = GOAL
        return around

    def _free(self, cell: Cell) -> bool:
        return 0 <= cell[0] < self.side and 0 <= cell[1] < self.side and cell not in self.walls

    def _neighbours(self, cell: Cell) -> Iterator[tuple[str, Cell]]:
        for name, (down, right) in MOVES.items():
            neighbour = (cell[0] + down, cell[1] + right)
            if self._free(neighbour):
                yield name, neighbour

    def _distances(self) -> dict[Cell, int]:
        """Moves to the goal from every cell that can reach it."""
        distances, waiting = {self.goal: 0}, deque([self.goal])
        while waiting:
            cell = waiting.popleft()
            for _, neighbour in self._neighbours(cell):
                if neighbour not in distances:
                    distances[neighbour] = distances[cell] + 1
                    waiting.append(neighbour)
        return distances
