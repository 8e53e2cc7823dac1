"""vLLM by itself, through its Python API with CUDA graphs: the rival that `benchmarks.gpu.sampling` starts.

It runs in vLLM's own environment and imports nothing of Tinsmith. The first argument is a job in JSON: `model` (a
directory without weights, which are drawn at random), `adapter` (a directory of PEFT's, or null), `loads` (each `name`,
`rows`, `prompt`, `answer`, `with_adapter`: that many rows sample `answer` tokens each after prompts of `prompt` random
ones), `options` (of vLLM's `LLM`). Each load gives one line of JSON: its name, and the seconds of each of three rounds
after one to warm up.
"""

import json
import random
import sys
import time
from typing import Any


def main() -> None:
    """Load the model and measure each load."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    job = json.loads(sys.argv[1])
    started = time.perf_counter()
    adapter = LoRARequest("adapter", 1, job["adapter"]) if job["adapter"] else None
    engine: Any = LLM(job["model"], load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", **job["options"])
    print(json.dumps({"name": "load", "seconds": [time.perf_counter() - started]}), flush=True)
    numbers = random.Random(0)

    def sample(load: dict[str, Any], answer: int) -> float:
        prompts = [
            {"prompt_token_ids": [numbers.randrange(1500) for _ in range(load["prompt"])]} for _ in range(load["rows"])
        ]
        adapters = [adapter if row < load["with_adapter"] else None for row in range(load["rows"])]
        params = SamplingParams(temperature=1.0, max_tokens=answer, ignore_eos=True, detokenize=False, logprobs=0)
        began = time.perf_counter()
        outputs = engine.generate(prompts, params, lora_request=adapters if adapter else None, use_tqdm=False)
        took = time.perf_counter() - began
        if any(len(output.outputs[0].token_ids) != answer for output in outputs):
            raise RuntimeError(f"an answer does not have {answer} tokens")
        return took

    for load in job["loads"]:
        sample(load, min(64, load["answer"]))
        print(
            json.dumps({"name": load["name"], "seconds": [sample(load, load["answer"]) for _ in range(3)]}), flush=True
        )


if __name__ == "__main__":
    main()
