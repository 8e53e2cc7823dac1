"""What GPU benchmarks share: cases in processes of their own with a time limit, timing, the card's rates, output.

A case runs in a fork of the script: it starts with an empty device, what it patches or compiles touches no other case,
and it is killed at its limit. The script itself must therefore never touch CUDA. `TINY=1` runs small shapes on a CPU,
to try a script; its numbers mean nothing.
"""

import argparse
import gc
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork

import torch

TINY = os.environ.get("TINY") == "1"
DEVICE = "cpu" if TINY else "cuda"

Figures = dict[str, Any]
"""What a case has measured, by name."""

_output: list[Path] = []
"""The file that lines are added to, if `--output` names one."""


def say(**fields: object) -> None:
    """One line `name=value ...`, printed at once and added to the file of `--output`."""
    line = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
    print(line, flush=True)
    for path in _output:
        with path.open("a") as file:
            file.write(line + "\n")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    text = str(value)
    return f'"{text}"' if " " in text else text


def figure(name: str, measured: float | None, wanted: str, **details: object) -> None:
    """The line of one figure of the table in README.md. None was not measured."""
    if measured is not None:
        say(figure=name, measured=measured, wanted=wanted, **details)


def ratio(one: Figures, other: Figures, name: str = "tokens_per_s") -> float | None:
    """One case's number over another's; None if one of them failed or was not asked for."""
    return one[name] / other[name] if one.get(name) and other.get(name) else None


def begin(description: str | None, parts: Sequence[str], sides: Sequence[str] = ()) -> argparse.Namespace:
    """Read the command line (`parts`, `sides`, `budget`, `output`) and say the commit and versions measured."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", default=",".join(parts), help=f"what to measure, with commas between; of {', '.join(parts)}"
    )
    if sides:
        parser.add_argument("--sides", default=",".join(sides), help=f"whom to measure; of {', '.join(sides)}")
    parser.add_argument(
        "--budget", type=float, default=120.0, help="most seconds of one side of one part, building included"
    )
    parser.add_argument("--output", type=Path, help="a file that gets the lines too, behind what it holds")
    asked = parser.parse_args()
    asked.parts = _chosen(parser, "--parts", asked.parts, parts)
    asked.sides = _chosen(parser, "--sides", asked.sides, sides) if sides else []
    begin_here(Path(sys.argv[0]).stem, asked.output)
    return asked


def begin_here(script: str, output: Path | None) -> None:
    """Add the lines below to `output` too, and say on which commit and versions they were measured."""
    write_to(output)
    versions = {name: _version(name) for name in ("torch", "triton", "transformers", "peft", "liger-kernel", "vllm")}
    present = {name: version for name, version in versions.items() if version}
    say(script=script, date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), commit=_commit(), tiny=TINY, **present)


def write_to(output: Path | None) -> None:
    """Add the lines below to that file too, if there is one."""
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        _output.append(output)


def _chosen(parser: argparse.ArgumentParser, option: str, text: str, known: Sequence[str]) -> list[str]:
    chosen: list[str] = text.split(",")
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"{option}: {', '.join(unknown)} is not one of {', '.join(known)}")
    return [name for name in known if name in chosen]


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit of the working tree, or what `COMMIT` says where the tree was copied without its history."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return os.environ.get("COMMIT") or found or "unknown"


def isolated(name: str, action: Callable[[], Figures], limit_s: float) -> Figures:
    """Run a case in a fork and say its figures; empty if it fails, runs out of memory or takes over `limit_s`."""
    return isolated_series(name, lambda: iter([("", action())]), limit_s).get("", {})


def isolated_series(
    name: str, action: Callable[[], Iterator[tuple[str, Figures]]], limit_s: float
) -> dict[str, Figures]:
    """The same for a case that yields several figures, each under its own name; those that come in time count."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(name, action, sender))
    started = time.perf_counter()
    sys.stdout.flush()
    process.start()
    sender.close()
    found: dict[str, Figures] = {}
    try:
        while receiver.poll(max(0.0, limit_s - (time.perf_counter() - started))):
            told = receiver.recv()
            if told is None:
                break
            label, figures = told
            found[label] = figures
            elapsed = round(time.perf_counter() - started, 1)
            say(case=f"{name}/{label}" if label else name, **figures, after_s=elapsed)
        else:
            say(case=name, failed=f"not done after {limit_s:.0f} s")
    except EOFError:
        say(case=name, failed="its process died")
    finally:
        # What it holds on the device goes with it, and so do programs that it has started
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    return found


def _answer(name: str, action: Callable[[], Iterator[tuple[str, Figures]]], sender: Connection) -> None:
    os.setpgid(0, 0)
    try:
        for told in action():
            sender.send(told)
    except torch.OutOfMemoryError as error:
        say(case=name, failed="out of memory", reason=str(error).partition(". ")[0])
    except Exception as error:  # noqa: BLE001  the other cases go on
        traceback.print_exc(limit=-3, file=sys.stdout)
        say(case=name, failed=f"{type(error).__name__}: {error}".partition("\n")[0])
    sender.send(None)


def finish() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def release() -> None:
    """Give back what nobody uses, and begin a new peak of memory."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> Figures:
    """The most GiB that PyTorch had allocated and reserved since `release`; nothing on a CPU."""
    if DEVICE != "cuda":
        return {}
    return {"gib": torch.cuda.max_memory_allocated() / 2**30, "reserved_gib": torch.cuda.max_memory_reserved() / 2**30}


@dataclass(frozen=True)
class Timing:
    """Seconds of one call."""

    median: float
    fastest: float
    slowest: float
    first: float
    """Of the very first call, which compiles."""

    def shown(self) -> Figures:
        """As fields of a line."""
        return {"median_s": self.median, "fastest_s": self.fastest, "slowest_s": self.slowest, "first_s": self.first}


def timed(step: Callable[[], object], warm: int = 3, rounds: int = 3, most: int = 5, enough_s: float = 12.0) -> Timing:
    """Median over rounds of several calls each, after `warm` calls; slow ones repeat less, for about `enough_s`."""
    times = [_seconds(step, 1)]
    # The first call compiles: how long others take is seen on the second.
    while len(times) < warm and (times[-1] < enough_s / 2 or (len(times) == 1 and times[0] < 3 * enough_s)):
        times.append(_seconds(step, 1))
    calls = max(1, min(most, int(enough_s / rounds / max(times[-1], 1e-6))))
    rounds = max(1, min(rounds, int(enough_s / max(times[-1], 1e-6))))
    measured = [_seconds(step, calls) for _ in range(rounds)]
    return Timing(statistics.median(measured), min(measured), max(measured), times[0])


def _seconds(step: Callable[[], object], calls: int) -> float:
    """Of each call; the device is waited for before and after."""
    finish()
    started = time.perf_counter()
    for _ in range(calls):
        step()
    finish()
    return (time.perf_counter() - started) / calls


def card() -> Figures:
    """The card's rates: a sustained bf16 matmul of 8192³ in TFLOP/s, and a copy in TB/s (read plus written)."""
    size, repeats = (64, 2) if TINY else (8192, 20)
    a = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn_like(a)
    _seconds(lambda: a @ b, 1 if TINY else 300)  # until the clocks have settled
    products = [_seconds(lambda: a @ b, repeats) for _ in range(7)]
    source = torch.empty(2**16 if TINY else 2**31, device=DEVICE, dtype=torch.uint8)
    target = torch.empty_like(source)
    copies = [_seconds(lambda: target.copy_(source), 10) for _ in range(3)]
    rates = [2 * size**3 / s / 1e12 for s in products]
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    total = torch.cuda.get_device_properties(0).total_memory / 2**30 if DEVICE == "cuda" else 0.0
    return {
        "device": name,
        "memory_gib": total,
        "matmul_tflops": statistics.median(rates),
        "slowest_tflops": min(rates),
        "fastest_tflops": max(rates),
        "copy_tb_per_s": 2 * source.nbytes / statistics.median(copies) / 1e12,
    }
