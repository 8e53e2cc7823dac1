"""A run's checkpoints on the server: saved, recorded in state.json, and deleted once state.json no longer refers to them."""

from dataclasses import dataclass, replace
from pathlib import Path

import tinker

from tinsmith.rl.run_state import RunState


@dataclass
class Checkpoints:
    """Saves for a run. A checkpoint that a killed run had saved and not yet recorded stays on the server."""

    client: tinker.TrainingClient
    rest: tinker.RestClient
    directory: Path
    keep: int
    """Newest checkpoints of steps that stay beside the best weights; 0 deletes nothing."""
    written: RunState
    """What state.json says."""

    async def save_step(self, state: RunState) -> RunState:
        """Save the weights of `state.step`, to train on and to sample from. A resumed run begins with them once `record` was called."""
        name = f"step-{state.step:06d}"
        weights = (await self.client.save_state(name, overwrite=True)).path
        sampler_weights = (await self.client.save_weights_for_sampler(name)).path
        kept = (*state.kept, weights, sampler_weights)[-2 * self.keep :]
        return replace(state, weights=weights, sampler_weights=sampler_weights, kept=kept)

    async def save_best(self, state: RunState, reward: float) -> RunState:
        """The weights of `state.step` as the best so far. A resumed run knows them, and begins where it would have begun without."""
        saved = await self.client.save_weights_for_sampler(f"best-{state.step:06d}")

        def crowned(old: RunState) -> RunState:
            return replace(old, best_reward=reward, best_step=state.step, best_weights=saved.path, tokenizer=state.tokenizer)

        await self.record(crowned(self.written))
        return crowned(state)

    async def record(self, state: RunState) -> None:
        """Make `state` what a resumed run begins with, and delete the checkpoints that it no longer refers to."""
        dropped = self.written.paths - state.paths
        state.save(self.directory)
        self.written = state
        if self.keep:
            for path in sorted(dropped):
                await self._delete(path)

    async def _delete(self, path: str) -> None:
        try:
            await self.rest.delete_checkpoint_from_tinker_path(path)
        except tinker.NotFoundError:
            return  # somebody else has deleted it
