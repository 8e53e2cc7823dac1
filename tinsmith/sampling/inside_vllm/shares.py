"""Which part of an adapter's matrix each of the workers holds that a model is divided over (tensor parallel)."""

from torch import Tensor


def share_of(whole: Tensor, slot: Tensor, rank: int, ranks: int) -> Tensor:
    """The part of a whole matrix that is to lie in a worker's slot, whose size says along which dimension it was divided.

    A slot has room for adapters of any rank, so it may be larger. Heads of keys and values that are fewer than workers are on several.
    """
    share = whole
    for dimension, (size, room) in enumerate(zip(whole.shape, slot.shape, strict=True)):
        if room < size:
            shares = size // room
            share = share.narrow(dimension, rank * shares // ranks * room, room)
    return share
