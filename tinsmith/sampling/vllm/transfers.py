"""The trainer's side of getting full weights into a running server. `receivers.py` has the other ends, which run inside of vLLM."""

import asyncio
import base64
import pickle
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from tinsmith.errors import TinsmithError
from tinsmith.sampling.inside_vllm import TransferKind
from tinsmith.sampling.inside_vllm.process_pair import TRAINER, ProcessPair
from tinsmith.sampling.vllm.connection import Connection

Tensors = Mapping[str, Tensor]
"""By their names in the model's checkpoint. They must not change before `send` has returned."""


class Transfer(Protocol):
    """A way into one server, for one life of it."""

    async def open(self, server: Connection) -> None:
        """Make ready, once."""

    async def send(self, server: Connection, tensors: Tensors, identity: str) -> None:
        """Give the server all tensors of one update, which it compares with their identity. Raises as `Connection.post`."""


class FileTransfer:
    """A safetensors file, in memory where the system has a file system for that. Works everywhere, and copies most."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    async def open(self, server: Connection) -> None:
        """Nothing to do."""

    async def send(self, server: Connection, tensors: Tensors, identity: str) -> None:
        """See `Transfer`. The file takes the memory of a whole model meanwhile."""
        file = self.directory / f"{uuid.uuid4().hex}.safetensors"
        try:
            await asyncio.to_thread(_write, tensors, file)
            await server.post("/update_weights", {"update_info": {"path": str(file), "identity": identity}})
        finally:
            file.unlink(missing_ok=True)


class IpcTransfer:
    """The server reads the trainer's own memory, on the GPU that both use. It copies the weights once."""

    async def open(self, server: Connection) -> None:
        """Nothing to do."""

    async def send(self, server: Connection, tensors: Tensors, identity: str) -> None:
        """See `Transfer`."""
        shared = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        handles = {name: reduce_tensor(tensor)[1] for name, tensor in shared.items()}
        encoded = base64.b64encode(pickle.dumps(handles)).decode()
        await server.post("/update_weights", {"update_info": {"handles": encoded, "identity": identity}})
        torch.cuda.ipc_collect()


class BroadcastTransfer:
    """From the trainer's GPU to the server's, tensor by tensor (`process_pair.py`)."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        """Both ends find each other through a file in `directory`, which only the user can enter."""
        self.meeting_point = directory / f"{uuid.uuid4().hex}.pair"
        self.device = device
        self._pair: ProcessPair | None = None

    async def open(self, server: Connection) -> None:
        """Join the server's worker in a process group."""
        path = str(self.meeting_point)
        joined = server.post("/init_weight_transfer_engine", {"init_info": {"meeting_point": path}})
        self._pair, _ = await asyncio.gather(asyncio.to_thread(ProcessPair, path, TRAINER, self.device), joined)

    async def send(self, server: Connection, tensors: Tensors, identity: str) -> None:
        """See `Transfer`."""
        assert self._pair is not None, "open comes first"
        outline = [(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()]
        sending = asyncio.create_task(asyncio.to_thread(self._pair.send, tensors.values()))
        try:
            await server.post("/update_weights", {"update_info": {"outline": outline, "identity": identity}})
        except BaseException:
            self._pair.abort()  # who received has gone, and the sending thread would wait for it
            await asyncio.wait([sending])
            raise
        await sending


def new_transfer(kind: TransferKind, directory: Path, device: torch.device) -> Transfer:
    """A way into one server. `directory` is readable there; `device` is where the trainer's tensors are."""
    match kind:
        case "file":
            return FileTransfer(directory)
        case "ipc":
            return IpcTransfer()
        case "broadcast":
            return BroadcastTransfer(directory, device)


def _write(tensors: Tensors, file: Path) -> None:
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a file system that is full
        raise TinsmithError(
            f"weights for vLLM do not fit into {file.parent}: {error}; make room there, or name another --vllm-dir"
        ) from error
