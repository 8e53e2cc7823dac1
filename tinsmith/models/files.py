"""Checks the files of a base model before it is loaded: missing, damaged or unusable ones are reported.

Only headers, sizes and small files are read, and neither torch nor transformers is imported: commands say it within
their first second.
"""

import importlib.util
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from tinsmith.errors import ConfigError, printable, quoted
from tinsmith.http_client import open_url, why_unanswered

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model*.bin"
"""Files that transformers loads if there is no safetensors file. A trainer may have left other .bin files beside."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names in configurations for the number of experts of a mixture."""
EXPERT_MODELS = ("qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen2_moe", "mixtral", "gpt_oss")
"""Model types whose mixtures of experts `models/experts.py` computes."""

DEQUANTIZED = {("gpt_oss", "mxfp4")}
"""Model types with methods of quantization that are read into the precision that is served."""

_POINTER = b"version https://git-lfs"
"""First bytes of a pointer that Git LFS left in place of a file."""
_LONGEST_HEADER = 100_000_000
"""Bytes; safetensors itself reads no longer one."""
_BYTES: dict[str, float] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
}
_BYTES |= {
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes of a number, by the name of its precision in a header."""
_BYTES |= {"F4": 0.5, "F6_E2M3": 0.75, "F6_E3M2": 0.75}
_PACKED = (".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".absmax")
"""Endings of the names of tensors that hold quantized weights, or belong to them."""
_SIZES = [
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "head_dim",
    "vocab_size",
]
_SIZES += ["max_position_embeddings"]
"""Numbers of a configuration that are above 0, where they are one number."""
_TOKENIZERS = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
    ("tekken.json",),
)
"""Files of which transformers makes a tokenizer: those of one line are enough."""
_PROCESSOR, _PROCESSORS = "preprocessor_config.json", "processor_config.json"
_READ = [_PROCESSOR, _PROCESSORS, "generation_config.json", "tokenizer_config.json", "chat_template.json"]
_READ += ["special_tokens_map.json", "added_tokens.json", "vocab.json"]
"""Further files of JSON that are read when a model is loaded."""
_EMBEDDING, _EMBEDDED = "embed_tokens.weight", ("vocab_size", "hidden_size")
"""The end of the embedding's name, and the sizes of a configuration that are its shape."""
_NARROWER = ("word_embed_proj_dim", "embedding_size")
"""Settings of models whose embedding is narrower than their layers."""
_TEMPLATED = ("chat_template.json", "tokenizer_config.json")
"""Files of JSON that may hold a chat template."""
_SAME_SIZES = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
"""Sizes of an image processor that a vision tower has too, and what they are called there."""
_AGAIN = "download it again"
_HUB_S = 20.0
"""Seconds that the Hub may take to answer."""


def require_usable(sources: Iterable[str], whole: bool) -> None:
    """Raise ConfigError for the first of `problems` of these models, if there is one."""
    for source in sources:
        for problem in problems(source, whole):
            raise ConfigError(problem)


def problems(source: str, whole: bool) -> Iterator[str]:
    """List the faults in a model's files, a line each with file and remedy.

    Says nothing of a Hub id that is not on this machine.

    With `whole` a directory must hold all that a server needs; without, as of a Hub id, files of weights may be absent.
    """
    return (printable(problem) for problem in _problems(source, whole))


def _problems(source: str, whole: bool) -> Iterator[str]:
    if Path(source).is_absolute() and not Path(source).is_dir():  # a checkpoint says that the model was there
        yield f"{source}, where the base model was, is no directory; say where it is now, with --base-model"
        return
    directory = local_directory(source)
    if directory is None:
        return
    whole = whole and Path(source).is_dir()
    try:
        config = read_object(directory / "config.json")
    except ConfigError as error:
        yield str(error)
        return
    yield from _unusable(directory / "config.json", config)
    for part in (
        _weights(directory, config, whole),
        _tokenizer(directory, config, whole),
        _processor(directory, config, whole),
    ):
        try:
            yield from part
        except ConfigError as error:
            yield str(error)
        except OSError as error:
            yield f"{error.filename} cannot be read ({error.strerror}); {_AGAIN}, or let this user read it"


def local_directory(source: str) -> Path | None:
    """Return the directory of a model or of a downloaded Hub id on this machine, if there is one."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import try_to_load_from_cache  # here, because it takes a while to import

    found = try_to_load_from_cache(source, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def require_found(source: str) -> None:
    """Raise ConfigError for a Hub id that is neither on this machine nor at the Hub. Loading it asks for minutes."""
    if local_directory(source) is not None:
        return
    from huggingface_hub import constants, get_token

    remedy = "download it elsewhere, and name its directory: [NAME=]PATH"
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{source} is not on this machine, and HF_HUB_OFFLINE is set: unset it, or {remedy}")
    hub, token = constants.ENDPOINT, get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        open_url(f"{hub}/{source}/resolve/main/config.json", _HUB_S, headers).close()
    except HTTPError as error:
        error.close()
        if error.code in (401, 403, 404):
            raise ConfigError(
                f"{source} is neither on this machine nor for you at {hub} (HTTP {error.code}): correct the name; or, "
                "for a model with conditions, accept them there and set HF_TOKEN"
            ) from error
        # Others, such as a Hub that is busy, may pass
    except OSError as error:
        raise ConfigError(
            f"{source} is not on this machine, and {hub} cannot be asked: {why_unanswered(error)}; {remedy}"
        ) from error


def code_of_its_own(source: str) -> str | None:
    """The file of Python that a model brings for its configuration, if there is one."""
    directory = local_directory(source)
    named = read_object(directory / "config.json").get("auto_map") if directory is not None else None
    code = named.get("AutoConfig") if isinstance(named, dict) else None
    return f"{code.rpartition('.')[0]}.py" if isinstance(code, str) else None


def holds_weights(directory: Path) -> bool:
    """Whether there are weights in a directory, and not only a configuration."""
    return any((directory / name).is_file() for name in (WHOLE, INDEX)) or any(directory.glob(PICKLED))


def holds_all_weights(directory: Path) -> bool:
    """Whether there are weights in a directory, with every file that an index names."""
    return holds_weights(directory) and all(file.exists() for file in safetensors_files(directory))


def safetensors_files(directory: Path) -> list[Path]:
    """The files that transformers loads: one, or those that an index names. Raises ConfigError for a damaged index."""
    if (directory / WHOLE).is_file():
        return [directory / WHOLE]
    return (
        [directory / name for name in sorted(set(_indexed(directory).values()))]
        if (directory / INDEX).is_file()
        else []
    )


def _indexed(directory: Path) -> dict[str, str]:
    """The file of each tensor, as the index says. Raises ConfigError if it is damaged."""
    index = directory / INDEX
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ConfigError(f"{index} is damaged (it has no weight_map from tensors to files); {_AGAIN}")
    return places


def read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data of a safetensors file begins, and for each tensor dtype, shape and data_offsets.

    Raises ConfigError, with the remedy, if it cannot be read, is damaged, or is shorter or longer than it says.
    """
    with _reading(file, "its header cannot be read"):
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            first = opened.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise ConfigError(
                    f"{file} is damaged or cut ({size:,} bytes, of which its header would be {length:,}); {_AGAIN}"
                )
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            end = _end_of(name, entry, end)
    if size != 8 + length + end:
        what = "cut" if size < 8 + length + end else "damaged"
        raise ConfigError(f"{file} is {what} ({size:,} bytes, where its header says {8 + length + end:,}); {_AGAIN}")
    return 8 + length, header


def _end_of(name: str, entry: dict[str, Any], start: int) -> int:
    """Return where a tensor ends. Raises ValueError if its size is wrong or it does not begin at `start`."""
    begin, end = entry["data_offsets"]
    count = math.prod(entry["shape"])
    if begin != start:
        raise ValueError(f"{name} begins at {begin}, where the tensor before it ends at {start}")
    if count < 0 or end - begin != count * _BYTES[entry["dtype"]]:
        raise ValueError(f"{name} has {end - begin} bytes for {entry['dtype']} of shape {entry['shape']}")
    return int(end)


@contextmanager
def _reading(file: Path, damage: str) -> Iterator[None]:
    """Turn what reading a file raises into a ConfigError with the remedy; `damage` says what is wrong with the file."""
    try:
        _require_content(file)
        yield
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); {_AGAIN}, or let this user read it") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged ({damage}: {error}); {_AGAIN}") from error


def _require_content(file: Path) -> None:
    """Raise ConfigError for a pointer of Git LFS, and for what is no file: reading a pipe would not end."""
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file} is no file; {_AGAIN}")
    with file.open("rb") as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            raise ConfigError(
                f"{file} is a pointer of Git LFS and not the file itself; run `git lfs pull` in {file.parent}"
            )


def read_object(file: Path) -> dict[str, Any]:
    """The object in a file of JSON. Raises ConfigError, with the remedy."""
    with _reading(file, "it is no JSON"):
        found = json.loads(file.read_bytes())
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is damaged (it holds no object of JSON); {_AGAIN}")
    return found


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the language model."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _unusable(file: Path, config: dict[str, Any]) -> Iterator[str]:
    """Models that no directory could make usable."""
    if not isinstance(config.get("model_type"), str):
        yield f"{file} is no configuration of a model (it has no model_type); name the directory of a model"
    quantized = config.get("quantization_config") or _text(config).get("quantization_config")
    method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else "unknown"
    if quantized and (config.get("model_type"), method) not in DEQUANTIZED:
        yield (
            f"{file}: quantization_config: the weights are quantized ({method}) and cannot be trained; "
            "name the model they were made of"
        )
    for name in _SIZES:
        size = _text(config).get(name)
        # Some models have a list, one for each layer
        if isinstance(size, int | float | str) and (not isinstance(size, int) or size < 1):
            yield f"{file}: {name}={quoted(size)} must be a whole number above 0; {_AGAIN}"
    rows = _text(config).get("vocab_size")
    placeholder = config.get("image_token_id")
    if isinstance(placeholder, int) and isinstance(rows, int) and not 0 <= placeholder < rows:
        yield f"{file}: image_token_id={placeholder} is no token of the model, whose vocab_size is {rows}; {_AGAIN}"
    for name in () if config.get("model_type") in EXPERT_MODELS else EXPERTS:
        for part in {id(each): each for each in (config, _text(config))}.values():
            if isinstance(part.get(name), int) and part[name] > 1:
                yield (
                    f"{file}: {config.get('model_type')!r} is a mixture of experts ({name}={part[name]}), "
                    f"which LoRA does not reach yet; it reaches those of {', '.join(EXPERT_MODELS)}"
                )


def _weights(directory: Path, config: dict[str, Any], whole: bool) -> Iterator[str]:
    if not holds_weights(directory):
        if whole:
            lacks = f"{directory} holds no weights (no {WHOLE}, no {INDEX} and no {PICKLED})"
            found = next(iter(sorted(directory.glob("*.gguf"))), None)
            yield (
                f"{lacks}, only {found.name}, which cannot be trained; name the model that it was made of"
                if found
                else (f"{lacks}; download them, or name the directory that has them")
            )
        return
    files = safetensors_files(directory)
    held: dict[str, dict[str, Any]] = {}
    for file in (file for file in files if whole or file.exists()):
        try:
            held[file.name] = read_header(file)[1]
        except ConfigError as error:
            yield str(error)
    types = {name: entry["dtype"] for header in held.values() for name, entry in header.items()}
    packed = min((name for name, dtype in types.items() if name.endswith(_PACKED) or _BYTES[dtype] < 1), default=None)
    if packed is not None:
        yield (
            f"{directory} holds quantized weights ({packed}), which cannot be trained; "
            "name the model that they were made of"
        )
    yield from _embedding(directory, config, held if packed is None else {})
    if files and files != [directory / WHOLE]:
        places = _indexed(directory)
        lost = next((name for name, file in places.items() if file in held and name not in held[file]), None)
        if lost is not None:
            yield f"{directory / places[lost]} does not hold {lost}, though {INDEX} says so; download both again"
    for file in [] if files else sorted(directory.glob(PICKLED)):
        if whole or file.exists():
            _require_content(file)


def _embedding(directory: Path, config: dict[str, Any], held: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Embeddings of other sizes than the configuration says; `held` are headers by the names of files."""
    sizes = [_text(config).get(name) for name in _EMBEDDED]
    if any(name in _text(config) for name in _NARROWER):
        return
    if not all(isinstance(size, int) for size in sizes):
        return
    for file, header in held.items():
        shape = next((entry["shape"] for name, entry in header.items() if name.endswith(_EMBEDDING)), sizes)
        if shape != sizes:
            told = " and ".join(f"{name}={size}" for name, size in zip(_EMBEDDED, sizes, strict=True))
            yield (
                f"{directory / file} is of another model (its embedding is {shape}, "
                f"and config.json has {told}); {_AGAIN}"
            )


def _tokenizer(directory: Path, config: dict[str, Any], whole: bool) -> Iterator[str]:
    for name in (name for name in _READ if (directory / name).exists()):
        # Transformers takes an empty one for none
        if name != "generation_config.json" or (directory / name).stat().st_size:
            read_object(directory / name)
    yield from _templates(directory)
    yield from _ends(directory / "generation_config.json")
    there = next((names for names in _TOKENIZERS if all((directory / name).exists() for name in names)), None)
    if there is None and not any(directory.glob("*.tiktoken")):
        if whole:
            yield (
                f"{directory} holds no tokenizer (no tokenizer.json, no tokenizer.model); "
                "copy that of the model into it"
            )
    elif there == ("tokenizer.json",):
        yield from _vocabulary(directory / "tokenizer.json", _text(config).get("vocab_size"))
    elif there is not None:
        for name in there:
            _require_content(directory / name)
            if whole and name.endswith(".model") and importlib.util.find_spec("sentencepiece") is None:
                yield (
                    f"{directory / name} needs the package sentencepiece to be read: pip install sentencepiece; "
                    "or add tokenizer.json"
                )


def _ends(file: Path) -> Iterator[str]:
    """Tokens that end answers and are none, so that no answer would end there."""
    ends = read_object(file).get("eos_token_id") if file.exists() and file.stat().st_size else None
    for end in ends if isinstance(ends, list) else [] if ends is None else [ends]:
        if not isinstance(end, int):
            yield f"{file} is damaged (eos_token_id={quoted(ends)} is no number of a token); {_AGAIN}"


def _templates(directory: Path) -> Iterator[str]:
    """Chat templates that are no Jinja. Clients render them, and would not know what is wrong."""
    found: list[tuple[Path, Any]] = []
    for file in (directory / "chat_template.jinja", *sorted(directory.glob("additional_chat_templates/*.jinja"))):
        if file.exists():
            _require_content(file)
            found.append((file, file.read_bytes()))
    for file in (directory / name for name in _TEMPLATED):
        named = read_object(file).get("chat_template") if file.exists() else None
        several = [*named.values()] if isinstance(named, dict) else named if isinstance(named, list) else [named]
        found += [
            (file, each.get("template") if isinstance(each, dict) else each) for each in several if named is not None
        ]
    for file, template in found:
        if wrong := wrong_template(template):
            yield f"{file} is damaged (its chat template is no Jinja: {wrong}); {_AGAIN}"


def wrong_template(template: Any) -> str:
    """Return the reason why a chat template cannot be used; empty if it can."""
    from jinja2 import Environment, TemplateSyntaxError, nodes  # here, because it takes a while to import
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    class Generation(Extension):
        """The tag with which transformers marks what a model has said."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        text = template.decode() if isinstance(template, bytes) else template
        if not isinstance(text, str):
            return f"it is {quoted(template)}"
        Environment(extensions=[Generation, loopcontrols]).parse(text)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except (ValueError, RecursionError) as error:  # no Unicode, a number of thousands of digits
        return str(error)
    return ""


def _vocabulary(file: Path, rows: Any) -> Iterator[str]:
    """Tokenizers without tokens, or with tokens beyond the rows of the embedding; added ones may be of no use there."""
    tree = read_object(file)
    model, added = tree.get("model"), tree.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list) or not vocabulary:
        yield f"{file} is damaged (it has no vocabulary); {_AGAIN}"
        return
    unused = (
        {str(token.get("content")) for token in added if isinstance(token, dict)} if isinstance(added, list) else set()
    )
    ids = vocabulary.items() if isinstance(vocabulary, dict) else [(None, len(vocabulary) - 1)]
    last = max((number for token, number in ids if isinstance(number, int) and token not in unused), default=0)
    if isinstance(rows, int) and last >= rows:
        yield (
            f"{file} is of another model (its tokens go up to {last}, and vocab_size in config.json is {rows}); "
            "copy that of the model"
        )


def _processor(directory: Path, config: dict[str, Any], whole: bool) -> Iterator[str]:
    tower = config.get("vision_config")
    if not isinstance(tower, dict):
        return
    if (directory / _PROCESSOR).exists():
        file, settings = directory / _PROCESSOR, read_object(directory / _PROCESSOR)
    elif (directory / _PROCESSORS).exists():
        file, settings = directory / _PROCESSORS, read_object(directory / _PROCESSORS).get("image_processor") or {}
        if not isinstance(settings, dict):
            yield f"{file} is damaged (image_processor={quoted(settings)} is no object); {_AGAIN}"
            return
    else:
        if whole:
            yield f"{directory} holds no image processor (no {_PROCESSOR}); copy that of the model into it"
        return
    for name, theirs in _SAME_SIZES.items():
        processed, taken = settings.get(name), tower.get(theirs)
        if isinstance(processed, int) and isinstance(taken, int) and processed != taken:
            yield (
                f"{file} is of another model ({name}={processed!r}, and config.json has {theirs}={taken!r} in "
                "vision_config); "
                "copy that of the model"
            )
