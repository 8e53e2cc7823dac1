"""What `chaos.py` has found: its files, the table and the picture of them."""

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

Curve = list[tuple[str, float]]
"""What each number of a run is, and the number."""

DRAWN = {"sft": "loss", "rl": "reward"}
"""Numbers of each kind of run that are drawn."""


@dataclass(frozen=True)
class Kill:
    """What was killed, at which number of the curve, and the seconds until an operation that was sent later ended."""

    victims: str
    place: int
    seconds: float


@dataclass(eq=False)
class Finding:
    """A run."""

    kind: str
    workers: int
    is_quiet: bool
    place: str = "here"
    curve: Curve = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    operations: int = 0
    """Operations that ended well."""
    failed: str = ""
    """What the run failed with; empty if it did not."""
    directory: str = ""
    """The directory it was read from, which has its quiet run."""

    def is_like(self, other: "Finding") -> bool:
        """Whether the other is a run of the same kind."""
        return (self.kind, self.workers, self.place) == (other.kind, other.workers, other.place)

    def write(self, file: Path) -> None:
        """Write it in one go: it may be read at any time."""
        new = file.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)))
        new.replace(file)


def read_file(file: Path) -> Finding:
    """What a file holds."""
    fields = json.loads(file.read_text())
    curve = [(str(name), float(number)) for name, number in fields.pop("curve")]
    kills = [Kill(**kill) for kill in fields.pop("kills")]
    return Finding(**fields | {"curve": curve, "kills": kills, "directory": str(file.parent)})


def read(directories: Iterable[Path]) -> list[Finding]:
    """What the files in directories hold."""
    return [read_file(file) for directory in directories for file in sorted(directory.glob("*.json"))]


def quiet_of(findings: Sequence[Finding], disturbed: Finding) -> Curve:
    """The curve of the quiet run beside a disturbed one."""
    return next(
        (
            each.curve
            for each in findings
            if each.is_quiet and each.is_like(disturbed) and each.directory == disturbed.directory
        ),
        [],
    )


def differs_at(one: Curve, other: Curve) -> int | None:
    """The first number that is another one, of those that both have; None if there is none."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


def table(findings: Sequence[Finding]) -> tuple[list[str], bool]:
    """The lines of the table, and whether nothing is wrong."""
    seconds, faults, compared = defaultdict[str, list[float]](list), list[str](), Counter[str]()
    disturbed = [each for each in findings if not each.is_quiet and (each.operations or each.failed)]
    for found in disturbed:
        for kill in found.kills:
            seconds[kill.victims].append(kill.seconds)
        quiet, name = quiet_of(findings, found), f"{found.kind} with {found.workers}"
        compared[found.kind] += min(len(found.curve), len(quiet))
        if found.failed:
            faults.append(f"{name}, after {found.operations} operations: {found.failed}")
        if len(quiet) < len(found.curve):
            faults.append(f"{name}: only {len(quiet)} of its {len(found.curve)} numbers are in a quiet run")
        place = differs_at(found.curve, quiet)
        if place is not None:
            faults.append(f"{name}: number {place} is {found.curve[place]}, and {quiet[place]} in a quiet run")
    lines = ["| victim | signals | median s | p90 s | slowest s |", "|---|---|---|---|---|"]
    for victims, times in seconds.items():
        times.sort()
        p90 = times[round(0.9 * (len(times) - 1))]
        lines.append(f"| {victims} | {len(times)} | {statistics.median(times):.1f} | {p90:.1f} | {times[-1]:.1f} |")
    operations = sum(each.operations for each in disturbed)
    lines.append(f"\n{len(disturbed)} runs, {operations} operations, each exactly once, if nothing else follows.")
    numbers = ", ".join(f"{kind} {number}" for kind, number in compared.items())
    lines.append(f"Numbers of their curves that equal those of quiet runs to the last bit: {numbers}.")
    return [*lines, *(f"FAILED: {fault}" for fault in faults)], not faults


def draw(findings: Sequence[Finding], file: Path) -> None:
    """Draw quiet and disturbed curves of both kinds, with a mark where something was killed."""
    from matplotlib import pyplot as plt  # here: the table needs no library

    figure, panels = plt.subplots(1, len(DRAWN), figsize=(11, 4), layout="constrained")
    for panel, (kind, number) in zip(panels, DRAWN.items(), strict=True):
        quiet = max((each.curve for each in findings if each.is_quiet and each.kind == kind), key=len, default=[])
        panel.plot(*drawn(quiet, number), color="0.8", linewidth=6, label="undisturbed")
        disturbed = [each for each in findings if not each.is_quiet and each.kind == kind]
        for found in disturbed:
            panel.plot(*drawn(found.curve, number), color="tab:blue", linewidth=0.8)
            steps = [sum(name == number for name, _ in found.curve[: kill.place]) for kill in found.kills]
            values = drawn(found.curve, number)[1]
            marked = [step for step in steps if step < len(values)]
            panel.plot([step + 1 for step in marked], [values[step] for step in marked], "x", color="tab:red")
        panel.set_title(f"{kind.upper()}: {len(disturbed)} runs, {sum(len(each.kills) for each in disturbed)} signals")
        panel.set_xlabel("step")
        panel.set_ylabel(number)
    panels[0].plot([], [], color="tab:blue", linewidth=0.8, label="disturbed")
    panels[0].plot([], [], "x", color="tab:red", label="a signal")
    panels[0].legend()
    figure.savefig(file)


def drawn(curve: Curve, number: str) -> tuple[list[int], list[float]]:
    """Steps of a curve, from 1, and the numbers of that name."""
    values = [value for name, value in curve if name == number]
    return list(range(1, len(values) + 1)), values
