"""Receivers of full weights in vLLM's workers: a weight transfer engine for each way (`vllm/weights.py` sends).

They take tensors under the names of the model's checkpoint, and load them layer by layer.
"""

import base64
import pickle
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tinsmith.sampling.inside_vllm import TransferKind, backend_of
from tinsmith.sampling.inside_vllm.identity import Identity
from tinsmith.sampling.inside_vllm.transfer_group import FIRST_WORKER, TransferGroup

_OLDER = not hasattr(BaseLayerWithLoRA, "load_weights")
"""True for vLLM 0.26, whose wrappers of layers for adapters do not hand weights on to what is inside."""
_DEVICE_ARGUMENT = 6
"""Position of the GPU's number, which may differ in this process, in the arguments of `rebuild_cuda_tensor`."""


@dataclass
class NoPreparation(WeightTransferInitInfo):
    """No preparation."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """The trainer's description of an update."""

    identity: str
    """The identity of all its tensors, by their names in the checkpoint (`identity.py`)."""


@dataclass
class FileUpdate(Update):
    """A safetensors file."""

    path: str


@dataclass
class IpcUpdate(Update):
    """Memory of the trainer on this GPU."""

    handles: str
    """Name -> arguments of `rebuild_cuda_tensor`, pickled, in base64, from a socket that only the user can reach."""


@dataclass
class MeetingPoint(WeightTransferInitInfo):
    """The file through which all ends find each other."""

    meeting_point: str


@dataclass
class BroadcastUpdate(Update):
    """Tensors that the trainer is about to send."""

    outline: list[tuple[str, list[int], str]]


class _LayerByLayer(WeightTransferEngine[Any, Any]):
    """Base of all receivers, which differ in `receive_weights`."""

    init_info_cls = NoPreparation

    def init_transfer_engine(self, init_info: Any) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one update. vLLM's own version synchronizes an accelerator, which fails on a CPU.

        Raises ValueError if other weights have come than were sent.
        """
        with ExitStack() as failing:
            # Otherwise the layers loaded so far would count for the next update
            failing.callback(self.finish_weight_update)
            self._receive(self.parse_update_info(update_info))
            failing.pop_all()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _receive(self, update: Any) -> None:
        self.received = Identity()
        self.receive_weights(update)
        if str(self.received) != update.identity:
            raise ValueError(
                f"other weights have come than the trainer's: their identity is {self.received}, not {update.identity}"
            )

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        wrapped = _wrapped(self.model) if _OLDER else frozenset()
        self.model.load_weights((_inside(name, wrapped), tensor) for name, tensor in self._counted(tensors))

    def _counted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.received.add(name, tensor)
            yield name, tensor

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_heads(self.model)

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Iterable[Any], trainer_args: Any) -> None:
        """An abstract method of vLLM 0.26. Our trainer does not send through vLLM."""
        raise NotImplementedError("tinsmith/sampling/vllm/weights.py sends")


class FileReceiver(_LayerByLayer):
    """Receives weights from a file in memory."""

    update_info_cls = FileUpdate

    def receive_weights(self, update_info: FileUpdate) -> None:
        with safe_open(update_info.path, framework="pt", device=str(self.device)) as file:
            self.load((name, file.get_tensor(name)) for name in file.offset_keys())


class IpcReceiver(_LayerByLayer):
    """Receives weights from the trainer's memory on this GPU."""

    update_info_cls = IpcUpdate

    def receive_weights(self, update_info: IpcUpdate) -> None:
        handles = pickle.loads(base64.b64decode(update_info.handles))
        self.load((name, self._tensor(arguments)) for name, arguments in handles.items())

    def _tensor(self, arguments: tuple[Any, ...]) -> Tensor:
        here = list(arguments)
        here[_DEVICE_ARGUMENT] = self.device.index
        tensor: Tensor = rebuild_cuda_tensor(*here)
        return tensor


class BroadcastReceiver(_LayerByLayer):
    """Receives weights from the trainer's GPU. Each worker gets all tensors and loads its share."""

    init_info_cls = MeetingPoint
    update_info_cls = BroadcastUpdate

    def init_transfer_engine(self, init_info: MeetingPoint) -> None:
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.group = TransferGroup(init_info.meeting_point, FIRST_WORKER + rank, 1 + ranks, self.device)

    def receive_weights(self, update_info: BroadcastUpdate) -> None:
        names = [name for name, _, _ in update_info.outline]
        shapes = [(torch.Size(shape), getattr(torch, dtype)) for _, shape, dtype in update_info.outline]
        self.group.receive(shapes, lambda tensors: self.load(zip(names, tensors, strict=True)))


def _wrapped(model: torch.nn.Module) -> frozenset[str]:
    """Return the last part of the checkpoint's names of layers that vLLM has wrapped for adapters."""
    packed = getattr(model, "packed_modules_mapping", {})
    leaves = {
        name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, BaseLayerWithLoRA)
    }
    return frozenset(part for leaf in leaves for part in packed.get(leaf, [leaf]))


def _inside(name: str, wrapped: frozenset[str]) -> str:
    """Return the name of a parameter in vLLM's model, where it may be inside a wrapper."""
    layer, _, parameter = name.rpartition(".")
    return f"{layer}.base_layer.{parameter}" if layer.rpartition(".")[2] in wrapped else name


def _repack_heads(model: torch.nn.Module) -> None:
    """Renew the packed output projection that vLLM uses on a CPU, and does not renew if embeddings are tied."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


RECEIVERS: dict[TransferKind, type[_LayerByLayer]] = {
    "file": FileReceiver,
    "ipc": IpcReceiver,
    "broadcast": BroadcastReceiver,
}


def register() -> None:
    """Make them known to vLLM's --weight-transfer-config."""
    for kind, receiver in RECEIVERS.items():
        WeightTransferEngineFactory.register_engine(backend_of(kind), receiver)
