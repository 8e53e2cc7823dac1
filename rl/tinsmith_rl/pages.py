"""Trajectories as files: JSONL for programs, and an HTML page that shows images, sampled tokens and rewards."""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tinsmith_rl.chat import ChatTemplate
from tinsmith_rl.trajectory import TrainingSample, Trajectory

# Everything is escaped: texts on the page come from environments and models.
_TEMPLATES = Environment(
    loader=PackageLoader("tinsmith_rl", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True)
class Span:
    """A piece of a sample on the page: a text in which all tokens have the same loss mask, or an image."""

    text: str
    """The text that is shown, or the title of the image."""
    sampled: bool = False
    reward: float = 0.0
    """Reward on the last token; 0.0 is not shown."""
    image: str = ""
    """The image as a data URI; empty for a text."""


def write_jsonl(file: Path, trajectories: Sequence[Trajectory], template: ChatTemplate) -> None:
    """Write a line of JSON for each trajectory. Images are named by their SHA-256; the page shows them."""
    lines = [json.dumps(_record(trajectory, template)) for trajectory in trajectories]
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def write_page(file: Path, trajectories: Sequence[Trajectory], template: ChatTemplate, title: str) -> None:
    """Write one HTML file, which contains everything that it shows."""
    shown = [
        {
            "heading": f"{trajectory.episode.env} · group {trajectory.episode.group}.{trajectory.episode.member}",
            "facts": _facts(trajectory),
            "samples": [list(spans(sample, template)) for sample in trajectory.samples],
        }
        for trajectory in trajectories
    ]
    file.write_text(
        _TEMPLATES.get_template("episodes.html.jinja").render(title=title, trajectories=shown), encoding="utf-8"
    )


def spans(sample: TrainingSample, template: ChatTemplate) -> Iterator[Span]:
    """The sample from its first to its last token."""
    images = {placed.offset: placed.image for placed in sample.sequence.images}
    for start, stop in pairwise(_span_edges(sample)):
        if (image := images.get(start)) is not None:
            data = base64.b64encode(image.data).decode()
            yield Span(f"{image.tokens} tokens", image=f"data:image/{image.format};base64,{data}")
            continue
        at = start - sample.prompt_length  # index into the response; negative in the prompt
        sampled = at >= 0 and bool(sample.loss_mask[at])
        text = template.decode(sample.sequence.ids[start:stop].tolist())
        yield Span(text, sampled, float(sample.rewards[stop - 1 - sample.prompt_length]) if sampled else 0.0)


def _span_edges(sample: TrainingSample) -> list[int]:
    """Positions where spans begin, and the end: at images, where the loss mask changes, and behind rewards."""
    first = sample.prompt_length
    edges = {0, first, len(sample.sequence)}
    for placed in sample.sequence.images:
        edges |= {placed.offset, placed.offset + placed.image.tokens}
    mask = sample.loss_mask
    edges |= {first + at for at in range(1, len(mask)) if mask[at] != mask[at - 1] or sample.rewards[at - 1]}
    return sorted(edges)


def _facts(trajectory: Trajectory) -> list[str]:
    facts = [
        f"reward {trajectory.reward:g}",
        trajectory.stop_reason,
        f"{trajectory.turns} turns",
        f"seed {trajectory.episode.seed}",
    ]
    facts += [f"{name} {value:g}" for name, value in trajectory.metrics.items()]
    return [*facts, trajectory.error] if trajectory.error else facts


def _record(trajectory: Trajectory, template: ChatTemplate) -> dict[str, Any]:
    return {
        **vars(trajectory.episode),
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason,
        "error": trajectory.error,
        "turns": trajectory.turns,
        "metrics": dict(trajectory.metrics),
        "notes": {name: repr(value) for name, value in trajectory.notes.items()},
        "samples": [_sample_record(sample, template) for sample in trajectory.samples],
    }


def _sample_record(sample: TrainingSample, template: ChatTemplate) -> dict[str, Any]:
    return {
        "text": template.decode(sample.sequence.ids.tolist()),
        "prompt_ids": sample.prompt_ids.tolist(),
        "response_ids": sample.response_ids.tolist(),
        "loss_mask": sample.loss_mask.astype(int).tolist(),
        "rewards": sample.rewards.tolist(),
        "logprobs": sample.logprobs.tolist(),
        "images": [
            {"offset": p.offset, "tokens": p.image.tokens, "sha256": p.image.digest} for p in sample.sequence.images
        ],
        "is_last_step": sample.is_last_step,
    }
