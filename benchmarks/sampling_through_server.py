"""Sampling 8 answers to each of 8 prompts through SDK and server, against transformers' `generate` of the 64 rows.

Tiny model, temperature 1, 64 tokens a prompt and answer. Both sides take turns on the same cores; median of 5 rounds.
Run it with: taskset -c 0,1 python -m benchmarks.sampling_through_server
"""

import tempfile
from pathlib import Path

import tinker
from tinker import types

from benchmarks.sampler import Prompt, generate_batch, load_generator, prompts
from benchmarks.servers import API_KEY, BASE_MODEL, tinsmith_server
from benchmarks.timing import in_turn, report
from tinsmith.models.tiny import write_tiny_model

PROMPTS, SAMPLES, LENGTH = 8, 8, 64
PARAMS = types.SamplingParams(max_tokens=LENGTH, temperature=1.0, stop=[])


def sample_all(client: tinker.SamplingClient, asked: list[Prompt]) -> None:
    """Send every prompt, then wait for all."""
    inputs = [types.ModelInput.from_ints(prompt.tokens.tolist()) for prompt in asked]
    futures = [client.sample(prompt, num_samples=SAMPLES, sampling_params=PARAMS) for prompt in inputs]
    for future in futures:
        if any(len(sequence.tokens) != LENGTH for sequence in future.result().sequences):
            raise RuntimeError(f"an answer does not have {LENGTH} tokens")


def main() -> None:
    """Measure and print the line."""
    asked = prompts([(LENGTH, LENGTH)] * PROMPTS)
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model("qwen3", Path(folder))
        model = load_generator(Path(folder))
    rows = [prompt for prompt in asked for _ in range(SAMPLES)]
    with tinsmith_server() as url, tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
        client = service.create_sampling_client(base_model=BASE_MODEL).result()
        ours_s, generate_s = in_turn(lambda: sample_all(client, asked), lambda: generate_batch(model, rows), rounds=5)
    tokens = PROMPTS * SAMPLES * LENGTH
    rates = {"ours_tokens_per_s": tokens / ours_s, "generate_tokens_per_s": tokens / generate_s}
    report("sampling_through_server", generate_s / ours_s, "at least 0.7 times as fast", **rates)


if __name__ == "__main__":
    main()
