"""A client's choices for a model and an optimizer step, and the identity of weights: plain values without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoraShape:
    """Choices of a client at create_model: which parts of a model train, and the size of its adapter."""

    rank: int
    """Rank of the adapter. 0 means no adapter: the parameters themselves are trained (`models/full.py`)."""
    seed: int
    """Seed of the adapter's first weights. A model of rank 0 starts from the base and does not use it."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def differences(self, other: "LoraShape") -> str:
        """Describe the differences from `other`, except the seed, as arguments of create_lora_training_client."""
        names = ("rank", "train_attn", "train_mlp", "train_unembed")
        return ", ".join(
            f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != getattr(other, name)
        )


def rank_refusal(rank: int, largest: int) -> str:
    """Return the reason why a model of that rank is not made."""
    return (
        f"lora_config.rank={rank}: this server takes up to {largest}; "
        f"ask for less, or start it with --max-lora-rank {rank}"
    )


@dataclass(frozen=True)
class AdamSettings:
    """Hyper-parameters of one AdamW step (Loshchilov and Hutter, 2019), as torch.optim.AdamW names them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    """Decoupled: weights shrink by lr · weight_decay."""
    grad_clip_norm: float
    """Largest global L2 norm of the gradient; 0 or less switches clipping off."""


# The identity of weights that engine, workers, samplers and caches share.


@dataclass(frozen=True)
class WeightsRef:
    """Weights that never change. Two refs are equal if and only if they mean the same numbers."""

    base_model: str
    key: str
    """Unique to these weights: the request id of a snapshot's save, or a checkpoint's directory; empty for the base."""
    label: str
    """Name for clients: the base model's name, the path of a checkpoint, or the request id of a save."""
    inflight_of: str | None = None
    """The model whose newest weights these are, if inflight sampling follows it; None if nothing replaces them."""

    @classmethod
    def of_base(cls, base_model: str) -> "WeightsRef":
        return cls(base_model, "", base_model)
