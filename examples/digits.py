"""Teach a vision-language model to read handwritten digits, through an unmodified Tinker SDK.

    make demo      or      python examples/digits.py [--kind qwen3-vl] [--epochs 12] [--output demo-output]

It makes a tiny random model of Qwen3-VL's architecture, or with `--kind` of another (nothing is downloaded),
starts `tinsmith serve` with it, and fine-tunes it with LoRA on 1,500 of the 1,797 digit scans that come with
scikit-learn. It asks the model about the other 297 scans before training and after every epoch, and saves a checkpoint
at the end. The functions from `prompt` to `fine_tune` are the Tinker script; the others prepare the data, run the
server and draw the result. In a terminal, or with `--stay`, the server goes on until Ctrl-C, to be looked at.
"""

import argparse
import contextlib
import io
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import numpy as np
import tinker
from matplotlib import pyplot as plt
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from tinker import types
from transformers import PreTrainedTokenizerBase

from tinsmith.http_client import keep_from_proxy, open_url
from tinsmith.models.tiny import write_tiny_model

MODEL = "tiny"
TRAINED, BATCH, LEARNING_RATE = 1500, 50, 3e-3
IMAGE_SIDE, IMAGE_TOKENS = 64, 4  # the tiny model has patches of 16 pixels and merges 2 x 2 of them into a token
BEFORE_IMAGE = "<|im_start|>user\n<|vision_start|>"
AFTER_IMAGE = "<|vision_end|>What digit is this?<|im_end|>\n<|im_start|>assistant\n"

console = Console()


@dataclass(frozen=True)
class Scan:
    """One handwritten digit."""

    png: bytes
    digit: int


@dataclass
class Curves:
    """What the drawn result shows."""

    losses: list[float]
    """Mean loss per answer token, by step."""
    accuracies: list[tuple[int, float]]
    """(steps done, held-out accuracy)."""
    answers: list[str]
    """The last answers to the held-out scans."""


def load_scans(seed: int = 0) -> list[Scan]:
    """All 1,797 scans of 8 x 8 pixels, shuffled, each enlarged to a PNG."""
    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    return [Scan(encode_png(data.images[i]), int(data.target[i])) for i in order]


def encode_png(pixels: NDArray[np.float64]) -> bytes:
    """A scan [8, 8] with values 0 to 16 as an image."""
    image = Image.fromarray((pixels * 255 / 16).astype(np.uint8)).resize(
        (IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.NEAREST
    )
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG")
    return file.getvalue()


# ---- The Tinker script


def prompt(tokenizer: PreTrainedTokenizerBase, scan: Scan) -> types.ModelInput:
    """The question in Qwen's chat format, with the image as a separate chunk."""
    return types.ModelInput(
        chunks=[
            types.EncodedTextChunk(tokens=tokenizer.encode(BEFORE_IMAGE)),
            types.ImageChunk(data=scan.png, format="png", expected_tokens=IMAGE_TOKENS),
            types.EncodedTextChunk(tokens=tokenizer.encode(AFTER_IMAGE)),
        ]
    )


def training_datum(tokenizer: PreTrainedTokenizerBase, scan: Scan) -> types.Datum:
    """Question and answer. Position i predicts target i, so targets are shifted by one; only the answer has weight."""
    question = prompt(tokenizer, scan)
    answer = tokenizer.encode(f"{scan.digit}<|im_end|>")
    model_input = types.ModelInput(chunks=[*question.chunks, types.EncodedTextChunk(tokens=answer[:-1])])
    targets = np.zeros(model_input.length, dtype=np.int64)
    weights = np.zeros(model_input.length, dtype=np.float32)
    targets[-len(answer) :] = answer
    weights[-len(answer) :] = 1.0 / (len(answer) * BATCH)
    inputs = {"target_tokens": types.TensorData.from_numpy(targets), "weights": types.TensorData.from_numpy(weights)}
    return types.Datum(model_input=model_input, loss_fn_inputs=inputs)


def read_digits(model: tinker.TrainingClient, scans: list[Scan]) -> list[str]:
    """The model's current answer for each scan."""
    tokenizer = model.get_tokenizer()
    sampler = model.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=4, temperature=0.0)
    futures = [sampler.sample(prompt(tokenizer, scan), 1, params) for scan in scans]
    return [str(tokenizer.decode(f.result().sequences[0].tokens)).removesuffix("<|im_end|>") for f in futures]


def accuracy(answers: list[str], scans: list[Scan]) -> float:
    """Share of correct answers."""
    return float(np.mean([answer == str(scan.digit) for answer, scan in zip(answers, scans, strict=True)]))


def fine_tune(model: tinker.TrainingClient, training: list[Scan], held_out: list[Scan], epochs: int) -> Curves:
    """Train with a learning rate that falls linearly to zero, and evaluate on the held-out scans after every epoch."""
    data = [training_datum(model.get_tokenizer(), scan) for scan in training]
    answers = read_digits(model, held_out)
    curves = Curves([], [(0, accuracy(answers, held_out))], answers)
    steps = epochs * (len(data) // BATCH)
    with progress_bar() as bar:
        task = bar.add_task("fine-tuning", total=steps, loss=float("nan"), accuracy=curves.accuracies[0][1])
        for epoch in range(epochs):
            order = np.random.default_rng(epoch).permutation(len(data))
            for batch in order.reshape(-1, BATCH):
                step = len(curves.losses)
                forward = model.forward_backward([data[i] for i in batch], "cross_entropy")
                update = model.optim_step(types.AdamParams(learning_rate=LEARNING_RATE * (1 - step / steps), eps=1e-8))
                curves.losses.append(forward.result().metrics["loss:sum"])
                update.result()
                bar.update(task, advance=1, loss=curves.losses[-1])
            curves.answers = read_digits(model, held_out)
            curves.accuracies.append((len(curves.losses), accuracy(curves.answers, held_out)))
            bar.update(task, accuracy=curves.accuracies[-1][1])
    return curves


# ---- The stage around it


def progress_bar() -> Progress:
    """A progress bar with steps, loss and accuracy in one line."""
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  held-out accuracy {task.fields[accuracy]:.3f}"),
        TimeElapsedColumn(),
    ]
    return Progress(*columns, console=console)


@contextlib.contextmanager
def running_server(model_dir: Path, output: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """`tinsmith serve` on a free port, for as long as the block runs; yields the process and its URL.

    It has a process group of its own, or Ctrl-C would reach it beside `terminate`: two signals end it in haste.
    """
    log = output / "server.log"
    command = [sys.executable, "-P", "-m", "tinsmith.cli", "serve", "--base-model", f"{MODEL}={model_dir}"]
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, "--port", "0", "--data-dir", str(output / "data")], stdout=file, stderr=file, process_group=0
        )
    try:
        yield server, wait_until_ready(server, log)
    finally:
        server.terminate()
        server.wait()


def wait_until_ready(server: "subprocess.Popen[bytes]", log: Path) -> str:
    """The server's URL, as soon as healthz answers 200."""
    while server.poll() is None:
        time.sleep(0.1)
        if listening := re.search(r"listening on (http://\S+),", log.read_text()):
            with contextlib.suppress(URLError):  # 503 until the model is loaded; refused if the server has just ended
                open_url(f"{listening[1]}/api/v1/healthz", 10.0).close()
                keep_from_proxy(listening[1])
                return listening[1]
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def draw(curves: Curves, held_out: list[Scan], file: Path) -> None:
    """Draw loss and accuracy curves, and a grid of held-out scans with the model's answers, wrong ones first in red."""
    figure = plt.figure(figsize=(14, 6), layout="constrained")
    halves = figure.add_gridspec(1, 2, width_ratios=[1, 1.25])
    left, right = figure.add_subfigure(halves[0]), figure.add_subfigure(halves[1])
    loss, score = left.subplots(2, 1, sharex=True)
    loss.plot(curves.losses, linewidth=0.8)
    loss.set(ylabel="loss per answer token", yscale="log")
    score.plot(*zip(*curves.accuracies, strict=True), marker="o")
    score.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1.02))
    right_first = sorted(range(len(held_out)), key=lambda i: curves.answers[i] == str(held_out[i].digit))
    for axes, i in zip(right.subplots(5, 10).flat, right_first, strict=False):
        correct = curves.answers[i] == str(held_out[i].digit)
        axes.imshow(Image.open(io.BytesIO(held_out[i].png)))
        axes.set_title(curves.answers[i] or "-", color="black" if correct else "red", fontsize=11)
        axes.axis("off")
    right.suptitle("held-out scans and the model's answers (wrong ones first, in red)")
    figure.savefig(file, dpi=110)
    plt.close(figure)


NEXT_STEPS = """
The same with a real model on a GPU:

    tinsmith serve --base-model Qwen/Qwen3.5-4B
    export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-anything
    python your_tinker_script.py          # base_model="Qwen/Qwen3.5-4B"

`tinsmith serve --help-all` lists all settings. You can write your own script by changing this one, examples/digits.py.
"""


def main() -> None:
    """Make the model, start the server, fine-tune, and save the image."""
    parser = argparse.ArgumentParser(description="Fine-tune a tiny vision-language model to read handwritten digits.")
    parser.add_argument(
        "--kind",
        choices=["qwen3-vl", "qwen3-5", "qwen3-vl-moe", "qwen3-5-moe"],
        default="qwen3-vl",
        help="architecture of the model (default: qwen3-vl)",
    )
    parser.add_argument("--epochs", type=int, default=12, help="passes over the 1,500 training scans (default: 12)")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="directory of the results (default: demo-output)"
    )
    parser.add_argument(
        "--stay",
        action=argparse.BooleanOptionalAction,
        default=sys.stdin.isatty() and sys.stdout.isatty(),
        help="let the server go on at the end, until Ctrl-C (default: in a terminal)",
    )
    options = parser.parse_args()
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)  # as Ctrl-C: the server ends, too
    options.output.mkdir(parents=True, exist_ok=True)
    model_dir = options.output / options.kind
    if not (model_dir / "config.json").exists():
        console.print(f"making a tiny random {options.kind} model in {model_dir}")
        write_tiny_model(options.kind, model_dir)
    scans = load_scans()
    training, held_out = scans[:TRAINED], scans[TRAINED:]
    console.print("starting the server")
    with running_server(model_dir, options.output) as (server, url):
        console.print(f"fine-tuning on {len(training)} scans, {len(held_out)} held out")
        console.print(f"watch it in a browser: {url}/runs", highlight=False)
        with tinker.ServiceClient(base_url=url, api_key="tml-demo") as service:
            model = service.create_lora_training_client(base_model=MODEL).result()
            curves = fine_tune(model, training, held_out, options.epochs)
            model.save_weights_for_sampler("digits").result()
        image = options.output / "digits.png"
        draw(curves, held_out, image)
        console.print(
            f"held-out accuracy: {curves.accuracies[0][1]:.3f} -> {curves.accuracies[-1][1]:.3f}", highlight=False
        )
        console.print(f"curves and answers: {image}\n{NEXT_STEPS}", highlight=False, soft_wrap=True)
        if options.stay:
            console.print(
                f"The server goes on until Ctrl-C: {url}/runs, {url}/playground", highlight=False, soft_wrap=True
            )
            with contextlib.suppress(KeyboardInterrupt):
                server.wait()


if __name__ == "__main__":
    main()
