"""The fingerprint of a base model: a LoRA adapter is right on the weights that it was trained on and on no others.

It is a SHA-256 over every tensor's name, stored precision, shape and bytes, in the order of the names: whatever the
model is called, however its files are cut, and in which precision it is served.
"""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from tinsmith.errors import ConfigError, UserError
from tinsmith.models.files import INDEX, PICKLED, WHOLE, local_directory, read_header, safetensors_files
from tinsmith.store.digests import Block, blocks_of, digests_of

log = logging.getLogger(__name__)

WHOLE_FILE = 16 * 2**20
"""Bytes of a file up to which `state_of_files` reads all of it."""
ENDS = 2**20
"""Bytes that it reads at either end of a larger one."""
SHOWN = 16
"""Characters of a fingerprint in messages, of 64."""


@dataclass(frozen=True)
class _Tensor:
    """Description of one tensor in a safetensors header."""

    label: str
    """Name, precision and shape."""
    blocks: list[Block]


def fingerprint_of(directory: Path) -> str:
    """The fingerprint of the weights in a directory: 64 hexadecimal digits.

    Several threads read all safetensors files or, if there are none, the bytes of `pytorch_model*.bin`. Raises
    ConfigError naming a file that is missing or damaged.
    """
    files = safetensors_files(directory)
    if files:
        tensors = [tensor for file in files for tensor in _tensors_in(file)]
    else:
        tensors = [_whole(file) for file in sorted(directory.glob(PICKLED))]
    if not tensors:
        raise ConfigError(f"{directory} holds no weights: no {WHOLE}, no {INDEX} and no {PICKLED}")
    tensors.sort(key=lambda tensor: tensor.label)
    try:
        digests = iter(digests_of([block for tensor in tensors for block in tensor.blocks]))
    except OSError as error:
        raise ConfigError(f"the weights in {directory} cannot be read: {error}") from error
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(json.dumps([tensor.label, *(next(digests) for _ in tensor.blocks)]).encode())
    return total.hexdigest()


def state_of_files(directory: Path) -> str:
    """A digest by which changed files of a model are known at once: of small ones, and of time and ends of large ones.

    Raises OSError.
    """
    total = hashlib.sha256()
    for file in sorted(path for path in directory.iterdir() if path.is_file()):
        status = file.stat()
        size, ends = status.st_size, [(0, status.st_size)]
        if size > WHOLE_FILE:
            ends = [(0, ENDS), (size - ENDS, ENDS)]
        blocks = [Block(file, start, length) for start, length in ends]
        changed = int(status.st_mtime) if size > WHOLE_FILE else None  # layers of container images keep no more of it
        total.update(json.dumps([file.name, size, changed, *digests_of(blocks)]).encode())
    return total.hexdigest()


def compute_fingerprint(source: str) -> Future[str]:
    """The fingerprint of a loaded model, by a thread that does not keep the process from ending."""
    result: Future[str] = Future()

    def compute() -> None:
        started = time.monotonic()
        try:
            result.set_result(fingerprint_of(_existing_directory(source)))
        except ConfigError as error:
            result.set_exception(error)
        except Exception as error:  # a bug, or no memory: without a result, those that wait for it would wait forever
            log.exception("the fingerprint of %s cannot be computed", source)
            result.set_exception(error)
        else:
            log.info(
                "%s has the fingerprint %s, computed in %.1f s",
                source,
                result.result()[:SHOWN],
                time.monotonic() - started,
            )

    threading.Thread(target=compute, name="fingerprint", daemon=True).start()
    return result


def _existing_directory(source: str) -> Path:
    directory = local_directory(source)
    if directory is None:
        raise ConfigError(
            f"the files of {source} are not in the cache of the Hugging Face Hub any more; download the model again"
        )
    return directory


def check_fingerprint(saved: str | None, served: str, base_model: str, what: str) -> None:
    """Raise UserError if weights trained on a base of fingerprint `saved` were to be used on one of `served`.

    None passes.
    """
    if saved is not None and saved != served:
        raise UserError(
            f"{what} was trained on other weights of the base model than {base_model} has here: base fingerprint "
            f"{saved[:SHOWN]}, here {served[:SHOWN]}; use the base model that it was trained on, as it was then"
        )


def _whole(file: Path) -> _Tensor:
    """All bytes of a file in another format, as if they were one tensor."""
    try:
        return _Tensor(file.name, blocks_of(file, 0, file.stat().st_size))
    except OSError as error:
        raise ConfigError(f"{file} is missing or damaged ({error!r}); download the model again") from error


def _tensors_in(file: Path) -> Iterator[_Tensor]:
    start, header = read_header(file)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        yield _Tensor(json.dumps([name, entry["dtype"], entry["shape"]]), blocks_of(file, start + begin, end - begin))
