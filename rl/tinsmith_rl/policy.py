"""Policies, and the server's models as policies.

A `Policy` answers prompts: token ids and images in, token ids and logprobs out. Rollouts know nothing else about
models, so a test or another library can be a policy, too. The functions below open the models of a Tinker server, as
the configuration names them.
"""

import logging
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np
import tinker
from huggingface_hub import try_to_load_from_cache
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tinsmith_rl.chat import ChatTemplate
from tinsmith_rl.config import ModelSection, ServerSection
from tinsmith_rl.errors import ConfigError, RlError, UserError, config_error, foreign_code, translated
from tinsmith_rl.reach import require_server

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingRequest:
    """Settings of the sampling of an answer."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    """Texts that end the answer, in addition to the model's end of turn."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the answer, instead of `stop` and the model's end of turn."""
    seed: int | None = None


@dataclass(frozen=True)
class Completion:
    """A sampled answer."""

    tokens: NDArray[np.int32]
    """[s] including those that ended it."""
    logprobs: NDArray[np.float32]
    """[s]"""
    stopped: bool
    """False if it ended because it reached its maximum length."""
    sequence_id: str = ""
    """The server's name for the answer."""


class PromptRefusedError(UserError):
    """The server refuses a prompt, such as one with an image that is too large. The message gives its reason."""


class WeightsLostError(RlError):
    """The server has lost the weights of a sampling client, because it or its engine was restarted: publish again."""


class Policy(Protocol):
    """A model, or what stands in for one."""

    async def complete(self, prompt: tinker.ModelInput, request: SamplingRequest) -> Completion:
        """One answer to `prompt`. Raises PromptRefusedError, WeightsLostError."""
        ...


class TinkerPolicy:
    """The model of an SDK sampling client."""

    def __init__(self, client: tinker.SamplingClient) -> None:
        self.client = client

    async def complete(self, prompt: tinker.ModelInput, request: SamplingRequest) -> Completion:
        params = tinker.SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            # None: the model's end of turn; []: nothing would end the answer
            stop=list(request.stop_ids) or list(request.stop) or None,
            seed=request.seed,
        )
        try:
            reply = await self.client.sample(prompt, 1, params)
        # ValueError: the SDK's for a reply to a poll, with the reply as its cause
        except (tinker.TinkerError, ValueError) as error:
            reply = (error.__cause__ if isinstance(error, ValueError) else None) or error
            # The SDK's own, when it cannot poll
            if isinstance(reply, tinker.NotFoundError) or type(reply) is tinker.TinkerError:
                raise WeightsLostError(_reason(reply)) from error
            by_user = (
                isinstance(reply, tinker.RequestFailedError)
                and reply.category == tinker.types.RequestErrorCategory.User
            )
            if by_user or isinstance(reply, tinker.BadRequestError):
                raise PromptRefusedError(f"the server refuses the prompt: {_reason(reply)}") from error
            raise
        sequence = reply.sequences[0]
        tokens = np.array(sequence.tokens, dtype=np.int32)
        logprobs = np.array(sequence.logprobs or [], dtype=np.float32)
        return Completion(tokens, logprobs, sequence.stop_reason == "stop", sequence.sequence_id)


def derived_seed(*parts: int) -> int:
    """A seed of 63 bits that depends on all `parts`, such as the seed of the run, group, member and turn."""
    digest = blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def connect(server: ServerSection) -> tinker.ServiceClient:
    """A client of the server, which is waited for.

    Raises ConfigError if it cannot be reached, or if the SDK refuses the API key.
    """
    require_server(server)
    with config_error("server", tinker.TinkerError):
        rest_client(server)
    return tinker.ServiceClient(base_url=server.url or None, api_key=server.api_key or None)


def rest_client(server: ServerSection) -> tinker.RestClient:
    """A client for what is neither training nor sampling."""
    return tinker.RestClient(base_url=server.url or None, api_key=server.api_key or None)


def open_training_client(service: tinker.ServiceClient, model: ModelSection, resume_from: str) -> tinker.TrainingClient:
    """The model to train: resumed with its optimizer from `resume_from`, started from a checkpoint, or new.

    Raises ConfigError if the server refuses.
    """
    client: tinker.TrainingClient
    with _refusals():
        if resume_from:
            client = service.create_training_client_from_state_with_optimizer(resume_from).result()
        elif model.start_from:
            client = service.create_training_client_from_state(model.start_from).result()
        else:
            client = service.create_lora_training_client(
                base_model=model.base_model, rank=model.rank, seed=model.seed
            ).result()
    return client


def open_policy(service: tinker.ServiceClient, path: str, base_model: str) -> TinkerPolicy:
    """A checkpoint (tinker://..., for training or for sampling) as a policy; the base model if `path` is empty.

    Raises ConfigError if the server refuses.
    """
    with _refusals():
        if not path:
            return TinkerPolicy(service.create_sampling_client(base_model=base_model).result())
        if "/weights/" in path:
            client = service.create_training_client_from_state(path).result()
            return TinkerPolicy(client.save_weights_and_get_sampling_client().result())
        return TinkerPolicy(service.create_sampling_client(model_path=path).result())


def _refusals() -> AbstractContextManager[None]:
    """Raise ConfigError, with the server's reason, where the server refuses a model or checkpoint."""
    refused = (tinker.APIStatusError, tinker.RequestFailedError)
    return translated(refused, lambda error: ConfigError(f"model: the server refuses: {_reason(error)}"))


def lost_something(error: Exception) -> bool:
    """Whether an SDK error says that the server, or something on it, is gone, and not that the request is wrong."""
    if isinstance(error, ValueError):
        return isinstance(error.__cause__, tinker.NotFoundError)
    if isinstance(error, tinker.RequestFailedError):
        return error.category != tinker.types.RequestErrorCategory.User
    gone = WeightsLostError | tinker.NotFoundError | tinker.InternalServerError | tinker.APIConnectionError
    # The latter when the SDK cannot poll for results
    return isinstance(error, gone) or type(error) is tinker.TinkerError


def _reason(error: BaseException) -> str:
    """The server's own words in an error of the SDK."""
    body = getattr(error, "body", None)
    return str(body["detail"] if isinstance(body, dict) and "detail" in body else error)


def base_model_of(client: tinker.TrainingClient) -> str:
    """The name of a model's base model."""
    return str(client.get_info().model_data.model_name)


def context_limit(server: ServerSection, base_model: str) -> int:
    """The longest sequence of a base model on the server, in tokens. Raises ConfigError if the server does not say."""
    capabilities = rest_client(server).get_server_capabilities().result()
    for supported in capabilities.supported_models:
        if supported.model_name == base_model and supported.max_context_length:
            return int(supported.max_context_length)
    raise ConfigError(
        f"the server does not say how long sequences of {base_model!r} may be; set generation: max_context"
    )


def tokenizer_of(source: str, client: tinker.TrainingClient | tinker.SamplingClient) -> PreTrainedTokenizerBase:
    """The tokenizer in a directory or of a Hub id, or for "" the one that the server names.

    Raises ConfigError if it cannot be loaded.
    """
    which = f"tokenizer={source!r}" if source else "tokenizer is empty, and the one that the server names"
    remedy = "give the directory or the Hub id of the model's tokenizer"

    def not_loaded(error: BaseException) -> ConfigError:
        return ConfigError(f"model: {which} cannot be loaded: {' '.join(str(error).split()) or repr(error)}; {remedy}")

    # Of any kind: that is what the tokenizers library raises for a file that it cannot use. The SDK's are of the
    # connection, for example.
    with foreign_code(not_loaded, tinker.TinkerError, MemoryError):
        named = source or _named_by_server(client)
        if not Path(named).is_dir() and not isinstance(try_to_load_from_cache(named, "tokenizer_config.json"), str):
            log.warning("getting the tokenizer of %r from the Hugging Face Hub", named)
        tokenizer: PreTrainedTokenizerBase = (
            AutoTokenizer.from_pretrained(source, trust_remote_code=False) if source else client.get_tokenizer()
        )
    return tokenizer


def _named_by_server(client: tinker.TrainingClient | tinker.SamplingClient) -> str:
    """The directory or Hub id of the tokenizer that the SDK loads: named by the server, else by the base model.

    Raises ConfigError for a name that leads to neither: the SDK would ask the Hub for it, for more than a minute.
    """
    if isinstance(client, tinker.SamplingClient):
        name = client.get_base_model()
    else:
        data = client.get_info().model_data
        if data.tokenizer_id:
            return str(data.tokenizer_id)
        name = str(data.model_name)
    name = name.partition(":")[0]
    if name.count("/") == 2:  # ORGANISATION/MODEL/VARIANT
        name = name.rpartition("/")[0]
    if not Path(name).is_dir() and not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        raise ConfigError(f"{name!r} is no directory on this machine, and a Hub id looks like ORGANISATION/MODEL")
    return name


def chat_template(model: ModelSection, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """The chat template that the configuration names, or else the tokenizer's.

    Raises ConfigError if its file cannot be read.
    """
    text = None
    if model.chat_template:
        what = f"model: chat_template={model.chat_template!r} cannot be read"
        with config_error(what, OSError, UnicodeDecodeError, remedy="it must be Jinja in UTF-8"):
            text = Path(model.chat_template).read_text(encoding="utf-8")
    return ChatTemplate.for_tokenizer(tokenizer, text, model.template_options)
