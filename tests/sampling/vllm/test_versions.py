"""Models with gated delta nets are sampled by the versions of vLLM, and on the devices, that they were tested with. Others are refused."""

import pytest
import torch

from tests.preloaded import REAL_PYTHON
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.sampling.vllm.versions import check_installed, refusal


def test_only_what_was_run_is_taken(hybrid_base: BaseModel, text_base: BaseModel) -> None:
    assert refusal(hybrid_base, "0.32.0", torch.device("cpu")) is None
    for base, version, device in ((hybrid_base, "0.26.0", "cpu"), (hybrid_base, "0.32.0", "cuda")):
        reason = refusal(base, version, torch.device(device))
        assert reason is not None
        assert f"with which vLLM {version} was not tested on {device}, only 0.32 on cpu: serve it with --sampler local" in reason
    assert refusal(text_base, "0.26.0", torch.device("cpu")) is None


def test_an_installed_vllm_is_asked_before_it_is_started(
    hybrid_base: BaseModel, text_base: BaseModel, tmp_path: pytest.TempPathFactory
) -> None:
    """This Python has none."""
    check_installed(text_base, REAL_PYTHON, text_base.device)
    with pytest.raises(ConfigError, match=r"\(qwen3_5\) has gated delta nets, with which vLLM missing was not tested"):
        check_installed(hybrid_base, REAL_PYTHON, hybrid_base.device)
    with pytest.raises(ConfigError, match="does not say which vLLM it has"):
        check_installed(hybrid_base, "/bin/false", hybrid_base.device)
