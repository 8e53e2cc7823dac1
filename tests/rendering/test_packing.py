"""A packed row holds each sequence as it is alone."""

import numpy as np
import torch

from tests.bases import picture_chunks, random_tokens, renderer
from tinsmith.models.base import BaseModel
from tinsmith.rendering.packing import pack


def test_tokens_and_positions_are_those_of_each_sequence_alone(vision_base: BaseModel) -> None:
    """Rotary positions that went on from one sequence to the next would change no result but for rounding, which grows with them."""
    render = renderer(vision_base)
    chunks = ([random_tokens(1, 5)], picture_chunks(vision_base, 2, 4), [random_tokens(3, 1)], picture_chunks(vision_base, 4, 3, width=64))
    sequences = [render.render(own) for own in chunks]
    row = pack(sequences, [None] * len(sequences), torch.device("cpu"))
    parts = zip(sequences, row.token_ids.split(row.lengths), row.positions.split(row.lengths, dim=1), strict=True)
    for sequence, token_ids, positions in parts:
        np.testing.assert_array_equal(token_ids.numpy(), sequence.token_ids)
        assert torch.equal(positions, sequence.positions)
        assert (positions[:, 0] == 0).all()
    assert (row.token_ids[row.picture_index] == render.placeholder).all()
    assert len(row.picture_index) == int((row.token_ids == render.placeholder).sum())
    assert [picture.sha256 for picture in row.pictures] == [picture.sha256 for each in sequences for picture in each.pictures]
