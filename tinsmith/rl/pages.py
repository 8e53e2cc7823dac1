"""Trajectories to look at: JSONL for programs, and one HTML page that shows pictures, tokens by mask, and rewards."""

import base64
import html
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.trajectory import Sample, Trajectory

STYLE = """
body { font: 14px/1.6 system-ui, sans-serif; margin: 2em auto; max-width: 70em; color: #222 }
article { border: 1px solid #ddd; border-radius: 6px; padding: 0 1em; margin: 1em 0 }
pre { white-space: pre-wrap; word-break: break-word; font: 13px/1.7 ui-monospace, monospace }
pre span.said { background: #d7f0dd } pre span.read { color: #888 }
pre b { background: #ffe08a; border-radius: 3px; padding: 0 .3em; margin-left: .2em }
img { vertical-align: middle; min-width: 48px; max-width: 240px }
"""


def write_jsonl(file: Path, trajectories: Sequence[Trajectory], template: ChatTemplate) -> None:
    """One line for each trajectory. Pictures are named by their SHA-256; the page shows them."""
    lines = [json.dumps(_record(trajectory, template)) for trajectory in trajectories]
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def write_page(file: Path, trajectories: Sequence[Trajectory], template: ChatTemplate, title: str) -> None:
    """A page that needs nothing but itself."""
    articles = "\n".join(_article(trajectory, template) for trajectory in trajectories)
    legend = "<p>Sampled tokens (loss mask 1) are on green, what the model read is grey, rewards are on yellow.</p>"
    head = f"<!doctype html><meta charset='utf-8'><title>{html.escape(title)}</title><style>{STYLE}</style>"
    file.write_text(f"{head}<h1>{html.escape(title)}</h1>{legend}\n{articles}\n", encoding="utf-8")


def _record(trajectory: Trajectory, template: ChatTemplate) -> dict[str, Any]:
    return {
        **vars(trajectory.origin),
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason,
        "error": trajectory.error,
        "turns": trajectory.turns,
        "metrics": dict(trajectory.metrics),
        "notes": {name: repr(value) for name, value in trajectory.notes.items()},
        "samples": [_sample_record(sample, template) for sample in trajectory.samples],
    }


def _sample_record(sample: Sample, template: ChatTemplate) -> dict[str, Any]:
    return {
        "text": template.decode(sample.stream.ids.tolist()),
        "prompt_ids": sample.prompt_ids.tolist(),
        "response_ids": sample.response_ids.tolist(),
        "loss_mask": sample.loss_mask.astype(int).tolist(),
        "rewards": sample.rewards.tolist(),
        "logprobs": sample.logprobs.tolist(),
        "pictures": [{"offset": p.offset, "tokens": p.picture.tokens, "sha256": p.picture.digest} for p in sample.stream.pictures],
        "is_last_step": sample.is_last_step,
    }


def _article(trajectory: Trajectory, template: ChatTemplate) -> str:
    origin = trajectory.origin
    facts = [f"reward {trajectory.reward:g}", trajectory.stop_reason, f"{trajectory.turns} turns", f"seed {origin.seed}"]
    facts += [f"{name} {value:g}" for name, value in trajectory.metrics.items()]
    if trajectory.error:
        facts.append(trajectory.error)
    head = f"<h3>{html.escape(origin.env)} · group {origin.group}.{origin.member}</h3><p>{html.escape(' · '.join(facts))}</p>"
    return f"<article>{head}{''.join(f'<pre>{_tokens(sample, template)}</pre>' for sample in trajectory.samples)}</article>"


def _tokens(sample: Sample, template: ChatTemplate) -> str:
    """The sample's text in spans of one mask, with its pictures and rewards in place."""
    parts: list[str] = []
    cuts = _cuts(sample)
    pictures = {placed.offset: placed.picture for placed in sample.stream.pictures}
    for start, stop in pairwise(cuts):
        if (picture := pictures.get(start)) is not None:
            data = base64.b64encode(picture.data).decode()
            parts.append(f"<img src='data:image/{picture.format};base64,{data}' title='{picture.tokens} tokens'>")
            continue
        at = start - sample.prompt_length
        said = at >= 0 and bool(sample.loss_mask[at])
        text = html.escape(template.decode(sample.stream.ids[start:stop].tolist()))
        parts.append(f"<span class='{'said' if said else 'read'}'>{text}</span>")
        reward = sample.rewards[stop - 1 - sample.prompt_length] if said else 0.0
        if reward:
            parts.append(f"<b>{reward:+g}</b>")
    return "".join(parts)


def _cuts(sample: Sample) -> list[int]:
    """Where the page's spans begin, and the end: at pictures, changes of the mask, and behind rewards."""
    first = sample.prompt_length
    cuts = {0, first, len(sample.stream)}
    for placed in sample.stream.pictures:
        cuts |= {placed.offset, placed.offset + placed.picture.tokens}
    mask = sample.loss_mask
    cuts |= {first + at for at in range(1, len(mask)) if mask[at] != mask[at - 1] or sample.rewards[at - 1]}
    return sorted(cuts)
