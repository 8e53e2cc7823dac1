"""What transformers says about weights that left the server."""

from typing import Any

import numpy as np
import torch
from tinker import types

from tests.acceptance.talking import text_input, with_inputs

TOKENS = text_input(5, 10).to_ints()
ITEM = with_inputs(types.ModelInput.from_ints(TOKENS[:-1]), target_tokens=TOKENS[1:], weights=[1.0] * 9)
"""The same tokens as a datum: its scores are what `transformers_logprobs` must give."""


@torch.no_grad()
def transformers_logprobs(network: Any) -> np.ndarray:
    """Log-probabilities of TOKENS[1:]."""
    logits = network.eval()(input_ids=torch.tensor([TOKENS[:-1]])).logits[0]
    logprobs: np.ndarray = logits.log_softmax(-1).gather(-1, torch.tensor(TOKENS[1:]).unsqueeze(-1)).squeeze(-1).numpy()
    return logprobs
