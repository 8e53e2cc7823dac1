"""The table of memory in docs/scale.md is what `tinsmith plan` says."""

from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from benchmarks.gpu.shapes import configuration
from tests.extent import slow
from tests.models.published import SERVED
from tinsmith.config import Config, DistributedConfig, ModelsConfig
from tinsmith.memory.plan import Plan, make_plan

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
SHAPES = {"Qwen3-1.7B": "1.7B", "Qwen3-4B": "4B", "Qwen3-8B": "8B", "Qwen3.6-27B": "Qwen3.6-27B"}
"""Names in the table, and what `benchmarks/gpu/shapes.py` calls them."""
CARDS = {"48 GB": 44.5, "80 GB": 79.0, "141 GB": 139.0}
"""GiB that CUDA shows of them."""
RANK = 32


def planned(shape: str, gib: float, workers: int, directory: Path) -> Plan:
    configuration(shape).save_pretrained(directory)
    return make_plan(Config(base_models=[f"m={directory}"], distributed=DistributedConfig(workers=workers)), RANK, gib)


def whole(plan: Plan) -> str:
    """What workers train that hold the whole model: cells of the first table."""
    modes = [each for each in plan.modes if each.mode in ("one GPU", "replicas")]
    cells = [f"{each.longest_sequence:,}, {each.cache_bytes / 2**30:.0f} GiB" if each.fits else "-" for each in modes]
    return " | ".join([f"{modes[0].weight_bytes / 2**30:.1f} GiB", *cells])


def sharded(plan: Plan) -> str:
    """What each of those holds and trains that divide the layers: a cell of the second table."""
    mode, _ = (each for each in plan.modes if each.mode == "sharded")
    return f"{mode.weight_bytes / 2**30:.1f} GiB, {mode.longest_sequence:,}" if mode.fits else "-"


def divided_all(plan: Plan) -> str:
    """What a model that trains all weights takes of each of those, and the sequences that train: a cell of the third
    table."""
    _, mode = (each for each in plan.modes if each.mode == "sharded")
    return f"{mode.model_bytes / 2**30:.1f} GiB, {mode.longest_sequence:,}" if mode.fits else "-"


def together(plan: Plan) -> str:
    """The longest sequence of all workers: a cell of the fourth table."""
    return f"{plan.modes[0].longest_together:,}"


@pytest.mark.parametrize("card", ["80 GB", *slow("141 GB")])  # whose rows differ in the memory alone
@pytest.mark.parametrize("name", SHAPES)
def test_the_tables_are_what_the_plan_says(name: str, card: str, tmp_path: Path) -> None:
    """The number of replicas changes nothing of what each has room for."""
    page = PAGE.read_text(encoding="utf-8").splitlines()
    plans = {workers: planned(SHAPES[name], CARDS[card], workers, tmp_path) for workers in (1, 2, 4, 8)}
    assert len({whole(plan) for plan in plans.values()}) == 1
    kinds = [] if name == "Qwen3-1.7B" else [sharded, divided_all]  # which fits on any card
    if name == "Qwen3.6-27B":
        kinds.append(together)
    else:
        assert together(plans[2]) == "262,144"
    rows = [" | ".join(cell(plans[workers]) for workers in (2, 4, 8)) for cell in kinds]
    if card == "80 GB" or name == "Qwen3.6-27B":  # of the others the first table has no second row
        rows.append(whole(plans[1]))
    assert [row for row in rows if f"| {name} | {card} | {row} |" not in page] == []


@pytest.mark.parametrize(
    ("name", "model", "expert_dtype", "card"),
    [
        ("Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", "model", "80 GB"),
        ("Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", "model", "141 GB"),
        ("Qwen3.6-35B-A3B, fp8 experts", "Qwen/Qwen3.6-35B-A3B", "fp8", "80 GB"),
        ("Qwen3.6-35B-A3B", "Qwen/Qwen3.6-35B-A3B", "model", "141 GB"),
        ("gpt-oss-20b, mxfp4 experts", "openai/gpt-oss-20b", "mxfp4", "48 GB"),
    ],
)
def test_the_rows_of_mixtures_are_what_the_plan_says(
    name: str, model: str, expert_dtype: str, card: str, tmp_path: Path
) -> None:
    """All of their weights train on none of these cards."""
    config = SERVED[model].config
    if model == "Qwen/Qwen3-30B-A3B":
        config = Qwen3MoeConfig(**config.to_dict() | {"max_position_embeddings": 262_144})
    config.save_pretrained(tmp_path)
    models = ModelsConfig(dtype="bfloat16", expert_dtype=expert_dtype)
    plan = make_plan(Config(base_models=[f"m={tmp_path}"], models=models), RANK, CARDS[card])
    assert plan.cache is not None
    row = [
        f"{plan.weight_bytes / 2**30:.1f} GiB",
        f"{plan.longest_sequence.tokens:,}, {plan.cache.bytes / 2**30:.0f} GiB",
    ]
    assert plan.full_parameters is None or not plan.full_parameters.fits
    assert f"| {name} | {card} | {' | '.join([*row, '-', '-', '-'])} |" in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_table_of_the_readme_is_a_part_of_the_first_table() -> None:
    """Each row names the way that keeps most of a model's state on the GPU and fits."""
    states = ["", " with `--full-state compact`", " with `--full-state compact-host`"]
    full = rows_of(PAGE)
    short = rows_of(PAGE.parents[1] / "README.md")
    assert len(short) > 5
    for row, (base, lora, all_weights) in short.items():
        found, trains, *ways = full[row]
        assert (base, lora) == (found, trains.rpartition(", ")[0])
        expected = [way.rpartition(", ")[0] + state for way, state in zip(ways, states, strict=True) if way != "-"]
        assert all_weights == (expected[0] if expected else "-"), row


def rows_of(page: Path) -> dict[tuple[str, str], list[str]]:
    """The other cells of each row of the first table in a page that begins with a model and a card."""
    _, _, table = page.read_text(encoding="utf-8").partition("| model | card | base model |")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n\n")[0].splitlines()[2:]]
    return {(row[0], row[1]): row[2:] for row in rows}
