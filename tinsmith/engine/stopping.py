"""The end of the training half when the server stops: what the workers compute is finished, then all models are saved."""

import logging

from tinsmith.engine.model_state import ModelState
from tinsmith.engine.scheduler import OperationScheduler
from tinsmith.engine.unloading import CANCELLED

log = logging.getLogger(__name__)


class Stopping:
    """Takes the place of the scheduler's `turn`: nothing else is begun or tried again. Models of ended sessions are not saved."""

    def __init__(self, scheduler: OperationScheduler) -> None:
        self.scheduler = scheduler
        scheduler.stepwise.stops = True
        self._end_all()
        for state in scheduler.models.values():
            state.save_again_at = None

    def turn(self, give_up: bool) -> None:
        """Record what the workers have computed, then save one model after the other.

        With `give_up` what waits for the database is lost.
        """
        scheduler = self.scheduler
        scheduler.outcomes.computed(scheduler.forward.take_complete())
        scheduler.crash_recovery.turn()
        self._end_all()  # one that was being made when the stop began may be there now
        put_off = scheduler.stepwise.try_again() if scheduler.waits.backoff.wait_s == 0 or give_up else []
        if scheduler.forward.passes:
            return
        for model_id in list(scheduler.forward.operations):
            scheduler.models[model_id].cancelled += scheduler.forward.cancel(model_id, CANCELLED)
        for state in scheduler.models.values():
            if give_up and (state in put_off or state.is_put_off or state.waits_for_row):
                self._lose_unrecorded(state)
            if state.save_again_at is not None:
                self._lose(state)
            if state.ending == "drop":
                state.is_put_off = False
        for state in scheduler.to_unload():
            if state.ending == "drop":
                scheduler.unloading.unload(state)
            elif not scheduler.models.running:
                scheduler.stepwise.begin_saving(state)

    def _end_all(self) -> None:
        for state in self.scheduler.models.values():
            if state.loaded is not None:
                state.ending = state.ending or "save"

    def _lose_unrecorded(self, state: ModelState) -> None:
        """Give up what a model has that waits for the database, and the model, unless it is lost already."""
        if state.waits_for_row:
            state.forget_save()
        if state.loaded is not None:
            self._lose(state)

    def _lose(self, state: ModelState) -> None:
        """Let go of a model that could not be saved: it is unloaded as it is."""
        log.error("model %s could not be saved and is lost", state.model_id)
        state.running = state.save_again_at = None
        state.forget_save()
        state.ending = "drop"
