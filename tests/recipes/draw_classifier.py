"""Draw the curves of `vlm_classifier.train` from its metrics.jsonl: what it learns on the scans it sees and on the
scans it never sees.

    python -m tests.recipes.draw_classifier recipes-output docs/vlm_classifier.svg

takes the metrics that `make test-all`, which trains longer than `make test-recipes`, has left behind.
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes


def draw(rows: list[dict[str, Any]], image: Path) -> None:
    """Train and test NLL per token of the answer above, accuracy of the sampled answers below, by step."""
    plt.rcParams["svg.hashsalt"] = image.stem  # the same curves give the same file
    figure, (loss, score) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    _plot(loss, rows, "train_mean_nll", "train (mirrored at random)", linewidth=0.8)
    _plot(loss, rows, "test/nll", "held out", marker="o")
    loss.set(ylabel="NLL per token of the answer", yscale="log")
    loss.legend()
    _plot(score, rows, "accuracy", "held out", marker="o", color="C1")
    score.axhline(0.9, color="grey", linewidth=0.8, linestyle="--")
    score.set(xlabel="step", ylabel="accuracy", ylim=(0, 1.02))
    figure.suptitle("tinker_cookbook.recipes.vlm_classifier.train on 1,500 digit scans, tiny Qwen3-VL")
    figure.savefig(image, metadata={"Date": None})
    plt.close(figure)


def _plot(axes: Axes, rows: list[dict[str, Any]], metric: str, label: str, **style: Any) -> None:
    points = [(row["step"], row[metric]) for row in rows if metric in row]
    axes.plot(*zip(*points, strict=True), label=label, **style)


def main() -> None:
    """Find the metrics below the first argument, draw them to the second."""
    output, image = map(Path, sys.argv[1:])
    (metrics,) = output.rglob("vlm_classifier/*/metrics.jsonl")
    draw([json.loads(line) for line in metrics.read_text().splitlines()], image)


if __name__ == "__main__":
    main()
