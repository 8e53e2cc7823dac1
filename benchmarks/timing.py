"""Timing two ways of doing one thing against each other in one run, and the one line that a benchmark prints.

A figure is a ratio, or the median of many repeats, so that other work on the machine moves it little.
"""

import statistics
import time
from collections.abc import Callable


def seconds(action: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def in_turn(*actions: Callable[[], object], rounds: int = 3, repeats: int = 1) -> list[float]:
    """Median over `rounds` of each action's seconds per call, averaged over `repeats` calls, after one warm-up call."""
    for action in actions:
        action()
    measured: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds):
        for action, times in zip(actions, measured, strict=True):
            times.append(sum(seconds(action) for _ in range(repeats)) / repeats)
    return [statistics.median(times) for times in measured]


def report(figure: str, measured: float, wanted: str, **details: float) -> None:
    """The line of one figure: `figure=forward_latency_ms measured=7.4 wanted="at most 8 ms" p90=9.1`."""
    rest = "".join(f" {name}={value:.4g}" for name, value in details.items())
    print(f'figure={figure} measured={measured:.4g} wanted="{wanted}"{rest}', flush=True)
