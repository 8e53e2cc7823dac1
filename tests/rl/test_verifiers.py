"""A `verifiers` environment as ours. Needs `verifiers` 0.1.x, which no target installs: it brings some hundred packages."""

import asyncio
from typing import Any

import pytest
import verifiers
from datasets import Dataset

from tests.rl.scripted import Scripted, ids, rules
from tinsmith.rl import registry
from tinsmith.rl.adapters.verifiers import VerifiersEnv
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.env import Prompt
from tinsmith.rl.generator import Generator
from tinsmith.rl.trajectory import Origin
from tinsmith.rl.workers import make_workers


class Countdown(verifiers.MultiTurnEnv):
    """Wants to hear its answer, and gives three tries."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        if messages[-1].content == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"no, try {len(state['trajectory']) + 1}"}]


def heard(completion: Any, answer: str) -> float:
    said = [message.content for message in completion if message.role == "assistant"]
    return 1.0 / len(said) if said[-1] == answer else 0.0


def make() -> VerifiersEnv:
    rows = Dataset.from_list([{"question": "hot or cold?", "answer": answer} for answer in ("hot", "cold")])
    return VerifiersEnv(Countdown(max_turns=3, dataset=rows, rubric=verifiers.Rubric(funcs=[heard])))


@pytest.mark.parametrize(("said", "reward", "turns"), [(["hot"], 1.0, 1), (["no", "hot"], 0.5, 2), (["a", "b", "c"], 0.0, 3)])
def test_its_rollout_asks_us_and_its_rubric_scores(said: list[str], reward: float, turns: int, plain: ChatTemplate) -> None:
    registry.register("countdown", make)
    try:
        workers = make_workers("thread", 2, timeout_s=20)
        generator = Generator("countdown", {}, rules(), plain, workers)
        answers = [(ids(plain, f"{text}<|im_end|>"), True) for text in said]
        made = asyncio.run(generator.play(Scripted(answers), Prompt(0), Origin("countdown", 0)))
        workers.shutdown()
    finally:
        registry.deregister("countdown")
    assert (made.stop_reason, made.reward, made.turns) == ("done", reward, turns)
    assert made.metrics["heard"] == reward
    (sample,) = made.samples
    between = [f"<|im_end|>\n<|im_start|>user\nno, try {turn}<|im_end|>\n<|im_start|>assistant\n" for turn in range(2, turns + 1)]
    talk = "".join(text + after for text, after in zip(said, [*between, "<|im_end|>"], strict=True))
    assert plain.decode(sample.response_ids.tolist()) == talk


def test_an_episode_that_is_left_ends_its_rollout() -> None:
    env = make()
    messages, _ = env.init(Prompt(1))
    assert messages[-1] == {"role": "user", "content": "hot or cold?"}
    env.close()
    with pytest.raises(asyncio.CancelledError):
        env._rollout.result(timeout=10)
