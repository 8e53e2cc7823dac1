"""The server side of a run, as the SDK shows it: clients by configuration, and the chat template that belongs to the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tinker
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tinsmith.errors import ConfigError
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.config import ModelSection, ServerSection
from tinsmith.rl.policy import TinkerPolicy
from tinsmith.rl.reach import require_server


def connect(server: ServerSection) -> tinker.ServiceClient:
    """A client of the server, once that is ready. Raises ConfigError if it cannot be reached, or for a key that the SDK does not take."""
    require_server(server)
    try:
        rest(server)
    except tinker.TinkerError as error:
        raise ConfigError(f"server: {error}") from error
    return tinker.ServiceClient(base_url=server.url or None, api_key=server.api_key or None)


def rest(server: ServerSection) -> tinker.RestClient:
    """A client for what is neither training nor sampling."""
    return tinker.RestClient(base_url=server.url or None, api_key=server.api_key or None)


def training_client(service: tinker.ServiceClient, model: ModelSection, resume_from: str) -> tinker.TrainingClient:
    """The model to train: resumed with its optimizer, begun from a checkpoint, or a new adapter.

    Raises ConfigError if the server refuses.
    """
    client: tinker.TrainingClient
    with _refusals():
        if resume_from:
            client = service.create_training_client_from_state_with_optimizer(resume_from).result()
        elif model.start_from:
            client = service.create_training_client_from_state(model.start_from).result()
        else:
            client = service.create_lora_training_client(base_model=model.base_model, rank=model.rank, seed=model.seed).result()
    return client


def policy_of(service: tinker.ServiceClient, path: str, base_model: str) -> TinkerPolicy:
    """A checkpoint (tinker://...) to sample from, of either kind; the base model if `path` is empty.

    Raises ConfigError if the server refuses.
    """
    with _refusals():
        if not path:
            return TinkerPolicy(service.create_sampling_client(base_model=base_model).result())
        if "/weights/" in path:
            client = service.create_training_client_from_state(path).result()
            return TinkerPolicy(client.save_weights_and_get_sampling_client().result())
        return TinkerPolicy(service.create_sampling_client(model_path=path).result())


@contextmanager
def _refusals() -> Iterator[None]:
    """A model or checkpoint that the server refuses is a wrong configuration; the ConfigError quotes the server."""
    try:
        yield
    except (tinker.APIStatusError, tinker.RequestFailedError) as error:
        body = getattr(error, "body", None)
        reason = body["detail"] if isinstance(body, dict) and "detail" in body else error
        raise ConfigError(f"model: the server refuses: {reason}") from error


def tokenizer_of(policy: TinkerPolicy) -> PreTrainedTokenizerBase:
    """The tokenizer of a policy's base model, by that model's name. Raises ConfigError if the name is no Hub id that can be reached."""
    try:
        tokenizer: PreTrainedTokenizerBase = policy.client.get_tokenizer()
    except OSError as error:
        raise ConfigError(f"model: tokenizer is empty, and the base model's name leads to none: {error}; give its directory") from error
    return tokenizer


def chat_template(model: ModelSection, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """The chat template of the configuration. Raises ConfigError if its file is not there."""
    text = None
    if model.chat_template:
        file = Path(model.chat_template)
        if not file.is_file():
            raise ConfigError(f"model: chat_template={model.chat_template!r} is no file")
        text = file.read_text(encoding="utf-8")
    return ChatTemplate.for_tokenizer(tokenizer, text, model.template_options)


def base_model_of(client: tinker.TrainingClient) -> str:
    """Name of the base model that a checkpoint belongs to."""
    return str(client.get_info().model_data.model_name)


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a directory or of a Hub id."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    return tokenizer


def context_limit(server: ServerSection, base_model: str) -> int:
    """The server's longest sequence for a base model, in tokens. Raises ConfigError if it does not say."""
    capabilities = rest(server).get_server_capabilities().result()
    for supported in capabilities.supported_models:
        if supported.model_name == base_model and supported.max_context_length:
            return int(supported.max_context_length)
    raise ConfigError(f"the server does not say how long sequences of {base_model!r} may be; set generation: max_context")
