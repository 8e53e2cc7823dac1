"""Weights on their way to vLLM servers: adapters as PEFT directories, full weights by transfer to a running server.

Every adapter has a directory of its own, because vLLM caches what it computes under an adapter's name and path.
`inside_vllm/receivers.py` has the other ends of the transfers.
"""

import asyncio
import base64
import itertools
import os
import pickle
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from tinsmith.errors import TinsmithError, UserError
from tinsmith.kernels.device import on_device
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.models.layout import HEAD_WEIGHT, LM_HEAD
from tinsmith.models.lora import Adapter
from tinsmith.protocol.own_directory import OwnDirectory
from tinsmith.protocol.shapes import LoraShape
from tinsmith.sampling.inside_vllm import DELTA_NET_PARTS, TransferKind
from tinsmith.sampling.inside_vllm.identity import Identity
from tinsmith.sampling.inside_vllm.transfer_group import TRAINER, TransferGroup
from tinsmith.sampling.vllm.protocol import Connection, ServerFailedError
from tinsmith.training.parallel.process_group import LOOPBACK, set_communication_variables
from tinsmith.training.peft_format import write_adapter

PREFIX = "tinsmith-weights-"
"""Prefix of directories of weights."""
_MEMORY = Path("/dev/shm")
LONGEST_BROADCAST_S = 240.0
"""Seconds that trainer and server may take to connect, where one is usual, and that a broadcast may take.

After five minutes NCCL would end the trainer (`inside_vllm/transfer_group.py`).
"""

Tensors = Mapping[str, Tensor]
"""Tensors by their names in the checkpoint. They must not change before `Transfer.send` has returned."""


class WeightFiles:
    """The files of one base model's weights. Used from several threads."""

    def __init__(self, base: BaseModel, directory: str) -> None:
        """Files go below `directory`; an empty text chooses one in memory.

        What dead processes of this machine have left is deleted.
        """
        self.base = base
        # Read now: while a pass with full weights runs, in another thread, these stand where the base's parameters are
        # looked up.
        self.parameters = base.full_targets(LoraShape(rank=0, seed=0))
        parent = Path(directory or (_MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()))
        self._own = OwnDirectory(PREFIX, parent)
        self.root = self._own.path
        self._count = itertools.count(1)

    def write(self, adapter: Adapter) -> Path:
        """Write an adapter to a new directory and return that. It is in the base's dtype, to which vLLM would round."""
        directory = self.root / str(next(self._count))
        pairs = adapter.form.pairs(on_device(adapter.flat_working, torch.device("cpu")))
        names = {name: self._name_at_server(name) for name in pairs}
        write_adapter(pairs, adapter.shape.rank, names, list(names.values()), self.base.tokenizer_id, directory)
        return directory

    @torch.no_grad()
    def identity(self, adapter: Adapter) -> str:
        """Compute the identity of an adapter as vLLM's layers hold it: in the base's dtype, with B times the scale."""
        whole = Identity()
        for name, pair in adapter.working.items():
            module = self._name_at_server(name)
            whole.add(f"{module}.a", pair.a)
            whole.add(f"{module}.b", pair.b * adapter.scale)
        return str(whole)

    def _name_at_server(self, name: str) -> str:
        """Return the server's name for a LoRA target: that of transformers, but parts of a layer have their own."""
        if self.base.layout.targets[name].rows is None:
            return self.base.layout.module_name(name)
        layer, part = name.rsplit(".", 2)[0], ".".join(name.rsplit(".", 2)[1:])
        return f"{self.base.layout.language_model}.{layer}.{DELTA_NET_PARTS[part]}"

    def base_weight(self, target: str) -> Tensor:
        """Return the part of the base's weights that a target of LoRA changes, [out_features, in_features]."""
        return self._part(self.parameters[self._parameter(target)], target)

    def _part(self, weight: Tensor, target: str) -> Tensor:
        start, end = self.base.layout.targets[target].rows or (0, len(weight))
        return weight[start:end]

    def _parameter(self, target: str) -> str:
        """Return the name among full weights of the weight that a target of LoRA changes, wholly or in part."""
        return self.base.head_name if target == LM_HEAD else f"{self.base.layout.targets[target].module}.weight"

    @torch.no_grad()
    def merged(self, adapter: Adapter) -> dict[str, Tensor]:
        """Merge an adapter into copies of the base's weights that it changes, by their names among full weights.

        Raises UserError if the adapter has a part on an output projection that is the embedding too.
        """
        if LM_HEAD in adapter.working and self.base.head_name != HEAD_WEIGHT:
            raise UserError(
                "its part on the output projection cannot be merged: it would change the embedding, "
                "which is the same matrix"
            )
        changed: dict[str, Tensor] = {}
        for name, pair in adapter.working.items():
            key = self._parameter(name)
            if key not in changed:
                changed[key] = self.parameters[key].detach().clone()
            part = self._part(changed[key], name)
            part.copy_(part.float() + adapter.scale * (pair.b.float() @ pair.a.float()))
        return changed

    def tensors(self, weights: Weights | None) -> dict[str, Tensor]:
        """Return all that full-parameter training can change, by checkpoint name; the base has what `weights` lack.

        Only weights into which an adapter is merged are copied. Raises UserError as `merged`.
        """
        own = self.merged(weights) if isinstance(weights, Adapter) else weights.working if weights is not None else {}
        return {
            self.base.layout.parameter_name(name): own.get(name, parameter)
            for name, parameter in self.parameters.items()
        }

    def remove(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        self._own.close()


# Full weights into a running server


class Transfer(Protocol):
    """A way for full weights into one instance of a server."""

    async def open(self, server: Connection) -> None:
        """Prepare both ends, once, before the first `send`."""

    async def send(self, server: Connection, tensors: Tensors, identity: str) -> None:
        """Send all tensors of one update; the server compares them with their identity. Raises as `Connection.post`."""


class FileTransfer:
    """Through a safetensors file. Works everywhere, and takes the memory of a whole model meanwhile."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    async def open(self, server: Connection) -> None:
        pass

    async def send(self, server: Connection, tensors: Tensors, identity: str) -> None:
        with tempfile.TemporaryDirectory(dir=self.directory, ignore_cleanup_errors=True) as folder:
            file = Path(folder) / "weights.safetensors"
            await asyncio.to_thread(_write, tensors, file)
            await server.post("/update_weights", {"update_info": {"path": str(file), "identity": identity}})


class IpcTransfer:
    """The server copies from the trainer's own memory, on the GPU that both use."""

    async def open(self, server: Connection) -> None:
        pass

    async def send(self, server: Connection, tensors: Tensors, identity: str) -> None:
        shared = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        handles = {name: reduce_tensor(tensor)[1] for name, tensor in shared.items()}
        encoded = base64.b64encode(pickle.dumps(handles)).decode()
        await server.post("/update_weights", {"update_info": {"handles": encoded, "identity": identity}})
        torch.cuda.ipc_collect()


class BroadcastTransfer:
    """From the trainer's GPU to all of the server's at once, tensor by tensor (`inside_vllm/transfer_group.py`)."""

    def __init__(
        self, directory: Path, device: torch.device, ranks: int = 1, longest_s: float = LONGEST_BROADCAST_S
    ) -> None:
        """Trainer and `ranks` workers find each other through a file in `directory`, which only the user can enter.

        `open` and `send` are given up after `longest_s` seconds each.
        """
        self.meeting_point = directory / f"{uuid.uuid4().hex}.group"
        self.device = device
        self.ranks = ranks
        self.longest_s = longest_s
        self._group: TransferGroup | None = None

    async def open(self, server: Connection) -> None:
        """Join the server's workers in a process group.

        Raises ServerFailedError if they cannot be connected, or as `Connection.post`.
        """
        set_communication_variables(LOOPBACK)
        path, within = str(self.meeting_point), timedelta(seconds=self.longest_s)
        joined = server.post("/init_weight_transfer_engine", {"init_info": {"meeting_point": path}})
        try:
            async with asyncio.timeout(self.longest_s):
                self._group, _ = await asyncio.gather(
                    asyncio.to_thread(TransferGroup, path, TRAINER, 1 + self.ranks, self.device, within), joined
                )
        except (RuntimeError, TimeoutError) as error:  # RuntimeError: as PyTorch raises
            reason = f"it took more than {self.longest_s:g} s" if isinstance(error, TimeoutError) else str(error)
            raise ServerFailedError(
                f"trainer and vLLM server at {server.url} cannot be connected for new weights: {reason}; "
                "NCCL_DEBUG=INFO lets NCCL say why, and --vllm-transfer file sends them in another way"
            ) from error

    async def send(self, server: Connection, tensors: Tensors, identity: str) -> None:
        assert self._group is not None, "open comes first"
        outline = [
            (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()
        ]
        sending = asyncio.create_task(asyncio.to_thread(self._group.send, tensors.values()))
        posting = asyncio.create_task(
            server.post("/update_weights", {"update_info": {"outline": outline, "identity": identity}})
        )
        try:
            async with AsyncExitStack() as failing:
                failing.push_async_callback(_give_up, self._group, sending, posting)
                async with asyncio.timeout(self.longest_s):
                    await asyncio.gather(posting, asyncio.shield(sending))
                failing.pop_all()
        except TimeoutError:
            raise ServerFailedError(
                f"the vLLM server at {server.url} has not taken new weights for {self.longest_s:g} s; its log may say "
                "why, and --vllm-transfer file sends them in another way"
            ) from None


async def _give_up(group: TransferGroup, sending: "asyncio.Task[None]", posting: "asyncio.Task[Any]") -> None:
    group.abort()  # nobody receives any more, and the sending thread would wait for that
    posting.cancel()
    await asyncio.wait([sending, posting])  # a thread cannot be cancelled, and it still has the tensors


def new_transfer(
    kind: TransferKind, directory: Path, device: torch.device, ranks: int, longest_broadcast_s: float
) -> Transfer:
    """Make a way into one server of `ranks` workers, which can read `directory`.

    The trainer's tensors are on `device`.
    """
    match kind:
        case "file":
            return FileTransfer(directory)
        case "ipc":
            return IpcTransfer()
        case "broadcast":
            return BroadcastTransfer(directory, device, ranks, longest_broadcast_s)


def _write(tensors: Tensors, file: Path) -> None:
    try:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            file,
            metadata={"format": "pt"},
        )
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a file system that is full
        raise TinsmithError(
            f"weights for vLLM do not fit into {file.parent}: {error}; make room there, or name another --vllm-dir"
        ) from error
