"""The configuration tree: every setting once, the order in which sources override each other, and wrong values refused with a reason."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tinsmith.config import Config, base_model_sources, from_tree, load, settings, to_tree
from tinsmith.errors import ConfigError


def yaml_file(directory: Path, text: str) -> Path:
    file = directory / "tinsmith.yaml"
    file.write_text(text)
    return file


def test_every_setting_has_help_and_a_name_of_its_own() -> None:
    found = list(settings())
    assert [each.path for each in found if not each.help] == []
    assert [name for name, count in Counter(each.name for each in found).items() if count > 1] == []
    assert len(found) > 20


@pytest.mark.parametrize("suffix", ["_s", "_mib", "_gib"])
def test_a_unit_in_a_name_is_the_unit_of_the_setting(suffix: str) -> None:
    unit = {"_s": "seconds", "_mib": "MiB", "_gib": "GiB"}[suffix]
    assert {each.unit for each in settings() if each.name.endswith(suffix)} == {unit}


def test_defaults_pass_their_own_checks() -> None:
    assert load(options={each.name: each.default for each in settings()}) == Config()


def test_options_override_the_file_which_overrides_the_defaults(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "data_dir: here\nserver: {port: 9000, host: 0.0.0.0}\nsampling:\n  kv_cache_gib: 1\n")
    config = load(file, {"port": 9001, "base_models": ["a=b/c"]})
    assert (config.data_dir, config.server.host, config.server.port) == ("here", "0.0.0.0", 9001)
    assert (config.sampling.kv_cache_gib, config.base_models) == (1.0, ["a=b/c"])
    assert config.training == Config().training


def test_environment_overrides_the_file_and_the_command_line_overrides_both(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "data_dir: from-file\nserver: {port: 1, host: from-file, max_body_mib: 2}\n")
    environment = {"TINSMITH_PORT": "2", "TINSMITH_MAX_BODY_MIB": "1.5GiB", "TINSMITH_KV_CACHE_GIB": "", "HOME": "/root"}
    config = load(file, {"port": "3"}, environment)
    assert (config.data_dir, config.server.host, config.server.max_body_mib, config.server.port) == ("from-file", "from-file", 1536, 3)
    assert config.sampling == Config().sampling


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tiny=/models/tiny Qwen/Qwen3-4B", ["tiny=/models/tiny", "Qwen/Qwen3-4B"]),
        ("'tiny=/my models/tiny'", ["tiny=/my models/tiny"]),
    ],
)
def test_a_variable_of_a_list_holds_words_as_in_a_shell(text: str, words: list[str]) -> None:
    assert load(environment={"TINSMITH_BASE_MODELS": text}).base_models == words


def test_every_setting_has_a_variable() -> None:
    """The defaults, given as variables, are the defaults."""
    texts = {each.variable: " ".join(each.default) if isinstance(each.default, list) else str(each.default) for each in settings()}
    assert load(environment=texts) == Config()
    assert texts["TINSMITH_SNAPSHOT_DISK_GIB"] == "32.0"


@pytest.mark.parametrize(
    ("variable", "text", "complaint"),
    [
        ("TINSMITH_PORT", "70000", "environment: TINSMITH_PORT='70000' must be a whole number from 0 to 65535"),
        ("TINSMITH_SAMPLER", "vlm", "environment: TINSMITH_SAMPLER='vlm' must be one of local, vllm, none"),
        ("TINSMITH_PROT", "1", "environment: unknown variable TINSMITH_PROT; did you mean TINSMITH_PORT?"),
        ("TINSMITH_BASE_MODEL", "a", "environment: unknown variable TINSMITH_BASE_MODEL; did you mean TINSMITH_BASE_MODELS?"),
        (
            "TINSMITH_SERVICE_HOST",
            "a",
            "environment: unknown variable TINSMITH_SERVICE_HOST; unset it, or name it after a setting, such as",
        ),
        (
            "TINSMITH_VLLM_ARGS",
            "--a='b",
            'environment: TINSMITH_VLLM_ARGS="--a=\'b" must be texts separated by spaces and quoted as in a shell',
        ),
    ],
)
def test_a_wrong_variable_is_refused_by_name_and_value(variable: str, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(environment={variable: text})
    assert str(raised.value).startswith(complaint)


def test_variables_of_the_tests_and_the_file_are_no_settings() -> None:
    assert load(environment={"TINSMITH_TEST_DEVICE": "cuda", "TINSMITH_CONFIG": "elsewhere.yaml"}) == Config()


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load(yaml_file(tmp_path, "# nothing yet\n")) == Config()


def test_the_tree_survives_the_way_to_the_engine() -> None:
    config = load(options={"base_models": ["a", "b"], "kv_cache_gib": 0.5, "sampler": "none"})
    assert from_tree(to_tree(config)) == config


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prot: 1\n", "unknown key 'prot'; did you mean 'server.port'?"),
        ("server: {prot: 1}\n", "unknown key 'server.prot'; did you mean 'server.port'?"),
        ("port: 1\n", "unknown key 'port'; did you mean 'server.port'?"),
        ("max_images: 1\n", "unknown key 'max_images'; did you mean 'requests.max_images'?"),
        ("1: 1\n", "unknown key '1'; known here: base_models, data_dir, checkpoint_root, log_level, server"),
        ("server: 8000\n", "server=8000 must be a section, with keys and values below it"),
        ("- 1\n", "must hold sections such as 'server:', not a list"),
        ("server: {port: true}\n", "server.port=True must be a whole number from 0 to 65535"),
        ("server: {port: eight}\n", "server.port='eight' must be a whole number from 0 to 65535"),
        ("server: {port: 1.5}\n", "server.port=1.5 must be a whole number from 0 to 65535"),
        ("server: {port: 2KiB}\n", "server.port='2KiB' must be a whole number from 0 to 65535"),
        ("server: {host: 3}\n", "server.host=3 must be a text"),
        ("server: {long_poll_s: 5m}\n", "server.long_poll_s='5m' must be a number of seconds from 0.1 to 40"),
        ("server: {long_poll_s: 1.2.3}\n", "server.long_poll_s='1.2.3' must be a number of seconds from 0.1 to 40"),
        (
            "sampling: {kv_cache_gib: 2GB}\n",
            "sampling.kv_cache_gib='2GB' must be a number of GiB of at least 0, such as 2, 2GiB or 500MiB",
        ),
        (
            "server: {max_body_mib: 100KiB}\n",
            "server.max_body_mib='100KiB' must be a whole number of MiB from 1 to 4096, such as 2, 2MiB or 500MiB",
        ),
        ("models: {device: gpu}\n", "models.device='gpu' must be one of auto, cpu, cuda, cuda:N with a number N"),
        ("models: {device: 'cuda:'}\n", "models.device='cuda:' must be one of auto, cpu, cuda, cuda:N with a number N"),
        ("server: {port: 65536}\n", "server.port=65536 must be a whole number from 0 to 65535"),
        ("training: {tokens_per_pass: 0}\n", "training.tokens_per_pass=0 must be a whole number of tokens of at least 1"),
        ("sampling: {kv_cache_gib: .nan}\n", "sampling.kv_cache_gib=nan must be a number of GiB of at least 0"),
        ("models: {dtype: float16}\n", "models.dtype='float16' must be one of auto, float32, bfloat16"),
        ("base_models: tiny\n", "base_models='tiny' must be a list of texts"),
        ("server: {port: 1\n", "cannot read the configuration file"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(yaml_file(tmp_path, text))
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [("server: {port: 1}\nsampling: {}\nserver: {host: x}\n", "server", (3, 1)), ("server:\n  port: 1\n  port: 2\n", "port", (3, 2))],
)
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, text: str, key: str, lines: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=f"line {lines[0]} has the key '{key}' of line {lines[1]} again"):
        load(yaml_file(tmp_path, text))


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
        (["a=org/x", "a=org/y"], "two have the name 'a'"),
        (["a:b=org/x"], "name without spaces and colons"),
        (["=org/x"], "name without spaces and colons"),
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
    section = next(each.path[0] for each in settings() if each.name == name)
    read = getattr(getattr(config, section), name)
    assert (read, type(read)) == (number, type(number))


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:11"])
def test_devices_are_taken(device: str) -> None:
    assert load(options={"device": device}).models.device == device


@pytest.mark.parametrize("value", [1, 2.5, 40])
def test_a_whole_number_is_taken_for_a_float(value: Any) -> None:
    seconds = load(options={"long_poll_s": value}).server.long_poll_s
    assert (seconds, type(seconds)) == (float(value), float)
