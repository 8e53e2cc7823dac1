"""A power cut at any moment: models come back, and what was told to anybody is there.

Invariant: After a power cut the disk holds all that clients were told, and the next engine brings each model back to
the last bit, whatever of the rest was written. Also: `tests/acceptance/test_power_loss.py`.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.here import Here
from tests.engine.test_engine_death import ended, script
from tests.engine.test_recovery import assert_same
from tests.extent import amount
from tests.store.power_cut import recorded
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Done


def told(here: Here) -> set[str]:
    """Operations of which the server was told that they have ended."""
    sent: list[Message] = [*here.said, *here.server.sent]
    return {message.request_id for message in sent if isinstance(message, Done)}


@pytest.mark.parametrize("replay_s", [0.0, 1000.0])
def test_a_power_cut_at_any_moment_changes_nothing(make: Callable[..., Here], tmp_path: Path, replay_s: float) -> None:
    """With copies behind each step and without any; also if some of what was not synced was written."""
    quiet = make("quiet", replay_s=replay_s)
    script(quiet)
    expected, after, _ = ended(quiet)
    quiet.process.die("signal 9")
    chance = random.Random(0)
    cuts: list[tuple[Path, set[str]]] = []
    """What is left, and the operations that had ended."""

    def cut() -> None:
        with disk.lock:
            for which in (None, chance):
                left = tmp_path / f"cut {len(cuts)}"
                disk.cut(data, left, which)
                cuts.append((left, told(here)))

    data = tmp_path / "data"
    with recorded() as disk:
        here = make(replay_s=replay_s)
        script(here)
        disk.before_each = cut
        here.settle()
        cut()
        disk.before_each = lambda: None
        here.process.die("signal 9")
        here.store.close()
    assert len(cuts) > 100
    assert cuts[-1][1]
    for left, known in cuts[:: amount(11, 1)]:
        shutil.rmtree(data)  # its name stays, because copies are known by their paths
        left.rename(data)
        here = Here({"tiny": here.bases["tiny"]}, data, training=here.config.training)
        assert all(here.store.status(each) in ("done", "failed") for each in known), left
        found, model, _ = ended(here)
        assert found == expected, left
        assert_same(model, after)
        here.process.die("signal 9")
        here.store.close()
