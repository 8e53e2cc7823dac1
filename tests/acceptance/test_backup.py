"""`tinsmith backup` beside a server that saves meanwhile, and a server on what `tinsmith restore` makes of the copy.

Invariant: A backup beside a server that saves holds all that was acknowledged before; complete files without a row are
registered again. Also: `tests/commands/test_backup.py`, `tests/commands/test_recover.py`.
"""

import threading
from pathlib import Path

from tests.acceptance.conftest import ready, without_sdk
from tests.acceptance.raw import GOOD, RawModel
from tests.acceptance.talking import RAW_STEP
from tests.running import tinsmith_here


def test_a_copy_that_is_taken_while_clients_save_holds_all_that_was_acknowledged(
    text_only: list[str], tmp_path: Path
) -> None:
    expected: dict[str, list[list[float]]] = {}
    """Scores of each checkpoint by its path, when its save was acknowledged."""
    stop, saved = threading.Event(), threading.Semaphore(0)

    def keep_saving() -> None:
        model, seq_id = RawModel(http, "text", rank=64), 1
        while not stop.is_set():
            model.forward_backward(seq_id, GOOD)
            model.optim_step(seq_id + 1, RAW_STEP)
            now = model.scores(seq_id + 2)
            expected[str(model.result(model.save(seq_id + 3, f"n{seq_id}"))["path"])] = now
            saved.release()
            seq_id += 4

    with ready(tmp_path, *text_only) as server, without_sdk(server) as http:
        client = threading.Thread(target=keep_saving)
        client.start()
        for number in range(2):
            for _ in range(3):
                assert saved.acquire(timeout=600)
            before = set(expected)
            done = tinsmith_here(
                "backup", str(tmp_path / f"copy{number}" / "data"), "--data-dir", str(tmp_path / "data")
            )
            assert done.returncode == 0, done.stderr
        stop.set()
        client.join()
    restored = tmp_path / "restored" / "data"
    done = tinsmith_here("restore", str(tmp_path / "copy1" / "data"), "--data-dir", str(restored))
    assert done.returncode == 0, done.stderr
    with ready(restored.parent, *text_only) as server, without_sdk(server) as http:
        listed = {checkpoint["tinker_path"] for checkpoint in http.get("checkpoints").json()["checkpoints"]}
        assert before <= listed
        for path in sorted(listed & set(expected)):
            assert RawModel(http, "text", path=path).scores(1) == expected[path]
