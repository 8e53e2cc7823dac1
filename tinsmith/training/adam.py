"""The hyper-parameters of AdamW."""

from dataclasses import dataclass

import torch


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

    def configure(self, adamw: torch.optim.AdamW) -> None:
        """Let the next step of an optimizer use these."""
        adamw.param_groups[0].update(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)
