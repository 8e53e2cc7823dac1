"""The samples of one base model: those that wait for their turn, and those that have begun."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tinsmith.protocol.serving import Sample
from tinsmith.rendering.renderer import Renderer
from tinsmith.sampling.sampler import Sampler
from tinsmith.sampling.turns import Turns
from tinsmith.wire.prompt_scores import PromptQuestions


@dataclass
class Started:
    """A sample whose turn has come."""

    message: Sample
    """The request without its payload."""
    started_at: float
    in_sampler: bool = False
    """Whether its sampler has it. Until then it is rendered, or its weights are read."""
    is_decoded: bool = False
    """Threads decode its images."""
    is_recorded: bool = False
    questions: PromptQuestions = field(default_factory=PromptQuestions)


@dataclass(eq=False)
class SamplingBase:
    """A base model's sampler, and how far each of its samples has come."""

    sampler: Sampler
    renderer: Renderer
    """Shared with the trainer."""
    waiting: Turns[Sample] = field(default_factory=Turns)
    started: dict[str, Started] = field(default_factory=dict)
    """Running samples by `Sample.name`."""
    sessions: Counter[str] = field(default_factory=Counter)
    """Number of running samples by session."""
    decoding: Counter[str] = field(default_factory=Counter)
    """Running sequences whose images are being decoded, by session."""
    on_the_way: int = 0
    """Running sequences that the sampler has not got yet."""

    @property
    def load(self) -> tuple[int, int]:
        """Number of sequences that are decoded and that wait."""
        running, waiting = self.sampler.load
        return running, waiting + self.on_the_way + sum(message.num_samples for message in self.waiting)

    def next(self, has_room: Callable[[str], bool]) -> Sample | None:
        """Return the next sample of a session that `has_room`: the next in turn while the sampler wants more, and in any case one of each.

        What is being decoded takes room from its own session only, since pixel values are large.
        """
        if not self.waiting:
            return None
        room = self.sampler.room - self.on_the_way + self.decoding.total()
        for session in self.waiting.sessions:
            if has_room(session) and (room > self.decoding[session] * len(self.decoding) or not self.sessions[session]):
                return self.waiting.first(session)
        return None

    def start(self, message: Sample, now: float) -> None:
        """Take the `next` sample out of those that wait."""
        self.waiting.take(message.session_id, message)
        self.started[message.name] = Started(replace(message, payload=b""), now)
        self.sessions[message.session_id] += 1
        self.on_the_way += message.num_samples

    def decode(self, message: Sample) -> None:
        """Note that threads decode its images."""
        self.started[message.name].is_decoded = True
        self.decoding[message.session_id] += message.num_samples

    def decoded(self, started: Started) -> None:
        """Note that no thread decodes its images any more, if one did."""
        if started.is_decoded:
            started.is_decoded = False
            take_from(self.decoding, started.message.session_id, started.message.num_samples)

    def ended(self, name: str) -> Started:
        """Take out a running sample that has ended."""
        started = self.started.pop(name)
        if not started.in_sampler:
            self.on_the_way -= started.message.num_samples
        self.decoded(started)
        take_from(self.sessions, started.message.session_id, 1)
        return started

    def cancel(self, gone: Callable[[Sample], bool]) -> list[Sample]:
        """Stop the samples that are `gone`; returns them."""
        cancelled = self.waiting.drop(gone)
        for name in [name for name, started in self.started.items() if gone(started.message)]:
            started = self.ended(name)
            if started.in_sampler:
                self.sampler.cancel(name)
            cancelled.append(started.message)
        return cancelled


def take_from(counts: Counter[str], key: str, amount: int) -> None:
    """Subtract from a counter that keeps no zeros."""
    counts[key] -= amount
    if not counts[key]:
        del counts[key]
