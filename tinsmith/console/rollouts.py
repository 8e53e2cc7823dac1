"""Data of the pages on rollouts: runs, the steps of a run, groups of a step, and one trajectory token by token."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any
from urllib.parse import quote, urlencode

from tinsmith.console.charts import downsample
from tinsmith.console.curves import OF_ROLLOUTS, drawn
from tinsmith.console.curves import ROLLOUTS as OF_RL
from tinsmith.console.run_files import MOST_BYTES, Heading, Json, RunDirectory, RunFiles, checkpoint_before
from tinsmith.console.texts import GAPS, SHARES, SURPRISES, ShadedTokens, end_of, pieces_of
from tinsmith.errors import NotFoundError, UserError, quoted

ROLLOUTS = "/rollouts"
IMAGES = "/rollout-images"
"""Beginnings of paths."""
Asked = Mapping[str, str]
"""Parameters of the query and of the path, by name."""

COLOURS = {
    "mask": "what was sampled and what was read",
    "surprise": "how unlikely the sampler held each token, in nats",
    "gap": "log-probability of the trainer minus that of the sampler, in nats",
    "advantage": "advantage of each token, as a share of the largest of the group",
}
"""Ways to colour tokens."""
_BINS = 12
_MOST_TOKENS = 6000
"""Tokens of a sample that a page shows one by one, unless all are asked for."""
_FEW_TOKENS = 400
"""The same beside the other members of a group."""
_MOST_MEMBERS = 64
_MOST_POINTS = 400
"""Points of a curve."""
_WIDTH, _HEIGHT = 320, 64
"""Those of a curve, in its own units."""
_SORTS: dict[str, Callable[[Json], Any]] = {
    "number": lambda group: group["number"],
    "reward": lambda group: -math.inf if group["reward"] is None else group["reward"],
    "spread": lambda group: group["spread"],
    "tokens": lambda group: group["tokens"],
    "turns": lambda group: group["turns"],
    "age": lambda group: group["age"] or 0,
}


# ---- Runs


def runs_page(files: RunFiles) -> Json:
    """All runs."""
    return {"root": str(files.root), "runs": [_about(run) for run in files.runs()], "most_bytes": MOST_BYTES}


def _about(run: RunDirectory) -> Json:
    config, metrics = run.config(), run.metrics()
    rewards = [(line["step"], line["reward"]) for line in metrics if line.get("reward") is not None]
    return {
        "name": run.name,
        "url": _url(run.name),
        "env": _setting(config, "env", "name"),
        "base_model": _setting(config, "model", "base_model"),
        "step": max((line["step"] for line in metrics), default=0),
        "steps": _setting(config, "training", "steps") or None,
        "first_reward": rewards[0][1] if rewards else None,
        "reward": rewards[-1][1] if rewards else None,
        "changed_at": run.changed_at,
    }


def link_to(run: RunDirectory) -> Json:
    """Name and path of a run, the steps that it has written, and the names of its curves as of `drawn_curves`."""
    told = {name: value for name, value in _about(run).items() if name in ("name", "url", "step")}
    return told | {"curves": [f"{OF_RL}{name}" for name in _points(run.metrics())]}


def _setting(config: Json, section: str, name: str) -> Any:
    values = config.get(section)
    return (values.get(name) if isinstance(values, dict) else None) or ""


# ---- One run


def run_page(files: RunFiles, asked: Asked) -> Json:
    """One run: its curves, and what there is of each step."""
    run = files.run(asked["run"])
    metrics, checkpoints = run.metrics(), run.checkpoints()
    steps = {line["step"]: line for line in metrics}
    shown = [_file_row(run, each, steps.get(each.step), checkpoints) for each in run.headings()]
    return {
        "run": _about(run),
        "curves": _curves(run, metrics),
        "files": shown[::-1],
        "checkpoints": [{"step": step, "path": path, **_chat(run, path)} for step, path in checkpoints.items()],
        "settings": _flat(run.config()),
    }


def _file_row(run: RunDirectory, heading: Heading, metrics: Json | None, checkpoints: Mapping[int, str]) -> Json:
    metrics = metrics if metrics is not None and heading.kind == "step" else {}
    return {
        "name": heading.name,
        "url": _url(run.name, heading.name),
        "kind": heading.kind,
        "step": heading.step,
        "groups": heading.groups,
        "trajectories": heading.trajectories,
        "reward": heading.reward,
        "staleness": metrics.get("staleness"),
        "kl": metrics.get("kl_sampler_trainer"),
        "tokens": metrics.get("response_tokens"),
        "is_saved": heading.step in checkpoints,
    }


def drawn_curves(run: RunDirectory, smoothing: float) -> dict[str, dict[str, list[Any]]]:
    """Curves of the metrics that a run has written, by name, in the form of `Curves.drawn`."""
    return {
        f"{OF_RL}{name}": drawn(steps, values, smoothing)
        for name, points in _points(run.metrics()).items()
        for steps, values in [tuple(zip(*points, strict=True))]
    }


def _points(metrics: Sequence[Json]) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of each metric that is drawn; staleness where there is some."""
    found = {
        name: [(int(line["step"]), float(line[name])) for line in metrics if isinstance(line.get(name), int | float)]
        for name in OF_ROLLOUTS
    }
    return {
        name: points
        for name, points in found.items()
        if any(value for _, value in points) or (points and name != "staleness")
    }


def _curves(run: RunDirectory, metrics: Sequence[Json]) -> list[Json]:
    files = {each.step: _url(run.name, each.name) for each in run.headings() if each.kind == "step"}
    return [
        {"name": name, "title": OF_ROLLOUTS[name][0], "meaning": OF_ROLLOUTS[name][1], **_curve(points, files)}
        for name, points in _points(metrics).items()
    ]


def _curve(points: Sequence[tuple[int, float]], files: Mapping[int | None, str]) -> Json:
    """A curve in the units of a drawing; its points lead to what was played."""
    kept = downsample([step for step, _ in points], [value for _, value in points], _MOST_POINTS)
    points = [points[at] for at in kept]
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    across, up = (steps[-1] - steps[0]) or 1, (high - low) or 1.0
    drawn = [
        {
            "x": round((step - steps[0]) / across * _WIDTH, 1),
            "y": round(_HEIGHT - (value - low) / up * _HEIGHT if high > low else _HEIGHT / 2, 1),
            "step": step,
            "value": value,
            "url": files.get(step),
        }
        for step, value in points
    ]
    return {
        "points": drawn,
        "low": low,
        "high": high,
        "last": values[-1],
        "first_step": steps[0],
        "last_step": steps[-1],
    }


def _flat(config: Json) -> dict[str, str]:
    return {
        f"{section}.{name}": str(value)
        for section, values in config.items()
        if isinstance(values, dict)
        for name, value in values.items()
        if value not in ("", None, [], {})
    }


# ---- One step


def step_page(files: RunFiles, asked: Asked) -> Json:
    """The groups of a step, with a histogram of its rewards, searched and sorted."""
    run = files.run(asked["run"])
    heading = run.heading(asked["file"])
    episodes = run.episodes(heading.name)
    chosen = [each for each in episodes if _matches(each, asked)]
    groups = [_group_row(run, heading, number, members) for number, members in _by_group(chosen)]
    sort, descending = _order(asked)
    groups.sort(key=_SORTS[sort], reverse=descending)
    rewards = [each["reward"] for each in episodes if each["usable"]]
    return {
        **_place(run, heading),
        "histogram": _histogram(rewards, asked, _url(run.name, heading.name)),
        "groups": groups,
        "sort": sort,
        "descending": descending,
        "sorts": {name: _sorted_url(name, sort, descending, asked) for name in _SORTS},
        "q": asked.get("q", ""),
        "reward": asked.get("reward", ""),
        "shown": len(chosen),
        "stop_reasons": _counted(each["stop_reason"] for each in episodes),
    }


def _place(run: RunDirectory, heading: Heading) -> Json:
    """A step among all: for the slider, and for links to its neighbours."""
    alike = [
        each for each in run.headings() if each.kind == heading.kind and (each.step is None) == (heading.step is None)
    ]
    at = alike.index(heading)
    version = 0 if heading.step is None else max(0, heading.step - (heading.kind == "step"))
    saved = checkpoint_before(run.checkpoints(), version)
    return {
        "run": {"name": run.name, "url": _url(run.name)},
        "file": {
            "name": heading.name,
            "url": _url(run.name, heading.name),
            "kind": heading.kind,
            "step": heading.step,
            "title": _title(heading),
            "env": heading.env,
            "model": heading.model,
            "trajectories": heading.trajectories,
            "groups": heading.groups,
            "reward": heading.reward,
        },
        "at": at,
        "all": [{"url": _url(run.name, each.name), "title": _title(each), "reward": each.reward} for each in alike],
        "metrics": next((line for line in run.metrics() if line["step"] == heading.step), {}),
        "checkpoint": None if saved is None else {"step": saved[0], "path": saved[1], **_chat(run, saved[1])},
    }


def _title(heading: Heading) -> str:
    if heading.kind == "step":
        return f"Step {heading.step}"
    return "Evaluation" if heading.step is None else f"Evaluation after step {heading.step}"


def _chat(run: RunDirectory, path: str) -> Json:
    """A link to a chat with these weights, and the server at which they are."""
    return {"chat": f"/playground?{urlencode({'model': path})}", "server": run.server}


def _matches(episode: Json, asked: Asked) -> bool:
    if asked.get("reward"):
        low, high, is_last = _bounds(asked["reward"])
        reward = episode["reward"]
        if not episode["usable"] or not (low <= reward < high or (is_last and reward == high)):
            return False
    wanted = asked.get("q", "").casefold()
    return not wanted or any(wanted in text.casefold() for text in _texts(episode))


def _texts(episode: Json) -> Iterator[str]:
    yield from (sample["text"] for sample in episode["samples"])
    yield from (episode["error"], episode["stop_reason"], *map(str, episode["notes"].values()))


def _bounds(text: str) -> tuple[float, float, bool]:
    """Read `0.25..0.5`, or `0.25..0.5]` where the upper bound is meant too."""
    low, _, high = text.removesuffix("]").partition("..")
    try:
        return float(low), float(high), text.endswith("]")
    except ValueError as error:
        raise UserError(f"reward={quoted(text)} is no range; write LOW..HIGH, such as 0.5..1]") from error


def _order(asked: Asked) -> tuple[str, bool]:
    name = asked.get("sort") or "number"
    if name.lstrip("-") not in _SORTS:
        raise UserError(
            f"sort={quoted(name)}: sort by one of {', '.join(_SORTS)}, with - in front for the largest first"
        )
    return name.lstrip("-"), name.startswith("-")


def _sorted_url(name: str, sort: str, descending: bool, asked: Asked) -> str:
    kept = {key: asked[key] for key in ("q", "reward") if asked.get(key)}
    largest_first = not descending if name == sort else name != "number"
    return "?" + urlencode({"sort": f"-{name}" if largest_first else name, **kept})


def _histogram(rewards: Sequence[float], asked: Asked, url: str) -> list[Json]:
    """Bins of the rewards, each with a link to what is in it: a bin for each value where there are few."""
    values = sorted(set(rewards))
    kept = {key: asked[key] for key in ("q", "sort") if asked.get(key)}
    if len(values) > _BINS:
        low, high = values[0], values[-1]
        edges = [low + (high - low) * at / _BINS for at in range(_BINS)] + [high]
        ranges = [(edges[at], edges[at + 1], at == _BINS - 1) for at in range(_BINS)]
    else:
        ranges = [(value, value, True) for value in values]
    counts = [
        sum(low <= reward < high or (last and reward == high) for reward in rewards) for low, high, last in ranges
    ]
    found = []
    for (low, high, last), count in zip(ranges, counts, strict=True):
        text = f"{low!r}..{high!r}{']' if last else ''}"
        is_chosen = asked.get("reward") == text
        query = urlencode(kept if is_chosen else {**kept, "reward": text})
        found.append(
            {
                "low": low,
                "high": high,
                "count": count,
                "share": count / max(counts),
                "is_chosen": is_chosen,
                "url": f"{url}?{query}" if query else url,
            }
        )
    return found


def _by_group(episodes: Sequence[Json]) -> list[tuple[int, list[Json]]]:
    ordered = sorted(episodes, key=lambda each: (each["group"], each["member"]))
    return [(number, list(members)) for number, members in groupby(ordered, key=lambda each: int(each["group"]))]


def _group_row(run: RunDirectory, heading: Heading, number: int, members: Sequence[Json]) -> Json:
    rewards = [each["reward"] for each in members if each["usable"]]
    return {
        "number": number,
        "url": _url(run.name, heading.name, number),
        "prompt": _excerpt(members[0]),
        "images": [_image_url(run, image["file"]) for image in _opening_images(members[0])][:3],
        "members": [_member(run, heading, each) for each in members],
        "reward": statistics.fmean(rewards) if rewards else None,
        "spread": statistics.pstdev(rewards) if rewards else 0.0,
        "tokens": statistics.fmean(map(_sampled_tokens, members)),
        "turns": statistics.fmean(each["turns"] for each in members),
        "age": _age(heading, members[0]),
    }


def _member(run: RunDirectory, heading: Heading, episode: Json) -> Json:
    return {
        "member": episode["member"],
        "url": _url(run.name, heading.name, episode["group"], episode["member"]),
        "reward": episode["reward"] if episode["usable"] else None,
        "stop_reason": episode["stop_reason"],
        "tokens": _sampled_tokens(episode),
        "turns": episode["turns"],
        "advantage": _advantage(episode),
        "error": episode["error"],
    }


def _age(heading: Heading, episode: Json) -> int | None:
    """Steps between the weights that sampled and those that learnt; None for an evaluation."""
    if heading.kind != "step" or heading.step is None:
        return None
    return max(0, heading.step - 1 - int(episode["version"]))


def _sampled_tokens(episode: Json) -> int:
    return sum(stop - start for sample in episode["samples"] for start, stop in sample["sampled"])


def _advantage(episode: Json) -> float | None:
    """The advantage of the first token, which most trajectories have in all."""
    return next((sample["advantages"][0] for sample in episode["samples"] if sample["advantages"]), None)


def _excerpt(episode: Json) -> str:
    """The end of the first prompt, without control tokens."""
    if not episode["samples"]:
        return ""
    sample = episode["samples"][0]
    first = sample["sampled"][0][0] if sample["sampled"] else sample["prompt_length"]
    return end_of(sample["text"][: sum(sample["lengths"][:first])])


def _opening_images(episode: Json) -> list[Json]:
    if not episode["samples"]:
        return []
    sample = episode["samples"][0]
    return [image for image in sample["images"] if image["offset"] < sample["prompt_length"]]


def _counted(values: Iterator[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return dict(sorted(counts.items(), key=lambda each: -each[1]))


# ---- One group, side by side


def group_page(files: RunFiles, asked: Asked) -> Json:
    """All members of a group, side by side."""
    run = files.run(asked["run"])
    heading = run.heading(asked["file"])
    groups = _by_group(run.episodes(heading.name))
    number = _number("group", asked["group"])
    members = next((members for found, members in groups if found == number), None)
    if members is None:
        raise NotFoundError(f"{heading.name} has no group {number}")
    numbers = [found for found, _ in groups]
    colour, at = _colour(asked), numbers.index(number)
    shown = sorted(members, key=lambda each: -each["reward"]) if asked.get("sort") == "reward" else members
    shading = colour, _largest_advantage(members)
    episodes = [_episode(run, heading, each, shading, _FEW_TOKENS) for each in shown[:_MOST_MEMBERS]]
    opening = _taken_opening(episodes)
    return {
        **_place(run, heading),
        "group": _group_row(run, heading, number, members),
        "previous": _url(run.name, heading.name, numbers[at - 1]) if at else None,
        "next": _url(run.name, heading.name, numbers[at + 1]) if at + 1 < len(numbers) else None,
        "opening": opening,
        "episodes": episodes,
        "left_out": max(0, len(shown) - _MOST_MEMBERS),
        "sort": "reward" if asked.get("sort") == "reward" else "member",
        **_colours(colour, asked),
    }


def _taken_opening(episodes: Sequence[Json]) -> Json | None:
    """Take the prompt out of all episodes of a group, if it is the same in all."""
    turns = [each["samples"][0]["turns"] for each in episodes if each["samples"]]
    if not turns or any(not each or each[0]["said"] or each[0] != turns[0][0] for each in turns):
        return None
    opening: Json = turns[0][0]
    for each in turns:
        del each[0]
    return opening


# ---- One trajectory


def trajectory_page(files: RunFiles, asked: Asked) -> Json:
    """One trajectory, turn by turn and token by token."""
    run = files.run(asked["run"])
    heading = run.heading(asked["file"])
    number, member = _number("group", asked["group"]), _number("member", asked["member"])
    members = sorted(
        (each for each in run.episodes(heading.name) if each["group"] == number), key=lambda each: int(each["member"])
    )
    at = next((at for at, each in enumerate(members) if each["member"] == member), None)
    if at is None:
        raise NotFoundError(f"{heading.name} has no member {member} of group {number}")
    episode, colour = members[at], _colour(asked)
    shows_all = asked.get("all") == "1"
    shading = colour, _largest_advantage(members)
    shown = _episode(run, heading, episode, shading, 10**9 if shows_all else _MOST_TOKENS)
    return {
        **_place(run, heading),
        "group": {"number": number, "url": _url(run.name, heading.name, number)},
        "previous": _member(run, heading, members[at - 1])["url"] if at else None,
        "next": _member(run, heading, members[at + 1])["url"] if at + 1 < len(members) else None,
        "members": [_member(run, heading, each) for each in members],
        "episode": shown,
        "seed": episode["seed"],
        "metrics_of_episode": episode["metrics"],
        "seconds": episode["seconds"],
        "notes": episode["notes"],
        "details": episode["details"],
        "all_url": "?" + urlencode({"colour": colour, "all": 1}),
        **_colours(colour, asked),
    }


def _colour(asked: Asked) -> str:
    colour = asked.get("colour") or "mask"
    if colour not in COLOURS:
        raise UserError(f"colour={quoted(colour)}: colour by one of {', '.join(COLOURS)}")
    return colour


def _colours(colour: str, asked: Asked) -> Json:
    kept = {key: asked[key] for key in ("sort", "all") if asked.get(key)}
    return {
        "colour": colour,
        "colour_means": COLOURS[colour],
        "colours": {name: "?" + urlencode({"colour": name, **kept}) for name in COLOURS},
        "shades": [f"{value:g}" for value in {"surprise": SURPRISES, "gap": GAPS, "advantage": SHARES}.get(colour, ())],
    }


def _largest_advantage(members: Sequence[Json]) -> float:
    samples = (sample for each in members for sample in each["samples"])
    return max((abs(value) for sample in samples for value in sample["advantages"] or ()), default=0.0)


def _episode(run: RunDirectory, heading: Heading, episode: Json, shading: tuple[str, float], shown: int) -> Json:
    samples = [_turns(run, sample, shading, shown) for sample in episode["samples"]]
    return {
        **_member(run, heading, episode),
        "version": episode["version"],
        "age": _age(heading, episode),
        "samples": samples,
        "rewards": [turn["reward"] for turns in samples for turn in turns["turns"] if turn["said"]],
    }


def _turns(run: RunDirectory, sample: Json, shading: tuple[str, float], shown: int) -> Json:
    """A sample as what was read and what was said in turn; of long ones the first `shown` tokens that were said."""
    ends = [0, *accumulate(sample["lengths"])]
    rewards = {int(at): float(value) for at, value in sample["rewards"]}
    tokens, turns, at, taken = ShadedTokens(sample, *shading), list[Json](), 0, 0
    for start, stop in sample["sampled"]:
        if start > at:
            turns.append(_read(run, sample, ends, at, start))
        spans = tokens.spans(ends, start, min(stop, start + max(0, shown - taken)), taken)
        turns.append(
            {
                "said": True,
                "spans": spans,
                "tokens": stop - start,
                "left_out": stop - start - len(spans),
                "reward": math.fsum(value for place, value in rewards.items() if start <= place < stop),
                "has_reward": any(start <= place < stop for place in rewards),
            }
        )
        at, taken = stop, taken + stop - start
    if at < len(sample["lengths"]):
        turns.append(_read(run, sample, ends, at, len(sample["lengths"])))
    return {"turns": turns, "tokens": len(sample["lengths"]), "has_trainer": sample["trainer_logprobs"] is not None}


def _read(run: RunDirectory, sample: Json, ends: Sequence[int], start: int, stop: int) -> Json:
    """Text and images between answers."""
    spans, at = list[Json](), start
    for image in sample["images"]:
        if start <= image["offset"] < stop:
            spans += pieces_of(sample["text"][ends[at] : ends[image["offset"]]])
            spans.append({"image": _image_url(run, image["file"]), "tokens": image["tokens"]})
            at = image["offset"] + image["tokens"]
    spans += pieces_of(sample["text"][ends[min(at, stop)] : ends[stop]])
    return {"said": False, "spans": spans, "tokens": stop - start}


# ---- Links


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise NotFoundError(f"{name} {quoted(text)} is no number")
    return int(text)


def _url(*parts: object) -> str:
    return "/".join([ROLLOUTS, *(quote(str(part), safe="") for part in parts)])


def _image_url(run: RunDirectory, name: str) -> str:
    return f"{IMAGES}/{quote(run.name, safe='')}/{quote(name, safe='')}"


# ---- Pages

PAGES: tuple[tuple[str, str, Callable[[RunFiles, Asked], Json]], ...] = (
    (ROLLOUTS, "rollouts.html.jinja", lambda files, _: runs_page(files)),
    (f"{ROLLOUTS}/{{run}}", "rollout_run.html.jinja", run_page),
    (f"{ROLLOUTS}/{{run}}/{{file}}", "rollout_step.html.jinja", step_page),
    (f"{ROLLOUTS}/{{run}}/{{file}}/{{group}}", "rollout_group.html.jinja", group_page),
    (f"{ROLLOUTS}/{{run}}/{{file}}/{{group}}/{{member}}", "rollout_trajectory.html.jinja", trajectory_page),
)
"""Path, template and data of each page. Data may take long: a step of a large run is read in a second."""
IMAGE_PATH = f"{IMAGES}/{{run}}/{{name}}"
