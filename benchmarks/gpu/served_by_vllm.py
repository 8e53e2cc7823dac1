"""vLLM on GPUs with random bfloat16 weights of Qwen3-1.7B's shape: publishing, and sampling against bare vLLM.

- From save_weights_and_get_sampling_client to a token sampled with changed weights: an adapter of rank 32, and all
  parameters. These get into vLLM in the way that fits the machine, from GPU to GPU where there are two; where there is
  one, from its own memory, and as a file too.
- 64 requests of 64 tokens at once, 64 or 256 sampled each: tokens per second through SDK, server and vLLM over those of
  this vLLM alone.

Run it with: TINSMITH_TEST_DEVICE=cuda TINSMITH_TEST_VLLM_PYTHON=.../bin/python python -m benchmarks.gpu.served_by_vllm
`--parts publishing` leaves the requests out, `--parts requests` the publishing. `--workers 2 --tensor-parallel 2`
takes four GPUs: two train, and vLLM divides the model over the other two.
"""

import argparse
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tinker
import torch

from benchmarks.gpu.sampling import SHARED_MEMORY
from benchmarks.gpu.shapes import configuration, network_of, write_surroundings
from benchmarks.servers import API_KEY
from benchmarks.with_vllm import ANSWERS, publishing, texts, throughput
from tests.with_vllm.serving import sampling_with_vllm, wait_for_vllm

PARTS = ("requests", "publishing")
SHARE = "0.6"
"""Of a GPU's memory, for training where vLLM may have the rest."""
SHARE_ALONE = "0.9"
"""Where vLLM divides the model over GPUs of its own. Six snapshots of all weights need it on a GPU of 80 GB."""


@contextmanager
def running(model: Path, *options: str) -> Iterator[tuple[tinker.ServiceClient, str]]:
    """An SDK client of a server of the model, and the address of its vLLM server, which is ready.

    At the end the log's last publishes.
    """
    # Snapshots for all versions, which else go to disk, and GPU memory for training all weights in float32.
    options = ("--base-model", f"tiny={model}", "--snapshot-gib", "64", "--memory-share", SHARE, *options)
    with tempfile.TemporaryDirectory() as folder, sampling_with_vllm(Path(folder), *options) as server:
        address = wait_for_vllm(server)
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            yield service, address
        for line in re.findall(r"adapter \S+ is on the vLLM server .*: (.* to load it)", server.log.read_text())[-3:]:
            print(f"adapter: {line}")


def main() -> None:
    """Measure and print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="what to measure")
    parser.add_argument("--workers", type=int, default=1, help="how many GPUs train")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="over how many GPUs vLLM divides the model")
    parser.add_argument(
        "--transfer", default="auto", help="how full weights get into vLLM: --vllm-transfer of the server"
    )
    asked = parser.parse_args()
    parts = asked.parts
    gpus = [
        "--workers",
        str(asked.workers),
        "--vllm-tensor-parallel",
        str(asked.tensor_parallel),
        "--vllm-transfer",
        asked.transfer,
    ]
    if asked.tensor_parallel > 1:
        gpus += ["--memory-share", SHARE_ALONE]
    among = f"_by_{asked.workers}_to_{asked.tensor_parallel}" if asked.workers > 1 or asked.tensor_parallel > 1 else ""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        config = configuration("1.7B")
        network = network_of(config)
        model = write_surroundings(config, Path(folder))
        network.save_pretrained(model)
        del network
        torch.cuda.empty_cache()
        with running(model, *gpus) as (service, address):
            client = service.create_sampling_client(base_model="tiny").result()
            for answer in ANSWERS if "requests" in parts else ():
                throughput(client, address, "vllm_gpu_text", "at least 0.95 times as fast", texts, answer)
            if "publishing" not in parts:
                return
            for unembed in (False, True):
                adapted = service.create_lora_training_client("tiny", rank=32, train_unembed=unembed).result()
                publishing(adapted, f"vllm_gpu_publish_lora{'_and_lm_head' * unembed}{among}", "at most 150 ms")
            wanted = "at most 600 ms" if asked.tensor_parallel > 1 else ""
            publishing(
                service.create_lora_training_client("tiny", rank=0).result(), f"vllm_gpu_publish_full{among}", wanted
            )
        if torch.cuda.device_count() == 1:
            with running(model, "--vllm-transfer", "file") as (service, _):
                publishing(
                    service.create_lora_training_client("tiny", rank=0).result(), "vllm_gpu_publish_full_by_file", ""
                )


if __name__ == "__main__":
    main()
