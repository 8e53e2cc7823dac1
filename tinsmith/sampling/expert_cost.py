"""What it costs to hold experts in fewer bits (`--expert-dtype`), measured on a text.

The text goes through the served model, and through the layers of its files, which come to the device one at a time: a
second whole model would have no room there. The cost is the Kullback-Leibler divergence of the next token's
distribution, in nats a token: so much a sample's log-probability is off on average.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import kl_div, linear, log_softmax

from tinsmith.errors import ConfigError
from tinsmith.models.attention import PackedPlan
from tinsmith.models.base import BaseModel
from tinsmith.models.families import load_network, positions
from tinsmith.models.network import fuse_norms
from tinsmith.models.read_decoder import read_parts
from tinsmith.models.streamed_decoder import HostLayers, StreamedDecoder
from tinsmith.rendering.packing import pack
from tinsmith.rendering.rendered import RenderedInput

MOST = 512
"""Tokens of the text, at most."""
CHUNK = 64
"""Tokens whose logits are in memory at a time."""
TEXT = """\
The harbour town wakes before the sun does. By four the bakers have lit their ovens, and the first boats come in with \
their lamps still burning. Anna, who keeps the ledger of the fish market, writes down each catch: seventeen crates of \
herring, six of cod, and one enormous turbot that nobody wants to weigh. "It is too large for the scales," says her \
brother, "so we sell it by the length." She laughs, because he has said so every autumn since their father died.

Question: a train leaves at 9:40 and travels 126 km at 84 km/h. When does it arrive? Answer: it needs 126 / 84 = 1.5 \
hours, so it arrives at 11:10.

def moving_average(values, width):
    total = sum(values[:width])
    found = [total / width]
    for old, new in zip(values, values[width:]):
        total += new - old
        found.append(total / width)
    return found

Water expands when it freezes, which is why ice floats and pipes burst in winter. Most other liquids shrink; their \
solids sink. Die meisten Seen frieren deshalb von oben zu, und die Fische überleben am Grund. En hiver, la glace \
protège l'eau plus chaude qui se trouve en dessous.

{"name": "turbot", "weight_kg": 11.4, "sold": true, "tags": ["large", "flat"]}
"""


@dataclass(frozen=True)
class ExpertCost:
    """What quantized experts change, in nats a token."""

    tokens: int
    divergence: float
    """Of the next token's distribution, from that of the model in its files."""
    original: float
    """Mean negative log-likelihood of the text by the model in its files."""
    quantized: float
    """The same by the served model."""

    def __str__(self) -> str:
        return (
            f"{self.divergence:.2g} nats a token (divergence over {self.tokens} tokens of text; their negative "
            f"log-likelihood goes from {self.original:.4f} to {self.quantized:.4f})"
        )


def measure_cost(base: BaseModel) -> ExpertCost:
    """Measure the cost of a base model's quantized experts. Reads its files once more.

    Raises ConfigError for files that have become unreadable.
    """
    return cost_on(base, base.tokenizer(TEXT)["input_ids"][: min(MOST, base.max_context)])


@torch.no_grad()
def cost_on(base: BaseModel, tokens: list[int]) -> ExpertCost:
    """Measure the same on a text of these tokens."""
    if base.decoder is None or base.expert_format is None:
        raise ValueError(f"{base.name} has no quantized experts")
    source, family = base.tokenizer_id, base.family
    network = load_network(source, family, base.dtype).eval().requires_grad_(False)
    language_model = family.language_model(network)
    fuse_norms(language_model)
    parts = read_parts(family.model_type, language_model, base.layout)
    if parts is None:
        raise ConfigError(f"{source}: its files have changed; start the server again")
    layers = HostLayers(parts, language_model, base.layout, base.device)
    original = replace(base, decoder=StreamedDecoder((), base.decoder.last_norm, base.decoder.rope, layers))
    before, after = (_hidden(replace(each, deterministic=False), tokens) for each in (original, base))
    targets = torch.tensor(tokens[1:], device=base.device).unsqueeze(1)
    sums = torch.zeros(3, dtype=torch.float64, device=base.device)
    for start in range(0, len(targets), CHUNK):
        rows = slice(start, start + CHUNK)
        wanted, found = (log_softmax(linear(h[:-1][rows], base.lm_head).float(), -1) for h in (before, after))
        apart = kl_div(found, wanted, reduction="sum", log_target=True)
        sums += torch.stack([apart, *(-each.gather(1, targets[rows]).sum() for each in (wanted, found))])
    return ExpertCost(len(targets), *(sums / len(targets)).tolist())


def _hidden(base: BaseModel, tokens: list[int]) -> Tensor:
    text = RenderedInput(np.array(tokens, dtype=np.int32), (), (), positions(base.family, len(tokens), (), 1))
    row = pack([text], [None], base.device)
    return base.hidden_states(row, PackedPlan(row.lengths, base.device, base.dtype))
