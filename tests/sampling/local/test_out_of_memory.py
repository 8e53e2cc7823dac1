"""Sampling when memory really runs out, in a process of its own whose address space is limited."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SCRIPT = """
import resource, sys
from dataclasses import replace
from pathlib import Path
import torch
from tests.bases import load, random_tokens, renderer
from tests.sampling.local.test_sampler import PARAMS, ask, run, sampler_of

torch.set_num_threads(1)
base = load(Path(sys.argv[1]), device="cpu")
render = renderer(base)
prompts = [render.render([random_tokens(i, 2000)]) for i in range(12)]

def start(sampler):
    for i, prompt in enumerate(prompts):
        sampler.add(str(i), ask(replace(PARAMS, max_tokens=5, seed=i), prompt_logprobs=True), prompt, None)
    return sampler

expected = {}
for i, prompt in enumerate(prompts):
    alone = sampler_of(base, 200)
    alone.add("x", ask(replace(PARAMS, max_tokens=5, seed=i), prompt_logprobs=True), prompt, None)
    expected[str(i)] = run(alone)["x"].sequences[0].tokens

unlimited = resource.getrlimit(resource.RLIMIT_AS)
for spare in (1, 2, 4, 8, 16):  # MiB: too little for even one prompt at first; what a pass once had is not given back to the system
    sampler = start(sampler_of(base, 2000, prefill_tokens=40_000))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare * 2**20, unlimited[1]))
    try:
        done = run(sampler)
    except RuntimeError:
        continue
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
    assert {name: result.sequences[0].tokens for name, result in done.items()} == expected
    if sampler.schedule.prefill_tokens < 40_000:
        print("retreated to", sampler.schedule.prefill_tokens)
        break
"""


def test_a_step_that_runs_out_of_memory_is_taken_back_and_changes_nothing(family_dir: Callable[[str], Path]) -> None:
    command = [sys.executable, "-c", SCRIPT, str(family_dir("qwen3"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "retreated to" in done.stdout
