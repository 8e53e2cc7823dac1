"""`tinsmith backup` beside a server that saves meanwhile, and a server on the copy.

Invariant: A backup beside a server that saves holds all that was acknowledged before; complete files without a row are registered again.
Also: `tests/commands/test_backup.py`, `tests/commands/test_recover.py`.
"""

import threading
from pathlib import Path

import httpx

from tests.acceptance.bad_target import GOOD
from tests.acceptance.raw import RawModel
from tests.acceptance.talking import RAW_STEP
from tests.acceptance.test_kills import client_of, scores
from tests.running import serving, tinsmith_here


class Saving:
    """A client that trains and saves until it is stopped."""

    def __init__(self, http: httpx.Client) -> None:
        self.model = RawModel(http, "text", rank=64)
        self.expected: dict[str, list[float]] = {}
        """Scores of each checkpoint by its path, when its save was acknowledged."""
        self.stop = threading.Event()
        self.saved = threading.Semaphore(0)
        """Released with every save."""
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        seq_id = 1
        while not self.stop.is_set():
            self.model.forward_backward(seq_id, GOOD)
            self.model.optim_step(seq_id + 1, RAW_STEP)
            now = scores(self.model, seq_id + 2)
            path = str(self.model.result(self.model.save(seq_id + 3, f"n{seq_id}"))["path"])
            self.expected[path] = now
            self.saved.release()
            seq_id += 4


def test_a_copy_that_is_taken_while_clients_save_holds_all_that_was_acknowledged(text_only: list[str], tmp_path: Path) -> None:
    before: list[set[str]] = []
    with serving(tmp_path, *text_only) as server:
        server.wait_for_health()
        with client_of(server) as http:
            client = Saving(http)
            for number in range(2):
                for _ in range(3):
                    assert client.saved.acquire(timeout=600)
                before.append(set(client.expected))
                done = tinsmith_here("backup", str(tmp_path / f"copy{number}" / "data"), "--data-dir", str(tmp_path / "data"))
                assert done.returncode == 0, done.stderr
            client.stop.set()
            client.thread.join()
    with serving(tmp_path / "copy1", *text_only) as server:
        server.wait_for_health()
        with client_of(server) as http:
            listed = {checkpoint["tinker_path"] for checkpoint in http.get("checkpoints").json()["checkpoints"]}
            assert before[1] <= listed
            for path in sorted(listed & set(client.expected)):
                assert scores(RawModel(http, "text", path=path), 1) == client.expected[path]
