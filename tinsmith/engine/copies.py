"""Decides when workers copy models, so that a replay is short, and lets the log drop what no replay needs."""

import logging
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tinsmith.config import Config
from tinsmith.engine.history import History, Kept, Mark, Passed, Saved, Stepped
from tinsmith.engine.journal import change_of
from tinsmith.engine.model_state import LoadedModel, ModelState, ModelStates
from tinsmith.engine.outcomes import Recorder
from tinsmith.engine.passes import Piece
from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.work import CopyEnded, OptimStep, RunPass
from tinsmith.store.files import kept_copies

log = logging.getLogger(__name__)

MOST_REPLAYED_S = 300.0
"""Seconds of work after which a history without copies is given up: its requests would fill the disk."""

MOST_OPEN = 100_000
"""Datums after which the passes of a step that does not come are given up, for the same reason."""

TRIED_AGAIN_S = 60.0
"""Seconds of work after which a copy that failed is tried again."""

LONG_REPLAY = 0.1
"""Share of `--replay-s` above which a replay is not to be made twice."""

PAYS_OFF = 50
"""A copy has paid off when the model has computed for so many times as long as the device waited for it."""


@dataclass(eq=False)
class Copies:
    """The kept copies of all models, and what passes and steps add to their histories."""

    config: Config
    models: ModelStates
    recorder: Recorder
    _ended_at: float = 0.0
    """Monotonic time at which the last pass or step ended."""

    @property
    def _replay_s(self) -> float:
        return self.config.training.replay_s

    def are_made_of(self, shape: LoraShape) -> bool:
        """Whether models of this shape are copied: all weights only if each worker holds them, in float32."""
        training = self.config.training
        whole = training.full_state == "float32" and not self.config.shards_weights
        return training.kept_copies_gib > 0 and (shape.rank > 0 or whole)

    def announce(self, model: LoadedModel) -> None:
        """Log how a new model with all its weights (rank 0) would come back."""
        if model.shape.rank > 0:
            return
        often = "computed again from its last save: call save_state from time to time"
        if self.are_made_of(model.shape):
            often = (
                f"copied after {self._replay_s:g} s of work (--replay-s), or {PAYS_OFF} times as long as a copy takes"
            )
        log.info("model %s has all weights; for the death of a worker it is %s", model.model_id, often)

    # ---- What has run

    def passed(self, call: RunPass, pieces: list[Piece], sent_at: float) -> None:
        """Note a pass that has ended: `pieces` are the datums of it that have a result."""
        seconds = self._took(sent_at)
        computed = {(piece.operation.command.request_id, piece.index): piece for piece in pieces}
        places: defaultdict[str, list[int]] = defaultdict(list)
        for place, (request_id, index) in enumerate(call.pieces):
            if (request_id, index) in computed:
                places[request_id.rpartition("/")[0]].append(place)
        for model_id, own in places.items() if call.backward else ():
            model = self.models.find(model_id)
            if model is None or model.spoiled:  # these gradients are never taken
                continue
            named = [call.pieces[place] for place in own]
            routed = [computed[each].routed for each in named]
            event = Passed(
                model.history.state,
                [(computed[request_id, index].operation.command, index) for request_id, index in named],
                [call.lengths[place] for place in own],
                [call.pixels[place] for place in own] if call.pixels else [],
                call.together,
                routed if any(routed) else [],
            )
            model.history.add_pass(event)
            model.history.seconds += seconds * sum(event.lengths) / sum(call.lengths)
            self._bound(model)

    def stepped(self, model: LoadedModel, call: OptimStep, seq_id: int, grad_norm: float, sent_at: float) -> None:
        """Note a step that was applied."""
        history = model.history
        history.seconds += self._took(sent_at)
        if call.copy:
            source = Saved(f"the kept copy of model {model.model_id}", call.copy, optimizer=True, is_copy=True)
            history.copying = Kept(source, Mark(history.state + 1, seq_id, history.seconds))
            history.replayed_s = 0.0
        history.step(seq_id, Stepped(history.state, call.settings, grad_norm))
        self._bound(model)

    def _took(self, sent_at: float) -> float:
        """Return how long workers were at what has just ended: since it was sent, or what they did before had ended."""
        now = time.monotonic()
        seconds, self._ended_at = now - max(sent_at, self._ended_at), now
        return seconds

    def _bound(self, model: LoadedModel) -> None:
        history = model.history
        has_copies = self.are_made_of(model.shape) and not history.copy_failed
        if history.kept and not has_copies and history.replay_s > MOST_REPLAYED_S:
            history.give_up()
            log.warning(
                "model %s would be lost with its worker until it is saved: there is no copy of it "
                "(--kept-copies-gib), and what came since it was saved has taken more than %.0f s",
                *(model.model_id, MOST_REPLAYED_S),
            )
        elif history.open_datums > MOST_OPEN:
            history.give_up_open_step(model.added_seq)
            log.warning(
                "model %s has computed over %d datums since its last optim_step: if its worker dies before the next "
                "one, that is refused",
                *(model.model_id, MOST_OPEN),
            )

    # ---- Copies

    def after_step(self, state: ModelState, model: LoadedModel, seq_id: int) -> tuple[str, str]:
        """Return where a copy of a step's result goes, and where the one before is; nothing if none is due."""
        history = model.history
        # A save that is cut short is done again from a state before it
        if state.saving is not None or not self.are_made_of(model.shape) or not self._is_due(history):
            return "", ""
        if self.recorder.waiting:  # the next engine may know those copies alone that this one would replace
            return "", ""
        newest = history.kept[-1].source if history.kept else None
        before = newest.directory if isinstance(newest, Saved) and newest.is_copy else ""
        return str(kept_copies(Path(self.config.data_dir), model.model_id) / str(seq_id)), before

    def _is_due(self, history: History) -> bool:
        """Whether all models together might replay more than `--replay-s`.

        A checkpoint that its client may delete is replaced as soon as possible, and so are all states before a step
        that cannot be replayed, or that a long replay has begun with: it would begin there again.
        """
        at_once = history.open_is_given_up or history.replayed_s > LONG_REPLAY * self._replay_s
        if history.copying is not None or (history.seconds < history.wanted_s and not at_once):
            return False
        if at_once:
            return True
        newest = history.kept[-1].source if history.kept else None
        if newest is None or (isinstance(newest, Saved) and not newest.is_copy):
            return True
        replayed = sum(each.history.replay_s > 0 for each in self.models.loaded.values())
        return history.replay_s >= self._replay_s / max(1, replayed)

    def ended(self, message: CopyEnded) -> None:
        """Take in whether a copy is complete."""
        model = self.models.find(message.model_id)
        copying = None if model is None else model.history.copying
        if model is None or copying is None or copying.source.directory != message.directory:
            return  # one of the workers before
        history = model.history
        history.copying, history.copy_failed = None, not message.is_complete
        pays_off_s = PAYS_OFF * message.blocked_s if self._replay_s else 0.0
        history.wanted_s = history.seconds + (pays_off_s if message.is_complete else TRIED_AGAIN_S)
        if message.is_complete:
            self.keep(model, copying)

    def keep(self, model: LoadedModel, kept: Kept) -> None:
        """Take a newer state to restore a model from, and let the log drop what that makes needless."""
        model.history.keep(kept)
        change = change_of(model)
        if change is not None:
            self.recorder.record([change])

    def saved(self, model: LoadedModel, source: Saved, mark: Mark) -> None:
        """Take a checkpoint as the state to restore a model from, unless it has copies, which nobody can delete."""
        newest = model.history.kept[-1].source if model.history.kept else None
        if not (isinstance(newest, Saved) and newest.is_copy):
            self.keep(model, Kept(source, mark))
