"""Adapters that a vLLM server applies in part: it shows so itself when it starts, and then gets them merged into the
base's weights.

Invariant: The parts of an adapter that a vLLM server does not apply are merged into the weights, or the model is
refused; probes detect them. Also: `tests/sampling/vllm/test_verify.py`.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import tinker

from tests.acceptance.talking import image_input, text_input
from tests.with_vllm.serving import sampling_with_vllm, wait_for_vllm
from tests.with_vllm.talking import learn, sample, snapshot, worst_difference
from tinsmith.models.tiny import write_tiny_model

APPLIED = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_z", "gate_proj", "up_proj", "down_proj", "lm_head")
"""What vLLM is told to apply adapters to: all that LoRA trains, but the output projections of gated delta nets.

It drops these silently. An adapter that trains attention has them, so vLLM applies no such adapter wholly.
"""
BOUND = 5e-4
"""As in `test_agreement.py`."""


@pytest.mark.slow  # `tests/sampling/vllm/test_verify.py` has what probes show and what is merged
def test_what_is_not_applied_is_merged_or_refused(tmp_path: Path) -> None:
    write_tiny_model("qwen3-5", tmp_path / "model")
    options = [f"--vllm-arg={option}" for option in ("--lora-target-modules", *APPLIED)]
    with sampling_with_vllm(tmp_path, "--base-model", f"tiny={tmp_path / 'model'}", *options) as server:
        wait_for_vllm(server)
        (said,) = re.findall(r"applies no adapters to (.*); what trains these is merged", server.log.read_text())
        assert {kind.partition(".")[0] for kind in said.split(", ")} == {"linear_attn", "self_attn"}
        with tinker.ServiceClient(base_url=server.url, api_key="tml-merged") as service:
            with pytest.raises(
                tinker.TinkerError, match=r"applies no adapters to linear_attn.* of tiny\. .* train_unembed=False"
            ):
                service.create_lora_training_client(base_model="tiny", rank=8).result()
            base, answers = service.create_sampling_client(base_model="tiny").result(), []
            alone = service.create_lora_training_client(base_model="tiny", rank=8, train_attn=False).result()
            for merged in (True, False):
                kind: Any = {"train_unembed" if merged else "train_attn": False}
                client = service.create_lora_training_client(base_model="tiny", rank=8, seed=1, **kind).result()
                for step in range(2):
                    learn(client, seed=step)
                    for prompt in (text_input(1, 30), image_input(client, 2)):
                        reply = sample(snapshot(client), prompt, n=2)
                        assert worst_difference(client, prompt, reply) < BOUND
                        answers.append(tuple(reply.sequences[0].tokens))
                    assert worst_difference(alone, prompt, sample(base, prompt)) < BOUND
            assert len(set(answers)) == len(answers)
