"""Curves and bars as a page draws them: downsampled without losing spikes, smoothed, or as the path of an SVG."""

import math
from collections.abc import Mapping, Sequence


def downsample(steps: Sequence[float], values: Sequence[float | None], most: int) -> list[int]:
    """Return the indices of about `most` points that show all of a curve.

    Of each of `most / 2` stretches it takes the lowest and the highest point, so no spike is lost, and of the whole
    curve the first and the last one. Gaps stay: a value that is missing, or no number, is passed on.
    """
    count = len(steps)
    if count <= most:
        return list(range(count))
    stretches = max(1, most // 2)
    taken = {0, count - 1}
    for stretch in range(stretches):
        first, end = stretch * count // stretches, (stretch + 1) * count // stretches
        known = [at for at in range(first, end) if is_number(values[at])]
        if known:
            taken |= {min(known, key=lambda at: values[at] or 0.0), max(known, key=lambda at: values[at] or 0.0)}
        odd = next((at for at in range(first, end) if not is_number(values[at])), None)
        if odd is not None:
            taken.add(odd)
    return sorted(taken)


def is_number(value: float | None) -> bool:
    """Whether a value can be drawn."""
    return value is not None and math.isfinite(value)


def smoothed(values: Sequence[float | None], weight: float) -> list[float | None]:
    """Return the exponential moving average of a curve, without the pull of its start; gaps stay.

    `weight` is that of what came before: 0 changes nothing.
    """
    average = total = 0.0
    found: list[float | None] = []
    for value in values:
        if value is None or not math.isfinite(value):
            found.append(None)
            continue
        average = weight * average + (1 - weight) * value
        total = weight * total + (1 - weight)
        found.append(average / total)
    return found


def bars(shares: Sequence[float], below: Sequence[float], width: int, height: int) -> str:
    """Return the path of an SVG with a bar for each share of 1, which stands on the sum of those `below` it."""
    found = []
    for at, (share, base) in enumerate(zip(shares, below, strict=True)):
        if share > 0.004:
            top = height * (1 - min(1.0, base + share))
            found.append(f"M{at * width} {top:.1f}h{width}v{height * min(share, 1 - base):.1f}h-{width}z")
    return "".join(found)


def stacked(series: Mapping[str, Sequence[float]], order: Sequence[str], width: int, height: int) -> dict[str, str]:
    """Return the path of each series of shares, one upon the other, in this order; those not named come last."""
    names = [*(name for name in order if name in series), *sorted(series.keys() - set(order))]
    length = max(map(len, series.values()), default=0)
    below = [0.0] * length
    found = {}
    for name in names:
        found[name] = bars(series[name], below, width, height)
        below = [base + share for base, share in zip(below, series[name], strict=True)]
    return found


def line(values: Sequence[float], width: int, height: int, top: float) -> str:
    """Return the path of an SVG with an area below a line, whose highest value would be `top`."""
    if not values or top <= 0:
        return ""
    points = [f"{at * width} {height * (1 - min(1.0, value / top)):.1f}" for at, value in enumerate(values)]
    return f"M0 {height}L{'L'.join(points)}L{(len(values) - 1) * width} {height}z"
