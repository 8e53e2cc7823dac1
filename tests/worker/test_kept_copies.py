"""What several workers know of the kept copies that one of them writes."""

from pathlib import Path

from tinsmith.protocol.place import Place
from tinsmith.store.files import kept_copies
from tinsmith.worker.background import Background
from tinsmith.worker.kept_copies import KeptCopies

MODELS = [f"s:train:{number}" for number in range(8)]


def test_models_that_come_back_take_the_room_of_the_worker_that_writes_their_copies_alone(tmp_path: Path) -> None:
    """All workers load them. If each counted all copies, what had room before would be lost with the workers the next time."""
    threads = Background("copies", 1, lambda: None)
    workers = [KeptCopies(tmp_path, 1e9, 1.0, threads, Place(rank, 2)) for rank in range(2)]
    for model_id in MODELS:
        for worker in workers:
            worker.restored(model_id, str(kept_copies(tmp_path, model_id) / "2"), 100)
            worker.restored(model_id, str(tmp_path / "a checkpoint"), 100)
    assert all(worker.reserved for worker in workers)
    assert sorted(model_id for worker in workers for model_id in worker.reserved) == MODELS
    for worker in workers:
        for model_id in worker.reserved:
            assert Place(worker.place.rank, 2).writes(model_id)
    threads.close()
