"""Positions against transformers' own, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.bases import load, picture_chunks, random_tokens, renderer
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel, pick_device
from tinsmith.models.families import family_of, positions


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_equal_transformers(family_base: Callable[[str], BaseModel], family: str) -> None:
    base = family_base(family)
    chunks = [*picture_chunks(base, 1, 5, width=64, height=160), *picture_chunks(base, 3, 4, width=224, height=32), random_tokens(9, 3)]
    rendered = renderer(base).render(chunks)
    ids = torch.from_numpy(rendered.token_ids).long().unsqueeze(0)
    grids = torch.tensor([picture.grid_thw for picture in rendered.pictures])
    expected, delta = base.network.model.get_rope_index(ids, (ids == base.config.image_token_id).int(), image_grid_thw=grids)
    assert torch.equal(rendered.positions, expected[:, 0])
    assert rendered.next_position == len(rendered) + delta.item()


def test_text_positions_count_up() -> None:
    assert positions(family_of("qwen3"), 4, (), 1).tolist() == [[0, 1, 2, 3]]
    assert positions(family_of("qwen3_vl"), 3, (), 2).tolist() == [[0, 1, 2]] * 3


def test_an_unknown_family_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="model type 'gpt2' is not supported; supported are llama, mistral"):
        family_of("gpt2")


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="use auto, cpu, cuda or cuda:N"):
        pick_device("tpu")
    with pytest.raises(ConfigError, match=r"this machine has \d+ CUDA devices"):
        pick_device("cuda:99")


def test_a_context_beyond_the_models_own_is_refused(family_dir: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="max_context=99999999 is more than tiny was built for"):
        load(family_dir("qwen3"), max_context=99999999)
    assert load(family_dir("qwen3"), max_context=77).max_context == 77
