"""The end of the training half when the server stops: what the workers compute is finished, then all models are saved."""

import logging

from tinsmith.engine.model_state import ModelState
from tinsmith.engine.trainer import CANCELLED, Trainer

log = logging.getLogger(__name__)


class Stopping:
    """Takes the place of `Trainer.turn`: nothing else is begun or tried again. Models whose clients ended their sessions are not saved."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        trainer.stops = True
        self._end_all()
        for state in trainer.models.values():
            state.save_again_at = None

    def turn(self, give_up: bool) -> None:
        """Record what the workers have computed, then save one model after the other.

        With `give_up` what waits for the database is lost.
        """
        trainer = self.trainer
        trainer.record_complete()
        trainer.crash_recovery.turn()
        self._end_all()  # one that was being made when the stop began may be there now
        put_off = trainer.try_again() if trainer.backoff.wait_s == 0 or give_up else []
        if trainer.forward.passes:
            return
        for model_id in list(trainer.forward.operations):
            trainer.models[model_id].cancelled += trainer.forward.cancel(model_id, CANCELLED)
        for state in trainer.models.values():
            if give_up and (state in put_off or state.is_put_off or state.waits_for_row):
                self._lose_unrecorded(state)
            if state.save_again_at is not None:
                self._lose(state)
            if state.ending == "drop":
                state.is_put_off = False
        for state in trainer.to_unload():
            if state.ending == "drop":
                trainer.unload(state)
            elif not trainer.models.running:
                trainer.begin_saving(state)

    def _end_all(self) -> None:
        for model_id in self.trainer.operations.models:
            self.trainer.models[model_id].ending = self.trainer.models[model_id].ending or "save"

    def _lose_unrecorded(self, state: ModelState) -> None:
        """Give up what a model has that waits for the database, and the model, unless it is lost already."""
        if state.waits_for_row:
            state.forget_save()
        if state.model_id in self.trainer.operations.models:
            self._lose(state)

    def _lose(self, state: ModelState) -> None:
        """Let go of a model that could not be saved: it is unloaded as it is."""
        log.error("model %s could not be saved and is lost", state.model_id)
        state.running = state.save_again_at = None
        state.forget_save()
        state.ending = "drop"
