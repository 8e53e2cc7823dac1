"""How long an episode may get: what else has to find room in the server's context."""

from typing import Any

import pytest
import tinker

from tests.rl.test_run import config_of
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.config import from_tree
from tinsmith.rl.connection import context_limit
from tinsmith.rl.rules import rules_of


@pytest.mark.parametrize(
    ("sections", "spare"),
    [
        ({}, 0),
        ({"generation": {"stop": ["\n"]}}, "tail"),
        ({"generation": {"stop": ["\n"], "end_turn_after_stop_string": False}}, 0),
        ({"training": {"kl_coefficient": 0.1}}, 1),
        ({"generation": {"top_p": 0.9}}, 1),
        ({"generation": {"top_k": 5, "stop": ["\n"]}, "training": {"kl_coefficient": 0.1}}, "tail and one"),
    ],
)
def test_answers_leave_room_for_what_comes_behind_them(sections: dict[str, Any], spare: int | str, plain: ChatTemplate) -> None:
    tail = len(plain.end_of_turn_ids)
    expected = {"tail": tail, "tail and one": tail + 1}.get(str(spare), spare)
    config = from_tree({"model": {"base_model": "tiny"}, "env": {"name": "arithmetic"}, **sections})
    assert rules_of(config, 100, plain).max_context == 100 - int(expected)


def test_the_longest_episode_can_be_scored(server_url: str, plain: ChatTemplate, tmp_path: Any) -> None:
    config = config_of(server_url, tmp_path, model={"base_model": "tiny"}, training={"kl_coefficient": 0.1})
    longest = rules_of(config, context_limit(config.server, "tiny"), plain).max_context
    reference = tinker.ServiceClient(base_url=server_url, api_key="tml-test").create_sampling_client(base_model="tiny").result()
    assert len(reference.compute_logprobs(tinker.ModelInput.from_ints([5] * longest)).result()) == longest
    with pytest.raises(tinker.TinkerError, match="exceeds the context window"):
        reference.compute_logprobs(tinker.ModelInput.from_ints([5] * (longest + 1))).result()
