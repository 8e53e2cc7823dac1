"""A base model: frozen weights, tokenizer, and one forward pass over a packed row that trainer and sampler share.

Image features are written into the embeddings at the indices that rendering computed. The outer `forward` of
transformers, which looks for placeholder ids, is never used.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from cachetools import LRUCache
from torch import Tensor
from transformers import AutoTokenizer
from transformers import logging as transformers_logging

from tinsmith.config import Config, ModelsConfig
from tinsmith.errors import ConfigError, UserError
from tinsmith.kernels.compiled import count_kernels, keep_kernels
from tinsmith.kernels.delta_nets import announce
from tinsmith.kernels.device import move_weights
from tinsmith.models.attention import PassPlan
from tinsmith.models.decoder import Decoder, Deepstack
from tinsmith.models.deterministic import require_attention_only, stable_hidden_states
from tinsmith.models.families import Family, context_length, family_of, load_network, packed_parameters, read_config
from tinsmith.models.fingerprint import compute_fingerprint
from tinsmith.models.full import FullWeights, Weights
from tinsmith.models.layers import DeltaNet
from tinsmith.models.layout import HEAD_WEIGHT, LM_HEAD, Layout, layout_of
from tinsmith.models.lora import Segment
from tinsmith.models.machine import limit_memory, why_no_gpu
from tinsmith.models.network import (
    ATTENTION,
    ActivePass,
    attach_lora,
    attach_to_experts,
    follow_plans,
    fuse_norms,
    recompute_layers,
    use_attention,
)
from tinsmith.models.packed_lora import SegmentAdapters
from tinsmith.models.quantized import Format, format_of, quantize_experts
from tinsmith.models.read_decoder import KNOWN_TYPES, read_decoder
from tinsmith.models.streamed_decoder import move_all_but_layers, read_host_decoder
from tinsmith.models.vision_tower import ImageFeatures, ImageInput, VisionTower
from tinsmith.protocol.shapes import LoraShape


@dataclass(frozen=True, eq=False)
class PackedRow:
    """Sequences laid end to end, sorted by adapter; or all of one model that has weights of its own (`full`)."""

    token_ids: Tensor
    """[tokens] int64"""
    positions: Tensor
    """[1 or 3, tokens] int64 rotary positions, restarting with each sequence."""
    lengths: list[int]
    """Tokens of each sequence, in row order."""
    segments: list[Segment]
    """The slices of the row and the adapter of each; together they cover it."""
    image_index: Tensor
    """[image tokens] int64: row indices that take image features, in the order of `images`."""
    images: list[ImageInput]
    full: FullWeights | None = None
    """Weights for the whole row in place of the base's; no segment has an adapter then."""
    routes: Tensor | None = None
    """[mixtures, tokens, per_token] int16 experts to follow, -1 where the router chooses; None if it always does."""


@dataclass
class BaseModel:
    """One served base model. After loading nothing in it changes but the `active` pass and cached features."""

    name: str
    tokenizer_id: str
    family: Family
    config: Any
    """The transformers configuration of the whole model."""
    tokenizer: Any
    network: Any
    """The transformers model, changed as `models/network.py` says."""
    language_model: Any
    decoder: Decoder | None
    """Our way through its layers; None if only transformers' modules compute them."""
    lm_head: Tensor
    """[vocabulary, hidden]"""
    device: torch.device
    dtype: torch.dtype
    max_context: int
    active: ActivePass
    layout: Layout
    expert_format: Format | None
    """How the matrices of experts are held; None for those of `dtype`."""
    deterministic: bool
    """Whether numbers of a token, but not gradients, depend on what it sees alone (`models/deterministic.py`)."""
    features: LRUCache[bytes, ImageFeatures]
    computed_fingerprint: Future[str]
    """Computed while the server runs already: no start waits for it."""

    @property
    def fingerprint(self) -> str:
        """The fingerprint (`models/fingerprint.py`), awaited.

        Raises ConfigError if the files cannot be read any more.
        """
        return self.computed_fingerprint.result()

    @property
    def known_fingerprint(self) -> str | None:
        """The fingerprint, if it is computed by now."""
        return self.fingerprint if self.computed_fingerprint.done() else None

    @property
    def text_config(self) -> Any:
        """The configuration of the language model."""
        return self.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        """Rows of the output projection: every token id is below it."""
        return self.lm_head.shape[0]

    @property
    def merge_size(self) -> int:
        """Patches per image token along each side; 1 for a text model."""
        return self.config.vision_config.spatial_merge_size if self.family.takes_images else 1

    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation unless the request says otherwise."""
        configured = self.network.generation_config.eos_token_id
        listed = configured if isinstance(configured, list) else [configured]
        return frozenset(i for i in (*listed, self.tokenizer.eos_token_id) if i is not None)

    def full_targets(self, shape: LoraShape) -> dict[str, Tensor]:
        """The parameters that full-parameter training of this shape copies, by their names inside the language model.

        A switch that is off leaves out all attention blocks or MLPs, or the output projection, which is the embedding
        too where they are tied. Routers of experts stay as they are. The rest is always trained.

        Raises UserError if experts are held in fewer bits: what would be trained is not here.
        """
        if self.expert_format is not None:
            raise UserError(
                f"{self.name} has no full parameters (rank 0) to train or sample: its experts are held in "
                f"{self.expert_format.name}; use adapters, or start the server with --expert-dtype model"
            )
        return self.trainable(shape)

    def trainable(self, shape: LoraShape) -> dict[str, Tensor]:
        """The same, without the matrices of quantized experts."""
        unembed = () if shape.train_unembed else (self.head_name,)
        frozen = (*unembed, *self.layout.frozen_blocks(shape), *self.layout.routers)
        parameters = dict(self.language_model.named_parameters()) | {self.head_name: self.lm_head}
        return {name: parameter for name, parameter in parameters.items() if not name.startswith(frozen)}

    @cached_property
    def embedding_name(self) -> str:
        """Name of the embedding inside the language model."""
        embedding = self.language_model.get_input_embeddings()
        names: dict[Any, str] = {module: name for name, module in self.language_model.named_modules()}
        return names[embedding]

    @property
    def follows_experts(self) -> bool:
        """Whether it is a mixture of experts whose passes note and follow experts: one that our decoder computes."""
        return bool(self.layout.experts) and self.decoder is not None

    @cached_property
    def head_name(self) -> str:
        """Name of the output projection among full weights: the embedding's, where they are tied."""
        tied = self.lm_head is self.language_model.get_input_embeddings().weight
        return f"{self.embedding_name}.weight" if tied else HEAD_WEIGHT

    def head(self, owner: Weights | None) -> Tensor:
        """The output projection [vocabulary, hidden] of a model: its own, or the base's."""
        return owner.working.get(self.head_name, self.lm_head) if isinstance(owner, FullWeights) else self.lm_head

    def hidden_states(
        self, row: PackedRow, plan: PassPlan, recompute: int = 0, before_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Final hidden states [tokens, hidden] of a packed row, after the last norm.

        `recompute` and `before_layer` are as in `Decoder.forward`; transformers' modules are computed without a break.
        """
        embedding = self.language_model.get_input_embeddings()
        embeddings = self._call(row, embedding, f"{self.embedding_name}.", row.token_ids)
        deepstack = None
        if row.images:
            features = self.image_features(row.images)
            embeddings = embeddings.index_copy(0, row.image_index, torch.cat([f.embeddings for f in features]))
            deepstack = _deepstack(row, features)
        if self.decoder is None:
            return self._through_modules(row, plan, embeddings, deepstack, recompute)
        decoder = self.decoder if row.full is None else row.full.decoder_of(self.decoder)
        if self.deterministic and not torch.is_grad_enabled():
            return stable_hidden_states(decoder, embeddings, row.positions, plan, row.segments, deepstack)
        return decoder.forward(
            embeddings, row.positions, plan, SegmentAdapters(row.segments), deepstack, recompute, before_layer
        )

    def _through_modules(
        self, row: PackedRow, plan: PassPlan, embeddings: Tensor, deepstack: Deepstack | None, recompute: int
    ) -> Tensor:
        positions = row.positions if not self.family.mrope else row.positions.unsqueeze(1)
        inputs: dict[str, Any] = {"inputs_embeds": embeddings.unsqueeze(0), "position_ids": positions, "plan": plan}
        if deepstack:
            mask = torch.zeros(1, row.token_ids.shape[0], dtype=torch.bool, device=row.token_ids.device)
            inputs["visual_pos_masks"] = mask.index_fill_(1, deepstack.index, True)
            inputs["deepstack_visual_embeds"] = deepstack.features
        with self.active.during(row.segments, recompute, row.full):
            output = self._call(row, self.language_model, "", use_cache=False, **inputs)
        hidden: Tensor = output.last_hidden_state.squeeze(0)
        return hidden

    def _call(self, row: PackedRow, module: Any, prefix: str, *arguments: Any, **keywords: Any) -> Any:
        if row.full is None:
            return module(*arguments, **keywords)
        return row.full.call(module, prefix, *arguments, **keywords)

    @cached_property
    def tower(self) -> VisionTower:
        return VisionTower(self.network.model.visual, self.device, self.dtype)

    def image_features(self, images: Sequence[ImageInput]) -> list[ImageFeatures]:
        """Features of the rows of each image; each distinct image goes through the tower once and is cached by hash."""
        missing = {p.sha256: p for p in images if p.sha256 not in self.features}
        # Images that are computed together may change each other's last bits.
        groups = (
            [[image] for image in missing.values()]
            if self.deterministic
            else [list(missing.values())]
            if missing
            else []
        )
        fresh = dict(
            zip(missing, [features for group in groups for features in self.tower.features(group)], strict=True)
        )
        known = [fresh.get(p.sha256) or self.features[p.sha256] for p in images]
        for digest, features in fresh.items():
            if features.nbytes <= self.features.maxsize:
                self.features[digest] = features
        return [features.part(p.rows) for features, p in zip(known, images, strict=True)]


def _deepstack(row: PackedRow, features: list[ImageFeatures]) -> Deepstack | None:
    if not features[0].deepstack:
        return None
    layers = [torch.cat(layer) for layer in zip(*(f.deepstack for f in features), strict=True)]
    return Deepstack(row.image_index, layers)


def load_base_model(
    name: str,
    source: str,
    config: ModelsConfig,
    feature_cache_bytes: int,
    layers_on_host: bool = False,
    network: Any = None,
) -> BaseModel:
    """Load the model in a local directory or of a Hub id, to be served under `name`.

    With `layers_on_host` those layers that our own decoder computes stay in the host's memory, and come to the device
    one at a time. A `network` that is in memory already, in the precision of `config`, takes the place of the weights
    in the files, and is changed.

    Raises ConfigError for an unsupported architecture or a device that is not there. Whether the model computes what
    transformers computes is for `sampling/self_check.py` to say.
    """
    transformers_logging.disable_progress_bar()  # bars have no place in a server's log
    device, dtype = _prepared_device(config)
    model_config = read_config(source)
    family = family_of(source, model_config)
    tokenizer = load_tokenizer(source)  # before the weights, which take longer
    packed = packed_parameters(source) if config.expert_dtype != "model" and network is None else {}
    if network is None:
        network = load_network(source, family, dtype, packed)
    network.eval().requires_grad_(False)
    language_model = family.language_model(network)
    layout = layout_of(source, family, network)
    expert_format = format_of(source, layout, config.expert_dtype)
    layers_on_host = layers_on_host and family.model_type in KNOWN_TYPES
    if expert_format is not None:
        home = torch.device("cpu") if layers_on_host else device
        inside = {name.removeprefix(f"{network.base_model_prefix}."): own for name, own in packed.items()}
        if left := quantize_experts(language_model, layout, expert_format, dtype, device, home, inside):
            raise ConfigError(f"{source}: {min(left)} is in MXFP4 and none of its experts'; omit --expert-dtype")
    if layers_on_host:
        move_all_but_layers(network, language_model, device)
    else:
        move_weights(network, device)
    use_attention(network, family, ATTENTION)
    fuse_norms(language_model)
    follow_plans(language_model)
    if any(isinstance(kind, DeltaNet) for kind in layout.layers):
        announce(device, dtype)
    decoder: Decoder | None
    if layers_on_host:
        decoder = read_host_decoder(family.model_type, language_model, layout, device)
    else:
        decoder = read_decoder(family.model_type, language_model, layout)
    if config.deterministic:
        require_attention_only(name, decoder)
    if decoder is None and expert_format is not None:
        raise ConfigError(f"{source}: its layers are none that --expert-dtype {expert_format.name} is for; omit it")
    active = ActivePass()
    attach_lora(language_model, {name: target for name, target in layout.targets.items() if name != LM_HEAD}, active)
    attach_to_experts(language_model, layout.experts, active)
    recompute_layers(language_model, active)
    return BaseModel(
        name=name,
        tokenizer_id=source,
        family=family,
        config=model_config,
        tokenizer=tokenizer,
        network=network,
        language_model=language_model,
        decoder=decoder,
        lm_head=network.get_output_embeddings().weight,
        device=device,
        dtype=dtype,
        max_context=context_length(name, model_config.get_text_config(), config.max_context),
        active=active,
        layout=layout,
        expert_format=expert_format,
        deterministic=config.deterministic,
        features=LRUCache(maxsize=feature_cache_bytes, getsizeof=lambda f: f.nbytes),
        computed_fingerprint=compute_fingerprint(source),
    )


def _prepared_device(config: ModelsConfig) -> tuple[torch.device, torch.dtype]:
    """The device and the precision of a model. The process is prepared to compute with them."""
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches kernels on the current device
        keep_kernels(config.compile_cache)
        count_kernels()
    limit_memory(device, config.memory_share)
    if dtype == torch.float32:  # float32 means float32: convolutions (the tower's patches) default to TF32 on CUDA
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    return device, dtype


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a model.

    Raises ConfigError if it cannot be loaded, or has no tokens: transformers makes one without files.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # of any kind: that is what the tokenizers library raises for a file that it cannot use
        reason = str(error).splitlines() or [repr(error)]
        raise ConfigError(
            f"{source}: its tokenizer cannot be loaded: {reason[0]}; copy that of the model, or download it again"
        ) from error
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise ConfigError(
            f"{source} has no tokenizer; name a model that has one, or a directory to which that "
            "of the model was copied"
        )
    return tokenizer


def pick_device(wanted: str) -> torch.device:
    """The device that the setting `device` names. Raises ConfigError if this machine does not have it."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"device={wanted!r} is not a device; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={wanted!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        # Before 2.12 PyTorch tells no memory of a device without a number
        device = torch.device("cuda", device.index or 0)
        count = torch.cuda.device_count()
        if not count:
            raise ConfigError(f"device={wanted!r}: {why_no_gpu()}; leave --device out, or use --device cpu")
        if device.index >= count:
            raise ConfigError(
                f"device={wanted!r}: PyTorch can use {count} CUDA devices; "
                f"name one of cuda:0 to cuda:{count - 1}, or start fewer --workers"
            )
    return device


def loading_of(config: Config) -> ModelsConfig:
    """Return the settings to load base models with: as configured, or `loading_to_compare` if it only compares."""
    return loading_to_compare(config) if config.only_compares else config.models


def loading_to_compare(config: Config) -> ModelsConfig:
    """Return the settings to load a base model into the host's memory, in the precision of the vLLM servers' device."""
    dtype = pick_dtype(config.models.dtype, pick_device(config.models.device))
    return replace(config.models, device="cpu", dtype=str(dtype).removeprefix("torch."), memory_share=1.0)


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The precision that the setting `dtype` means on a device."""
    if wanted == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]


# Chooses the number of CPU threads for a pass or an optimizer step.
#
# The operations of a small pass are each over before a second thread has woken up. Where other processes need the cores
# too, threads that wait for each other make it several times slower, and take the cores from the others.

SMALL_PASS = 2**27
"""Multiply-adds below which a pass uses one thread: 500 tokens of the tiny model, less than one of a real model."""

SMALL_STEP = 2**22
"""Parameters below which an optimizer step uses one thread: fused AdamW synchronizes all threads at every tensor."""


def threads_for(base: BaseModel, tokens: int) -> AbstractContextManager[None]:
    """Run a pass over that many tokens with one thread if it is small; then restore the number of threads."""
    weights = base.layout.active_weights
    return _one_thread() if base.device.type == "cpu" and tokens * weights < SMALL_PASS else nullcontext()


def threads_for_step(parameters: int) -> AbstractContextManager[None]:
    """Run an optimizer step over that many parameters with one thread if it is small; then restore the number."""
    return _one_thread() if parameters < SMALL_STEP else nullcontext()


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
