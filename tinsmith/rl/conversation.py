"""One conversation as it grows, turn by turn: the environment's messages are rendered once, what was sampled is kept as sampled.

After a turn the whole conversation is rendered again, as a text, only to see what the template would say now. If that begins with what the
model has seen, the rest is appended to the tokens that are there. If it does not, because templates of thinking models drop earlier
reasoning, the next turn begins anew with the tokens of the new rendering; what a trajectory becomes then is decided in `assemble.py`. A
template that changes more than the answers' reasoning fits neither way and is refused.

With `context_turns` the model sees the newest turns only. A turn is what the environment said and the answer to it; system messages at the
start belong to none and stay. Once a turn is forgotten, every next one begins anew, with the tokens of what is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from tinsmith.errors import UserError
from tinsmith.rl.chat import ChatTemplate, Rendered, sources_of
from tinsmith.rl.env import Message, visible
from tinsmith.rl.pictures import Picture
from tinsmith.rl.stream import TokenStream, join, text_stream


class TemplateError(UserError):
    """The chat template changes what was said; no sequence of tokens would be what the model saw."""


@dataclass(frozen=True)
class Opening:
    """What was said before the first of the model's answers that are still seen."""

    messages: tuple[Message, ...]
    pictures: tuple[Picture, ...]


class Conversation:
    """A conversation that waits for the model to speak; `prompt` is what it has seen by then.

    `end_turn_after_stop_string`: an answer that ended on a stop string gets the template's end-of-turn token, which nobody sampled.
    `context_turns`: how many turns the model sees, the one it is about to answer included; 0 is all.
    """

    prompt: TokenStream
    """What the model is given for its next turn."""

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Message], end_turn_after_stop_string: bool = True, context_turns: int = 0
    ) -> None:
        self.template = template
        self.end_turn_after_stop_string = end_turn_after_stop_string
        self.context_turns = context_turns
        self.messages = list(messages)
        self.pictures: tuple[Picture, ...] = tuple(map(template.picture, sources_of(messages)))
        rendered = template.render(self.messages, self.pictures, add_generation_prompt=True)
        self._opening = Opening(tuple(messages), self.pictures)
        self._shown = rendered.text
        self._answers: list[str] = []
        self._turn_starts = [len(list(takewhile(_is_system, messages)))]
        self.prompt = template.encode(rendered)

    def text_of(self, sampled: NDArray[np.int32]) -> str:
        """What the environment gets to read: the sampled text without the token that ended the turn."""
        return self.template.decode((sampled[:-1] if self._ended_itself(sampled) else sampled).tolist())

    def tail_of(self, sampled: NDArray[np.int32], stopped: bool) -> tuple[int, ...]:
        """Tokens that the template needs behind an answer which ended on a stop string: end of turn, or nothing."""
        needed = stopped and self.end_turn_after_stop_string and len(sampled) > 0 and not self._ended_itself(sampled)
        return self.template.end_of_turn_ids if needed else ()

    def extend(self, sampled: NDArray[np.int32], stopped: bool, observations: Sequence[Message]) -> None:
        """Append the model's answer and what the environment said to it; `prompt` is for the turn that follows.

        `stopped`: the generation ended by itself, not on its length. Raises TemplateError.
        """
        said = self.template.protected(self.text_of(sampled))
        seen = self._shown + said
        new = tuple(map(self.template.picture, sources_of(observations)))
        self.pictures += new
        self._answers.append(said)
        for content in dict.fromkeys((said, self.template.prefill + said)):
            answer: Message = {"role": "assistant", "content": self.template.unprotected(content)}
            history = [*self.messages, answer, *observations]
            rendered = self.template.render(history, self.pictures, add_generation_prompt=True)
            rest = self._rest(rendered.text, seen, sampled, stopped)
            if rest is not None:
                break
        self.messages, self._shown = history, rendered.text
        if rest is None:
            self._check_kept(rendered, sampled)
            self.prompt = self.template.encode(rendered)
        else:
            self.prompt = join((self.prompt, text_stream(sampled), self.template.encode(Rendered(rest, new))))
        self._turn_starts.append(len(history) - len(observations))
        if self.context_turns and len(self._turn_starts) > self.context_turns:
            self._forget_a_turn()

    def _forget_a_turn(self) -> None:
        """Leave the oldest turn out, and begin anew with what is left."""
        first, second = self._turn_starts[:2]
        before, gone = (len(sources_of(part)) for part in (self.messages[:first], self.messages[first:second]))
        self.pictures = self.pictures[:before] + self.pictures[before + gone :]
        self.messages = self.messages[:first] + self.messages[second:]
        self._turn_starts = [first, *(start - second + first for start in self._turn_starts[2:])]
        self._answers = self._answers[1:]
        opening = self.messages[: self._turn_starts[1] - 1] if self._answers else self.messages
        self._opening = Opening(tuple(opening), self.pictures[: len(sources_of(opening))])
        rendered = self.template.render(self.messages, self.pictures, add_generation_prompt=True)
        self._shown, self.prompt = rendered.text, self.template.encode(rendered)

    def _ended_itself(self, sampled: NDArray[np.int32]) -> bool:
        return len(sampled) > 0 and int(sampled[-1]) in self.template.stop_ids

    def _rest(self, text: str, seen: str, sampled: NDArray[np.int32], stopped: bool) -> str | None:
        """What the template adds to what was `seen` and sampled; None if it does not begin with that."""
        if not text.startswith(seen):
            return None
        rest, end = text[len(seen) :], self.template.end_of_turn
        if tuple(sampled[-1:]) == self.template.end_of_turn_ids[:1]:
            return rest.removeprefix(end) if rest.startswith(end) else None
        if stopped and not self._ended_itself(sampled) and not self.end_turn_after_stop_string:
            return rest.removeprefix(end)
        return rest

    def _check_kept(self, rendered: Rendered, sampled: NDArray[np.int32]) -> None:
        """Beginning anew is right if only reasoning is gone: the opening and every answer must still be there."""
        opening = self.template.render(self._opening.messages, self._opening.pictures, add_generation_prompt=False).text
        kept = rendered.text.startswith(opening)
        at = len(opening)
        for answer in map(visible, self._answers):
            found = rendered.text.find(answer, at)
            kept &= found >= 0
            at = found + len(answer)
        if not kept:
            raise self._difference(self.prompt + text_stream(sampled), self.template.encode(rendered))

    def _difference(self, seen: TokenStream, again: TokenStream) -> TemplateError:
        common = min(len(seen), len(again))
        differs = np.flatnonzero(seen.ids[:common] != again.ids[:common])
        at = int(differs[0]) if len(differs) else common
        was, now = (repr(self.template.decode(stream.ids[at : at + 1].tolist())) for stream in (seen, again))
        return TemplateError(
            f"the chat template changes what was said, beyond leaving out reasoning: token {at} of the conversation was {was} and is {now} "
            "when it is rendered again; give a template that keeps the messages and the visible answers"
        )


def _is_system(message: Message) -> bool:
    return message["role"] == "system"
