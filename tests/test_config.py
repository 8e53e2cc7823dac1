"""The configuration tree: every knob once, defaults then file then command line, and each wrong value refused with what is wrong."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tinsmith.config import Config, base_model_sources, from_tree, knobs, load, to_tree
from tinsmith.errors import ConfigError


def yaml_file(directory: Path, text: str) -> Path:
    file = directory / "tinsmith.yaml"
    file.write_text(text)
    return file


def test_every_knob_has_help_and_a_name_of_its_own() -> None:
    leaves = list(knobs())
    assert [leaf.path for leaf in leaves if not leaf.help] == []
    assert [name for name, count in Counter(leaf.name for leaf in leaves).items() if count > 1] == []
    assert len(leaves) > 20


@pytest.mark.parametrize("suffix", ["_s", "_mib", "_gib"])
def test_a_unit_in_a_name_is_the_unit_of_the_knob(suffix: str) -> None:
    unit = {"_s": "seconds", "_mib": "MiB", "_gib": "GiB"}[suffix]
    assert {leaf.unit for leaf in knobs() if leaf.name.endswith(suffix)} == {unit}


def test_defaults_pass_their_own_checks() -> None:
    assert load(options={leaf.name: leaf.default for leaf in knobs()}) == Config()


def test_options_override_the_file_which_overrides_the_defaults(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "data_dir: here\nserver: {port: 9000, host: 0.0.0.0}\nsampling:\n  kv_cache_gib: 1\n")
    config = load(file, {"port": 9001, "base_models": ["a=b/c"]})
    assert (config.data_dir, config.server.host, config.server.port) == ("here", "0.0.0.0", 9001)
    assert (config.sampling.kv_cache_gib, config.base_models) == (1.0, ["a=b/c"])
    assert config.training == Config().training


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load(yaml_file(tmp_path, "# nothing yet\n")) == Config()


def test_the_tree_survives_the_way_to_the_engine() -> None:
    config = load(options={"base_models": ["a", "b"], "kv_cache_gib": 0.5, "sampler": "none"})
    assert from_tree(to_tree(config)) == config


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prot: 1\n", "unknown key 'prot'; known here: base_models, data_dir, checkpoint_root, log_level, server"),
        ("server: {prot: 1}\n", "server: unknown key 'prot'; known here: host, port"),
        ("server: 8000\n", "server is a section and must hold keys, got 8000"),
        ("- 1\n", "must hold sections such as 'server:', not a list"),
        ("server: {port: true}\n", "server: port must be a whole number, got True"),
        ("server: {port: eight}\n", "server: port must be a whole number, got 'eight'"),
        ("server: {port: 1.5}\n", "server: port must be a whole number, got 1.5"),
        ("server: {port: 2KiB}\n", "server: port must be a whole number, got '2KiB'"),
        ("server: {host: 3}\n", "server: host must be a text, got 3"),
        ("server: {long_poll_s: 5m}\n", "server: long_poll_s must be a number of seconds, got '5m'"),
        ("server: {long_poll_s: 1.2.3}\n", "server: long_poll_s must be a number of seconds, got '1.2.3'"),
        ("sampling: {kv_cache_gib: 2GB}\n", "sampling: kv_cache_gib must be a number of GiB, such as 2, 2GiB or 500MiB, got '2GB'"),
        (
            "server: {max_body_mib: 100KiB}\n",
            "server: max_body_mib must be a whole number of MiB, such as 2, 2MiB or 500MiB, got '100KiB'",
        ),
        ("models: {device: gpu}\n", "models: device='gpu' must be one of auto, cpu, cuda, cuda:N with a number N"),
        ("models: {device: 'cuda:'}\n", "models: device='cuda:' must be one of auto, cpu, cuda, cuda:N with a number N"),
        ("server: {port: 65536}\n", "port=65536 must lie between 0 and 65535"),
        ("training: {tokens_per_pass: 0}\n", "tokens_per_pass=0 must lie between 1 and any number"),
        ("sampling: {kv_cache_gib: .nan}\n", "kv_cache_gib=nan must lie between"),
        ("models: {dtype: float16}\n", "dtype='float16' must be one of auto, float32, bfloat16"),
        ("base_models: tiny\n", "base_models must be a list of texts, got 'tiny'"),
        ("server: {port: 1\n", "cannot read the configuration file"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(yaml_file(tmp_path, text))
    assert complaint in str(raised.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"server: {port: 9000\n"])
def test_what_is_no_yaml_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tinsmith.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load(file)
    message = str(raised.value)
    assert message.startswith(f"cannot read the configuration file {file}: ")
    assert message.endswith("; it must be YAML in UTF-8")
    assert "\n" not in message


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*nowhere\.yaml"):
        load(tmp_path / "nowhere.yaml")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown option 'prot'; the options are base_models, data_dir, checkpoint_root, log_level, host"):
        load(options={"prot": 1})


def test_base_models_get_a_name_and_a_source(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = load(options={"base_models": [f"mine={tmp_path}", str(tmp_path), "Qwen/Qwen3-4B", "small=org/model-1.5b"]})
    assert base_model_sources(config) == {
        "mine": str(tmp_path),
        str(tmp_path): str(tmp_path),
        "Qwen/Qwen3-4B": "Qwen/Qwen3-4B",
        "small": "org/model-1.5b",
    }


def test_a_directory_whose_name_has_an_equals_sign_is_a_directory(tmp_path: Path) -> None:
    directory = tmp_path / "lr=1"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    assert base_model_sources(load(options={"base_models": [str(directory)]})) == {str(directory): str(directory)}


@pytest.mark.parametrize(
    ("specs", "complaint"),
    [
        ([], "no base model to serve; give at least one --base-model"),
        (["a=org/x", "a=org/y"], "two are named 'a'"),
        (["a:b=org/x"], "name without blanks and colons"),
        (["=org/x"], "name without blanks and colons"),
        (["a=/no/such/place"], "there is no directory '/no/such/place'"),
        (["./models"], "there is no directory './models'"),
        (["a/b/c"], "a Hub id looks like ORGANISATION/MODEL"),
    ],
)
def test_base_models_that_cannot_be_are_refused(specs: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        base_model_sources(load(options={"base_models": specs}))
    assert complaint in str(raised.value)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no model"):
        base_model_sources(load(options={"base_models": [f"a={tmp_path}"]}))


@pytest.mark.parametrize(
    ("name", "text", "number"),
    [
        ("kv_cache_gib", "2", 2.0),
        ("kv_cache_gib", "2.5", 2.5),
        ("kv_cache_gib", "2GiB", 2.0),
        ("kv_cache_gib", "512 MiB", 0.5),
        ("kv_cache_gib", "1tib", 1024.0),
        ("max_body_mib", "1.5GiB", 1536),
        ("max_body_mib", "64", 64),
        ("port", "8000", 8000),
        ("long_poll_s", "2.5", 2.5),
        ("ended_model_ttl_s", "1e5", 100000.0),
    ],
)
def test_a_text_is_read_as_a_number_and_a_size_may_name_its_unit(name: str, text: str, number: float) -> None:
    config = load(options={name: text})
    section = next(leaf.path[0] for leaf in knobs() if leaf.name == name)
    read = getattr(getattr(config, section), name)
    assert (read, type(read)) == (number, type(number))


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:11"])
def test_devices_are_taken(device: str) -> None:
    assert load(options={"device": device}).models.device == device


@pytest.mark.parametrize("value", [1, 2.5, 40])
def test_a_whole_number_is_taken_for_a_float(value: Any) -> None:
    seconds = load(options={"long_poll_s": value}).server.long_poll_s
    assert (seconds, type(seconds)) == (float(value), float)
