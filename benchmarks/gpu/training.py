"""Training on one GPU through `Backend.run_pass` and `optim_step`: tokens per second and memory, beside rivals.

Published shapes with random weights, bfloat16. A step is forward, backward and AdamW. The rivals are transformers with
PEFT, without and with Liger's kernels, all in bfloat16. Parts:

- card      the card's own matmul rate and copy bandwidth, which the other parts need
- lora      Qwen3-4B, LoRA of rank 32, 4 and 8 sequences of 1,024 tokens, with the share of the card's matmul rate
- warm      the first step of the 4 sequences in a process that finds everything compiled
- unembed   the same 4 sequences, the LM head in the adapter too, which is the SDK's default
- recompute 8 sequences in no more memory than Liger took
- long      one sequence of 32,768 and one of 131,072 tokens; Liger with checkpointing at 32,768
- mixed     32 sequences of 128 to 4,096 tokens, against micro-batches of one
- tenants   eight LoRA models of ranks 8 to 64, 4 sequences each, against one model of rank 64 with all 32
- images    Qwen3-VL-4B, 8 sequences of a new 512² image and 256 tokens; images are processed beforehand on both sides
- full      Qwen3-1.7B, all weights, 8 sequences of 1,024; transformers in bfloat16, and in float32 under autocast
- hybrid    Qwen3.5-4B, LoRA of rank 32, 4 and 8 sequences of 1,024
- chat      Qwen3.5-4B, 128 sequences of 64 to 8,192 tokens, whose lengths are those of chats
- hybrid_long  Qwen3.5-4B, one sequence of 65,536 tokens
- experts  16 layers of Qwen3-30B-A3B, LoRA of rank 32 on attention and experts, 8 sequences of 1,024 and 4 of 4,096;
           the 8 also with experts of 8 and 4 bits
- experts_whole  all of Qwen3-30B-A3B, 4 sequences of 4,096, and of Qwen3.6-35B-A3B, also with experts of 8 bits
- experts_tenants  16 layers of Qwen3-30B-A3B, eight LoRA models of ranks 8 to 64, 2 sequences each, against one of 64
- gpt_oss   gpt-oss-20b, LoRA of rank 32, 8 sequences of 1,024
- deterministic  the 4 sequences of `lora` with the option of that name, against those without

    python -m benchmarks.gpu.training --parts card,lora --output benchmarks/results/training.txt
    TINY=1 python -m benchmarks.gpu.training
"""

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.measuring import (
    TINY,
    Figures,
    begin,
    card,
    figure,
    isolated,
    peak_memory,
    ratio,
    release,
    say,
    timed,
)
from benchmarks.gpu.rivals import Inputs, lora_network, step_of, texts
from benchmarks.gpu.shapes import base_of, configuration, flops_per_token, network_of
from tinsmith.config import TrainingConfig
from tinsmith.models.base import BaseModel
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.training.backend import DatumWork, LocalBackend
from tinsmith.training.losses import LOSSES

PARTS = (
    "card",
    "lora",
    "warm",
    "unembed",
    "recompute",
    "long",
    "mixed",
    "tenants",
    "images",
    "full",
    "hybrid",
    "chat",
    "hybrid_long",
    "experts",
    "experts_whole",
    "experts_tenants",
    "gpt_oss",
    "deterministic",
)
SIDES = ("ours", "peft", "liger", "transformers")
LENGTH = 32 if TINY else 1024
LONG = (64, 256) if TINY else (32768, 131072)
HYBRID_LONG = 256 if TINY else 65536
CHAT = (8, 128) if TINY else (64, 8192)
MIXED = (8, 128) if TINY else (128, 4096)
RANK = 32
RANKS = tuple(range(8, 65, 8))
ADAM = AdamSettings(lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0)

Batch = list[NDArray[np.int32]]


def batch_of(lengths: Sequence[int]) -> Batch:
    """Random token ids, one sequence for each length."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, 1500, length).astype(np.int32) for length in lengths]


def mixed_lengths() -> list[int]:
    """Those of 32 sequences."""
    return [int(n) for n in np.random.default_rng(1).integers(MIXED[0], MIXED[1] + 1, 32)]


def chat_lengths() -> list[int]:
    """Those of 128 sequences, log-normal with a mean of about 800 tokens."""
    drawn = np.random.default_rng(2).lognormal(np.log(CHAT[0] * 8), 0.9, 128)
    return [int(n) for n in drawn.clip(*CHAT)]


def datum(model_id: str, rendered: RenderedInput) -> DatumWork:
    """Next-token prediction on all tokens but the last, whose target is unknown."""
    targets = np.append(rendered.token_ids[1:], 0).astype(np.int64)
    weights = np.append(np.ones(len(targets) - 1), 0).astype(np.float32)
    return DatumWork(model_id, rendered, targets, LOSSES["cross_entropy"], {"weights": weights})


def text_datum(model_id: str, tokens: NDArray[np.int32]) -> DatumWork:
    """A datum of text."""
    return datum(model_id, RenderedInput(tokens, (), (), torch.arange(len(tokens)).unsqueeze(0)))


def train(backend: LocalBackend, passes: Sequence[Sequence[DatumWork]], models: Sequence[str]) -> None:
    """One step: all passes, then the optimizer of each model."""
    for work in passes:
        outcome = backend.run_pass(work, backward=True)
        if outcome.failures:
            raise RuntimeError(f"out of memory or worse: {outcome.failures}")
    for model in models:
        backend.optim_step(model, ADAM)


def filled(work: Sequence[DatumWork], most: int) -> list[list[DatumWork]]:
    """The work in passes of at most `most` tokens, in order, as the engine fills them."""
    passes: list[list[DatumWork]] = []
    room = 0
    for item in work:
        if not passes or len(item.rendered) > room:
            passes.append([])
            room = most
        passes[-1].append(item)
        room -= len(item.rendered)
    return passes


def backend_of(base: BaseModel, ranks: dict[str, int], unembed: bool = False) -> LocalBackend:
    """A backend with a model of each name; rank 0 trains all weights, LoRA the LM head only if asked for."""
    backend = LocalBackend(base, TrainingConfig())
    for seed, (name, rank) in enumerate(ranks.items()):
        backend.create_model(name, LoraShape(rank, seed=seed, train_unembed=unembed or rank == 0))
    return backend


def measured(
    config: Any, lengths: Sequence[int], step: Callable[[], object], matmul: float, all_weights: bool = False
) -> Figures:
    """Tokens per second, share of the matmul rate and memory of a step on sequences of these lengths."""
    timing = timed(step)
    rate = sum(lengths) / timing.median
    share = flops_per_token(config, list(lengths), all_weights) * rate / (matmul * 1e12) if matmul else 0.0
    return {"tokens_per_s": rate, "matmul_share": share, **peak_memory(), **timing.shown()}


def ours(
    shape: str,
    lengths: Sequence[int],
    ranks: dict[str, int],
    matmul: float,
    alone: bool = False,
    memory_gib: float = 0.0,
    unembed: bool = False,
    deterministic: bool = False,
    expert_dtype: str = "model",
) -> Figures:
    """Our Backend on text; the sequences go to the models in turn.

    `alone` gives each sequence a pass of its own, `memory_gib` limits the memory, `unembed` trains the LM head too;
    `deterministic` and `expert_dtype` are the server's options.
    """
    config = configuration(shape)
    network = network_of(config)
    release()
    share = memory_gib * 2**30 / torch.cuda.get_device_properties(0).total_memory if memory_gib else 1.0
    base = base_of(config, network, memory_share=share, deterministic=deterministic, expert_dtype=expert_dtype)
    backend = backend_of(base, ranks, unembed)
    each = len(lengths) // len(ranks)
    work = [text_datum(list(ranks)[i // each], tokens) for i, tokens in enumerate(batch_of(lengths))]

    def step() -> None:
        train(
            backend, [[item] for item in work] if alone else filled(work, backend.passes.tokens_per_pass), list(ranks)
        )

    found = measured(config, lengths, step, matmul, all_weights=0 in ranks.values())
    return found | {"tokens_per_pass": backend.passes.tokens_per_pass}


def theirs(
    shape: str,
    lengths: Sequence[int],
    matmul: float,
    liger: bool = False,
    checkpointing: bool = False,
    unembed: bool = False,
) -> Figures:
    """What transformers and PEFT do on text."""
    config = configuration(shape)
    release()
    step = step_of(lora_network(config, RANK, checkpointing, liger, unembed), texts(batch_of(lengths)))
    return measured(config, lengths, step, matmul)


class Script:
    """The command line's choice, and what has been measured."""

    def __init__(self) -> None:
        self.asked = begin(__doc__, PARTS, SIDES)
        self.matmul = 0.0
        self.found: dict[str, Figures] = {}

    def case(self, name: str, side: str, action: Callable[[], Figures]) -> Figures:
        """Measure one side of a part, if it was asked for."""
        if side.partition("_")[0] not in self.asked.sides:
            return {}
        label = f"{name}/{side}"
        self.found[label] = isolated(label, action, self.asked.budget)
        return self.found[label]

    def compare(self, name: str, one: str, other: str, wanted: str) -> None:
        """The line of a ratio of tokens per second, with that of memory."""
        mine, rival = self.found.get(one, {}), self.found.get(other, {})
        memory = ratio(mine, rival, "gib")
        details = {"memory_ratio": memory} if memory else {}
        figure(name, ratio(mine, rival), wanted, over=other, **details)

    def card(self) -> None:
        """Measure the card."""
        self.matmul = isolated("card", card, 60).get("matmul_tflops", 0.0)
        say(
            share=(
                "tokens_per_s * passes * 2 * (parameters + query_width * layers * length) / matmul; "
                "2 passes for LoRA, 3 for all weights"
            )
        )

    def lora(self) -> None:
        """4 and 8 sequences."""
        for count, wanted in ((4, "at least 1.55"), (8, "at least 1.15")):
            name, lengths = f"lora_{count}x{LENGTH}", [LENGTH] * count
            mine = self.case(name, "ours", partial(ours, "4B", lengths, {"m": RANK}, self.matmul))
            self.case(name, "peft", partial(theirs, "4B", lengths, self.matmul))
            self.case(name, "liger", partial(theirs, "4B", lengths, self.matmul, liger=True))
            self.compare(f"{name}_over_peft", f"{name}/ours", f"{name}/peft", "")
            self.compare(f"{name}_over_liger", f"{name}/ours", f"{name}/liger", f"{wanted}, memory at most 1.2")
            figure(f"{name}_matmul_share", mine.get("matmul_share"), "at least 0.55")

    def warm(self) -> None:
        """Time the first step of a process that finds all compiled, by earlier processes or else by a cold one here."""
        action = partial(ours, "4B", [LENGTH] * 4, {"m": RANK}, self.matmul)
        if f"lora_4x{LENGTH}/ours" not in self.found:
            self.case("cold", "ours", action)
        figure("first_step_after_a_warm_start_s", self.case("warm", "ours", action).get("first_s"), "at most 15 s")

    def unembed(self) -> None:
        """4 sequences, the LM head trained too."""
        lengths = [LENGTH] * 4
        self.case("unembed", "ours", partial(ours, "4B", lengths, {"m": RANK}, self.matmul, unembed=True))
        self.case("unembed", "peft", partial(theirs, "4B", lengths, self.matmul, unembed=True))
        self.compare("unembed_over_peft", "unembed/ours", "unembed/peft", "")

    def recompute(self) -> None:
        """8 sequences, in Liger's memory."""
        name = f"lora_8x{LENGTH}"
        rival = self.found.get(f"{name}/liger") or self.case(
            name, "liger", partial(theirs, "4B", [LENGTH] * 8, self.matmul, liger=True)
        )
        room = rival.get("reserved_gib", 0.0)
        if room:
            self.case("recompute", "ours", partial(ours, "4B", [LENGTH] * 8, {"m": RANK}, self.matmul, memory_gib=room))
            self.compare("recompute_over_liger", "recompute/ours", f"{name}/liger", "at least 1.1, memory at most 1")

    def long(self) -> None:
        """One sequence."""
        for length in LONG:
            self.case(f"long_{length}", "ours", partial(ours, "4B", [length], {"m": RANK}, self.matmul))
        length = LONG[0]
        self.case(
            f"long_{length}", "liger", partial(theirs, "4B", [length], self.matmul, liger=True, checkpointing=True)
        )
        self.compare(f"long_{length}_over_liger", f"long_{length}/ours", f"long_{length}/liger", "at least 1.2")

    def mixed(self) -> None:
        """32 sequences of many lengths."""
        lengths = mixed_lengths()
        self.case("mixed", "ours", partial(ours, "4B", lengths, {"m": RANK}, self.matmul))
        self.case("mixed", "ours_one_by_one", partial(ours, "4B", lengths, {"m": RANK}, self.matmul, alone=True))
        self.case("mixed", "peft", partial(theirs, "4B", lengths, self.matmul))
        self.case("mixed", "liger", partial(theirs, "4B", lengths, self.matmul, liger=True))
        for side in ("peft", "liger", "ours_one_by_one"):
            self.compare(f"mixed_over_{side}", "mixed/ours", f"mixed/{side}", "at least 3" if side == "peft" else "")

    def tenants(self) -> None:
        """Eight models against one."""
        lengths = [LENGTH] * 32
        self.case("tenants", "ours", partial(ours, "4B", lengths, {f"m{rank}": rank for rank in RANKS}, self.matmul))
        self.case("tenants", "ours_one_model", partial(ours, "4B", lengths, {"m": 64}, self.matmul))
        self.compare("tenants_over_one_model", "tenants/ours", "tenants/ours_one_model", "at least 0.95")

    def images(self) -> None:
        """Images that no step has seen before."""
        self.case("images", "ours", partial(our_images, self.matmul))
        self.case("images", "peft", partial(their_images, self.matmul))
        self.compare("images_over_peft", "images/ours", "images/peft", "at least 2")

    def full(self) -> None:
        """All weights."""
        lengths = [LENGTH] * 8
        self.case("full", "ours", partial(ours, "1.7B", lengths, {"m": 0}, self.matmul))
        for side, dtype in (("transformers_bfloat16", torch.bfloat16), ("transformers_autocast", torch.float32)):
            self.case("full", side, partial(their_full, lengths, self.matmul, dtype))
            self.compare(
                f"full_over_{side}",
                "full/ours",
                f"full/{side}",
                "at least 1.4" if dtype == torch.bfloat16 else "at least 1.7",
            )

    def hybrid(self) -> None:
        """A model most of whose layers are gated delta nets."""
        for count in (4, 8):
            name, lengths = f"hybrid_{count}x{LENGTH}", [LENGTH] * count
            self.case(name, "ours", partial(ours, "Qwen3.5-4B", lengths, {"m": RANK}, self.matmul))
            found = self.case(name, "peft", partial(theirs, "Qwen3.5-4B", lengths, self.matmul))
            if not found:
                self.case(
                    name, "peft_checkpointing", partial(theirs, "Qwen3.5-4B", lengths, self.matmul, checkpointing=True)
                )
            self.compare(
                f"{name}_over_peft", f"{name}/ours", f"{name}/peft" if found else f"{name}/peft_checkpointing", ""
            )
        mine = self.found.get(f"hybrid_8x{LENGTH}/ours", {}).get("tokens_per_s")
        figure(
            "hybrid_over_before",
            mine / 7906 if mine else None,
            "at least 1.3 times the 7,906 tokens per second of an H200 before",
        )

    def chat(self) -> None:
        """A batch of chats, of which most are short."""
        self.case("chat", "ours", partial(ours, "Qwen3.5-4B", chat_lengths(), {"m": RANK}, self.matmul))
        self.compare("chat_over_equal_lengths", "chat/ours", f"hybrid_8x{LENGTH}/ours", "at least 0.95")

    def experts(self) -> None:
        """A mixture of experts."""
        for count, length, wanted in ((8, LENGTH, 48000), (4, 4 * LENGTH, 46000)):
            name = f"experts_{count}x{length}"
            mine = self.case(name, "ours", partial(ours, "30B-A3B/16", [length] * count, {"m": RANK}, self.matmul))
            figure(name, mine.get("tokens_per_s"), f"at least {wanted} tokens per second in at most 40 GiB")
        for held in ("fp8", "nf4"):
            action = partial(ours, "30B-A3B/16", [LENGTH] * 8, {"m": RANK}, self.matmul, expert_dtype=held)
            self.case(f"experts_8x{LENGTH}_{held}", "ours", action)

    def experts_whole(self) -> None:
        """All layers of mixtures of experts."""
        lengths = [4 * LENGTH] * 4
        for shape, held, wanted in (
            ("30B-A3B", "model", "at least 15000 tokens per second on an H200"),
            ("35B-A3B", "model", "at least 10000 tokens per second on an H200"),
            ("35B-A3B", "fp8", "fits 80 GB"),
        ):
            name = f"experts_whole_{shape}_{held}"
            action = partial(ours, shape, lengths, {"m": RANK}, self.matmul, expert_dtype=held)
            figure(name, self.case(name, "ours", action).get("tokens_per_s"), wanted)

    def experts_tenants(self) -> None:
        """Eight models with experts of their own against one."""
        shape, lengths, ranks = "30B-A3B/16", [LENGTH] * 16, {f"m{rank}": rank for rank in RANKS}
        self.case("experts_tenants", "ours", partial(ours, shape, lengths, ranks, self.matmul))
        self.case("experts_tenants", "ours_one_model", partial(ours, shape, lengths, {"m": 64}, self.matmul))
        name = "experts_tenants/ours"
        self.compare("experts_tenants_over_one_model", name, f"{name}_one_model", "at least 0.9")

    def gpt_oss(self) -> None:
        """Attention with sinks, experts with biases."""
        self.case("gpt_oss", "ours", partial(ours, "gpt-oss-20b", [LENGTH] * 8, {"m": RANK}, self.matmul))

    def hybrid_long(self) -> None:
        """One long sequence."""
        self.case(
            f"hybrid_long_{HYBRID_LONG}", "ours", partial(ours, "Qwen3.5-4B", [HYBRID_LONG], {"m": RANK}, self.matmul)
        )

    def deterministic(self) -> None:
        """What it costs that numbers depend on their own sequence alone."""
        plain, action = f"lora_4x{LENGTH}/ours", partial(ours, "4B", [LENGTH] * 4, {"m": RANK}, self.matmul)
        if plain not in self.found:
            self.case(f"lora_4x{LENGTH}", "ours", action)
        self.case("deterministic", "ours", partial(action, deterministic=True))
        self.compare("deterministic_over_plain", "deterministic/ours", plain, "said")


def their_full(lengths: Sequence[int], matmul: float, dtype: torch.dtype) -> Figures:
    """What transformers does with AdamW on all weights: of bfloat16, or of float32 under autocast."""
    config = configuration("1.7B")
    release()
    model = network_of(config, dtype).train()
    step = step_of(model, texts(batch_of(lengths)), autocast=dtype == torch.float32)
    return measured(config, lengths, step, matmul, all_weights=True)


SEQUENCES, STEPS = (2, 3) if TINY else (8, 8)
TEXT, SIDE = (12, 64) if TINY else (256, 512)
"""Tokens of text beside an image, and its pixels along a side; 512² are 256 tokens."""


def rendered_images(base: BaseModel) -> tuple[list[list[RenderedInput]], float]:
    """Sequences of each step, text around an image of its own; and the CPU seconds that an image took."""
    from tests.bases import image_chunks, renderer

    render = renderer(base)
    chunks = [image_chunks(base, 2 * number, TEXT - 2, width=SIDE, height=SIDE) for number in range(STEPS * SEQUENCES)]
    began = time.process_time()
    with ThreadPoolExecutor() as pool:
        rendered = list(pool.map(render.render, chunks))
    each_s = (time.process_time() - began) / len(rendered)
    return [rendered[start : start + SEQUENCES] for start in range(0, len(rendered), SEQUENCES)], each_s


def our_images(matmul: float) -> Figures:
    """Our Backend on images."""
    config = configuration("VL-4B")
    network = network_of(config)
    release()
    backend = backend_of(base_of(config, network), {"m": RANK})
    sequences, render_s = rendered_images(backend.base)
    steps = [[datum("m", rendered) for rendered in those] for those in sequences]
    upcoming = itertools.cycle(steps)
    lengths = [len(item.rendered) for item in steps[0]]

    def step() -> None:
        backend.base.features.clear()  # whatever was seen before is new again
        train(backend, filled(next(upcoming), backend.passes.tokens_per_pass), ["m"])

    return measured(config, lengths, step, matmul) | {"render_cpu_s_per_image": render_s}


def their_images(matmul: float) -> Figures:
    """What transformers and PEFT do on the same."""
    config = configuration("VL-4B")
    sequences, _ = rendered_images(base_of(config))
    steps = [_together(those, config) for those in sequences]
    config = deepcopy(config)
    # Not ours
    config.text_config._attn_implementation = config.vision_config._attn_implementation = (
        config._attn_implementation
    ) = "sdpa"
    release()
    upcoming = itertools.cycle(steps)
    lengths = [steps[0]["input_ids"].shape[1]] * SEQUENCES
    return measured(config, lengths, step_of(lora_network(config, RANK), lambda: [next(upcoming)]), matmul)


def _together(sequences: Sequence[RenderedInput], config: Any) -> Inputs:
    """A batch for transformers, its pixels in bfloat16 already."""
    ids = torch.stack([torch.from_numpy(rendered.token_ids).long() for rendered in sequences])
    images = [image for rendered in sequences for image in rendered.images]
    return {
        "input_ids": ids,
        "labels": ids,
        "mm_token_type_ids": (ids == config.image_token_id).int(),
        "pixel_values": torch.cat([image.pixel_values for image in images]).to(torch.bfloat16),
        "image_grid_thw": torch.tensor([image.grid_thw for image in images]),
    }


def main() -> None:
    """Measure what was asked for."""
    script = Script()
    for part in script.asked.parts:
        getattr(script, part)()


if __name__ == "__main__":
    main()
