"""Turns -> training samples. Turns whose prompt begins with all that was seen and said before become one sample."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tinsmith.rl.pictures import PictureProcessor
from tinsmith.rl.stream import join, text_stream
from tinsmith.rl.trajectory import Sample, Turn


def assemble(turns: Sequence[Turn]) -> tuple[Sample, ...]:
    """The samples of an episode, in order; none if its first turn is empty.

    A turn with no sampled token adds its reward to the last sampled token before it. If there is no such token, the reward has no place,
    and the episode is dropped.
    """
    turns = _settled(turns)
    runs: list[list[Turn]] = []
    for turn in turns:
        if runs and turn.prompt.begins_with(runs[-1][-1].prompt + text_stream(runs[-1][-1].sampled)):
            runs[-1].append(turn)
        else:
            runs.append([turn])
    sampled = [run for run in runs if any(len(turn.sampled) for turn in run)]
    return tuple(_sample(run, is_last_step=run is sampled[-1]) for run in sampled)


def with_pixels(samples: Sequence[Sample], processor: PictureProcessor) -> tuple[Sample, ...]:
    """The samples with the pixel values of their pictures."""
    made = []
    for sample in samples:
        if pictures := tuple(placed.picture for placed in sample.stream.pictures):
            pixel_values, image_grid_thw = processor.pixels(pictures)
            made.append(replace(sample, pixel_values=pixel_values, image_grid_thw=image_grid_thw))
        else:
            made.append(sample)
    return tuple(made)


def _settled(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with the rewards of empty ones moved to where something was sampled."""
    settled: list[Turn] = []
    last = None
    for turn in turns:
        if len(turn.sampled):
            last = len(settled)
            settled.append(turn)
        elif last is None:
            return []
        else:
            settled[last] = replace(settled[last], reward=settled[last].reward + turn.reward)
            settled.append(replace(turn, reward=0.0))
    return settled


def _sample(run: Sequence[Turn], is_last_step: bool) -> Sample:
    """One sample of turns that extend each other."""
    end = run[-1]
    while not len(end.sampled):  # nothing was said to the last prompts: they teach nothing
        run = run[:-1]
        end = run[-1]
    first = len(run[0].prompt)
    stream = join((end.prompt, text_stream(end.sampled), text_stream(end.tail)))
    loss_mask = np.zeros(len(stream) - first, dtype=np.bool_)
    rewards, logprobs = np.zeros(len(loss_mask), dtype=np.float64), np.zeros(len(loss_mask), dtype=np.float32)
    for turn in run:
        start = len(turn.prompt) - first
        stop = start + len(turn.sampled)
        loss_mask[start:stop], logprobs[start:stop] = True, turn.logprobs
        if stop > start:
            rewards[stop - 1] = turn.reward
    return Sample(stream, first, loss_mask, rewards, logprobs, len(run), is_last_step)
