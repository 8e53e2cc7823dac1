"""What several workers know of the kept copies that one of them writes."""

import resource
from pathlib import Path

import pytest

from tests.worker.test_background import delivered
from tinsmith.config import TrainingConfig
from tinsmith.models.base import BaseModel
from tinsmith.protocol.place import Place
from tinsmith.protocol.shapes import LoraShape
from tinsmith.store.files import kept_copies
from tinsmith.training.backend import LocalBackend
from tinsmith.worker.background import Background
from tinsmith.worker.kept_copies import KeptCopies

MODELS = [f"s:train:{number}" for number in range(8)]


def test_models_that_come_back_take_the_room_of_the_worker_that_writes_their_copies_alone(tmp_path: Path) -> None:
    """All workers load them.

    If each counted all copies, what had room before would be lost with the workers the next time.
    """
    threads = Background("copies", 1, lambda: None)
    workers = [KeptCopies(tmp_path, 1e9, threads, Place(rank, 2)) for rank in range(2)]
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


def test_one_model_may_take_all_the_room_of_several_workers_and_others_none_beyond_it(
    text_base: BaseModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit is the server's.

    A share of it for each worker would have no room for a large model, however empty the disk is.
    """
    threads = Background("copies", 1, lambda: None)
    backend = LocalBackend(text_base, TrainingConfig())
    for model_id in MODELS[:2]:
        backend.create_model(model_id, LoraShape(4, seed=0))
    size = 3 * 3 * 4 * backend.optimizers[MODELS[0]].weights.parameter_count
    workers = [KeptCopies(tmp_path, 1.5 * size, threads, Place(rank, 2)) for rank in range(2)]

    def keeps(worker: KeptCopies, model_id: str, step: int) -> bool:
        kept: list[bool] = []
        directory = kept_copies(tmp_path, model_id) / str(step)
        worker.keep(backend, model_id, directory, "", lambda is_complete, blocked_s: kept.append(is_complete))
        delivered(threads)
        return kept == [True]

    assert keeps(workers[0], MODELS[0], 1)
    assert not keeps(workers[1], MODELS[1], 1)
    assert (
        f"no copy of model {MODELS[1]} could be kept, so its replay would take longer: copies may take" in caplog.text
    )
    assert keeps(workers[0], MODELS[0], 2)
    assert [path.name for path in kept_copies(tmp_path, MODELS[0]).iterdir()] == ["2"]
    restarted = [KeptCopies(tmp_path, 1.5 * size, threads, Place(rank, 2)) for rank in range(2)]
    assert not keeps(restarted[1], MODELS[1], 2)
    assert keeps(restarted[0], MODELS[0], 3)
    for worker in restarted:
        worker.forget(MODELS[0])
    delivered(threads)
    assert list(kept_copies(tmp_path, "").parent.iterdir()) == []
    assert keeps(restarted[1], MODELS[1], 3)
    assert not keeps(restarted[0], MODELS[0], 4)
    threads.close()


def test_a_copy_that_a_full_disk_does_not_take_leaves_nothing_there_and_the_one_before(
    text_base: BaseModel, tmp_path: Path
) -> None:
    """Each attempt has a name of its own: what they leave would keep the disk full, and saves would fail."""
    threads = Background("copies", 1, lambda: None)
    backend = LocalBackend(text_base, TrainingConfig())
    backend.create_model(MODELS[0], LoraShape(4, seed=0))
    worker, home = KeptCopies(tmp_path, 1e9, threads, Place()), kept_copies(tmp_path, MODELS[0])
    kept: list[bool] = []

    def keep(step: int) -> None:
        worker.keep(
            backend,
            MODELS[0],
            home / str(step),
            str(home / "2"),
            lambda is_complete, blocked_s: kept.append(is_complete),
        )
        delivered(threads)

    keep(2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        for step in (4, 6):
            keep(step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (kept, [path.name for path in home.iterdir()]) == ([True, False, False], ["2"])
    keep(8)
    assert (kept[-1], sorted(path.name for path in home.iterdir())) == (True, ["2", "8"])
    threads.close()


def test_room_that_a_dead_worker_took_for_a_copy_that_never_came_is_free_when_the_model_goes(tmp_path: Path) -> None:
    threads = Background("copies", 1, lambda: None)
    died, after = (KeptCopies(tmp_path, 150.0, threads, Place()) for _ in range(2))
    assert died._takes_room(MODELS[0], 100)
    assert not after._takes_room(MODELS[1], 100)
    after.forget(MODELS[0])
    delivered(threads)
    assert after._takes_room(MODELS[1], 100)
    threads.close()
