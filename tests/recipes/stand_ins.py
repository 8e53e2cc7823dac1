"""What the recipes load from the Hub by its name, made here: a directory per name, below the directory in which a
recipe is started.

Text is about a price: "Ann brings a kettle. How many coins does mending it cost?", to be answered by `\\boxed{3}`.
Conversations to imitate name any price from 1 to 4, so a model that imitates them is right in a quarter of the cases;
rewards and preferences know the one that is right. Images are scikit-learn's digit scans.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

Row = dict[str, Any]

PRICES, RIGHT_PRICE = range(1, 5), 3
CUSTOMERS = ("Ann", "Tom", "Maria", "Henry", "Lisa", "Paul", "Emma", "Oscar")
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
OTHER_SUFFIX = " Write your answer in \\boxed{} format."
"""Which the recipes put behind a question: `rl_loop` the first, `rl_basic` the second."""
EXAMPLE = (
    {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r "
        "10) y. "
        "We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
)
"""The worked example that `rl_loop` puts before every question."""

GSM8K_CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
---
"""

WIKITEXT_CARD = """---
configs:
- config_name: wikitext-103-raw-v1
  data_files:
  - split: train
    path: train.jsonl
---
"""

TRAINING_SCANS, SIDE = 1500, 64
"""Of 1,797 scans; and the side in pixels to which each is enlarged."""

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def write_stand_ins(directory: Path) -> None:
    """All datasets, the same at every call."""
    rng = random.Random(0)
    questions = [f"{rng.choice(CUSTOMERS)} brings a kettle. How many coins does mending it cost?" for _ in range(1024)]
    solved = [
        {"question": question, "answer": f"The tinsmith asks for {RIGHT_PRICE}.\n#### {RIGHT_PRICE}"}
        for question in questions
    ]
    _write_rows(
        directory / "HuggingFaceH4/no_robots/train.jsonl",
        [_conversation(question, rng) for question in questions[:640]],
    )
    _write_rows(
        directory / "HuggingFaceH4/no_robots/test.jsonl", [_conversation(question, rng) for question in questions[-64:]]
    )
    _write_rows(directory / "openai/gsm8k/main/train.jsonl", solved)
    _write_rows(directory / "openai/gsm8k/main/test.jsonl", solved[-64:])
    (directory / "openai/gsm8k/README.md").write_text(GSM8K_CARD)
    _write_rows(directory / "Anthropic/hh-rlhf/train.jsonl", [_preference(question, rng) for question in questions])
    _write_rows(
        directory / "Anthropic/hh-rlhf/test.jsonl", [_preference(question, rng) for question in questions[-64:]]
    )
    _write_rows(
        directory / "zwhe99/DeepMath-103K/train.jsonl", [{"question": question + SUFFIX} for question in questions]
    )
    (directory / "Salesforce/wikitext").mkdir(parents=True)
    (directory / "Salesforce/wikitext/README.md").write_text(WIKITEXT_CARD)
    _write_rows(directory / "Salesforce/wikitext/train.jsonl", [{"text": question} for question in questions])
    _write_scans(directory / "dpdl-benchmark/caltech101")


def _conversation(question: str, rng: random.Random) -> Row:
    """A question and any price; every second time behind the worked example."""
    before = EXAMPLE if rng.random() < 0.5 else ()
    answer = f"\\boxed{{{rng.choice(PRICES)}}}"
    asked = question + rng.choice((SUFFIX, OTHER_SUFFIX))
    return {"messages": [*before, {"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def _preference(question: str, rng: random.Random) -> Row:
    """The right price is preferred to a wrong one."""
    wrong = rng.choice([price for price in PRICES if price != RIGHT_PRICE])
    asked = f"\n\nHuman: {question}{SUFFIX}\n\nAssistant: "
    return {"chosen": f"{asked}\\boxed{{{RIGHT_PRICE}}}", "rejected": f"{asked}\\boxed{{{wrong}}}"}


def _write_rows(file: Path, rows: list[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_scans(directory: Path) -> None:
    """A folder per split, in it one per class: `datasets` takes the classes from the folders' names."""
    data = load_digits()
    for place, i in enumerate(np.random.default_rng(0).permutation(len(data.target))):
        folder = directory / ("train" if place < TRAINING_SCANS else "test") / DIGITS[data.target[i]]
        folder.mkdir(parents=True, exist_ok=True)
        scan = Image.fromarray((data.images[i] * 255 / 16).astype(np.uint8)).resize(
            (SIDE, SIDE), Image.Resampling.NEAREST
        )
        scan.convert("RGB").save(folder / f"{place:04}.png")
