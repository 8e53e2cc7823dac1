"""The table of memory in docs/scale.md is what `tinsmith plan` says."""

from pathlib import Path

import pytest

from benchmarks.gpu.shapes import configuration
from tinsmith.config import Config, DistributedConfig
from tinsmith.modes import ModePlan
from tinsmith.plan import make_plan

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
SHAPES = {"Qwen3-1.7B": "1.7B", "Qwen3-4B": "4B", "Qwen3-8B": "8B", "Qwen3.6-27B": "Qwen3.6-27B"}
"""Names in the table, and what `benchmarks/gpu/shapes.py` calls them."""
CARDS = {"80 GB": 79.0, "141 GB": 139.0}
"""GiB that CUDA shows of them."""
RANK = 32


def whole(shape: str, gib: float, workers: int, directory: Path) -> list[ModePlan]:
    """What workers train that hold the whole model."""
    configuration(shape).save_pretrained(directory)
    plan = make_plan(Config(base_models=[f"m={directory}"], distributed=DistributedConfig(workers=workers)), RANK, gib)
    return [each for each in plan.modes if each.mode in ("one GPU", "replicas")]


def cell(mode: ModePlan) -> str:
    return f"{mode.longest_sequence:,}, {mode.cache_bytes / 2**30:.0f} GiB" if mode.fits else "-"


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_of_replicas_is_the_plan(name: str, tmp_path: Path) -> None:
    """Their number changes nothing of what each has room for."""
    page = PAGE.read_text(encoding="utf-8")
    for card, gib in CARDS.items():
        alone, eight = (whole(SHAPES[name], gib, workers, tmp_path) for workers in (1, 8))
        assert list(map(cell, alone)) == list(map(cell, eight))
        row = f"| {name} | {card} | {alone[0].weight_bytes / 2**30:.1f} GiB | {' | '.join(map(cell, eight))} |"
        assert row in page, row
