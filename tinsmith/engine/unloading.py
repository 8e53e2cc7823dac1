"""The end of models: their sessions end, what they have not finished is cancelled, and they are unloaded."""

from contextlib import suppress
from dataclasses import dataclass

from tinsmith.engine.forward_work import ForwardWork
from tinsmith.engine.model_state import ModelState, ModelStates
from tinsmith.engine.outcomes import Outcomes
from tinsmith.engine.passes import ActiveSessions
from tinsmith.errors import GivenUpError, StoreUnavailableError, TinsmithError, UserError
from tinsmith.store.store import Store

CANCELLED = GivenUpError("it was cancelled: its session ended before the operation was run")
"""Error of a cancelled operation. Its client is told more when the model has been unloaded."""


@dataclass(eq=False)
class Unloading:
    """Lets go of models."""

    models: ModelStates
    sessions: ActiveSessions
    store: Store
    forward: ForwardWork
    outcomes: Outcomes

    def end_session(self, session_id: str, save: bool) -> None:
        """Cancel what the session's models have not finished and unload them; with `save` keep them as checkpoints."""
        self.sessions.ended(session_id)
        for model_id, state in self.models.items():
            if model_id.startswith(f"{session_id}:train:"):
                state.cancelled += (*self.forward.cancel(model_id, CANCELLED), *state.queue.cancel())
                state.ending = "save" if save else "drop"
                self.models.spoil_step(model_id, str(CANCELLED))  # no step takes the gradients any more

    def unload(self, state: ModelState) -> None:
        """Unload a model as it is, and fail its operations that are not run any more."""
        state.ending = None
        self.fail_cancelled(state)
        self.models.unload(state)
        self.forget(state.model_id)
        with suppress(StoreUnavailableError):  # they go with their session then
            self.store.end_history(state.model_id)

    def fail_cancelled(self, state: ModelState, error: TinsmithError | None = None) -> None:
        """Fail what is not run any more of a model; by default with what became of the model."""
        cancelled, state.cancelled = state.cancelled + state.queue.cancel(), []
        if cancelled:
            error = error or self._why_cancelled(state.model_id)
            for command in cancelled:
                self.outcomes.fail(command, error)

    def _why_cancelled(self, model_id: str) -> UserError:
        """Describe the end of an unloaded model, and name the checkpoint to go on from."""
        refusal = None
        with suppress(TinsmithError):  # the database cannot be read, or does not know the session any more
            refusal = self.store.refusal(model_id)
        return UserError(str(CANCELLED) if refusal is None else f"it was cancelled, because {refusal}")

    def forget(self, model_id: str) -> None:
        """Let nothing be left of a model that is gone."""
        self.models.pop(model_id, None)
        self.forward.order.served.pop(model_id, None)
        self.outcomes.forget(model_id)
