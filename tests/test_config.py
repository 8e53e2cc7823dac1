"""The configuration tree: every setting once, the order in which sources override each other, and wrong values refused
with a reason.

Invariant: Command line, environment, file and default override each other in this order; what names no setting is
refused. Also: `tests/test_cli.py`.
"""

from pathlib import Path
from typing import Any

import pytest

from tinsmith.config import Config, base_model_sources, from_tree, load, settings, to_tree
from tinsmith.config_values import read_yaml
from tinsmith.errors import ConfigError


def yaml_file(directory: Path, text: str) -> Path:
    file = directory / "tinsmith.yaml"
    file.write_text(text)
    return file


def test_every_setting_has_a_name_of_its_own_with_its_unit() -> None:
    names = [each.name for each in settings()]
    assert len(names) == len(set(names)) > 20
    for suffix, unit in {"_s": "seconds", "_mib": "MiB", "_gib": "GiB"}.items():
        assert {each.info.unit for each in settings() if each.name.endswith(suffix)} == {unit}


def test_options_override_the_environment_which_overrides_the_file_which_overrides_the_defaults(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "data_dir: from-file\nserver: {port: 1, host: from-file, max_body_mib: 2}\n")
    environment = {
        "TINSMITH_PORT": "2",
        "TINSMITH_MAX_BODY_MIB": "1.5GiB",
        "TINSMITH_KV_CACHE_GIB": "",
        "HOME": "/root",
    }
    config = load(file, {"port": "3", "base_models": ["a=b/c"]}, environment)
    assert (config.data_dir, config.server.host, config.server.max_body_mib, config.server.port) == (
        "from-file",
        "from-file",
        1536,
        3,
    )
    assert config.base_models == ["a=b/c"]
    assert (config.sampling, config.training) == (Config().sampling, Config().training)
    assert load(yaml_file(tmp_path, "# nothing yet\n")) == Config()


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
    texts = {
        each.variable: " ".join(each.default) if isinstance(each.default, list) else str(each.default)
        for each in settings()
    }
    assert load(environment=texts) == Config()
    assert texts["TINSMITH_SNAPSHOT_DISK_GIB"] == "32.0"


@pytest.mark.parametrize(
    ("variable", "text", "complaint"),
    [
        ("TINSMITH_PORT", "70000", "environment: TINSMITH_PORT='70000' must be a whole number from 0 to 65535"),
        ("TINSMITH_SAMPLER", "vlm", "environment: TINSMITH_SAMPLER='vlm' must be one of local, vllm, none"),
        ("TINSMITH_PROT", "1", "environment: unknown variable TINSMITH_PROT; did you mean TINSMITH_PORT?"),
        (
            "TINSMITH_BASE_MODEL",
            "a",
            "environment: unknown variable TINSMITH_BASE_MODEL; did you mean TINSMITH_BASE_MODELS?",
        ),
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
        (
            "1: 1\n",
            "unknown key '1'; known here: base_models, data_dir, database_url, checkpoint_root, log_level, log_format",
        ),
        ("server: 8000\n", "server=8000 must be a section, with keys and values below it"),
        ("- 1\n", "must hold sections such as 'server:', not a list"),
        ("server: {port: true}\n", "server.port=True must be a whole number from 0 to 65535"),
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
        (
            "training: {tokens_per_pass: 0}\n",
            "training.tokens_per_pass=0 must be a whole number of tokens of at least 1",
        ),
        ("sampling: {kv_cache_gib: .nan}\n", "sampling.kv_cache_gib=nan must be a number of GiB of at least 0"),
        ("models: {dtype: float16}\n", "models.dtype='float16' must be one of auto, float32, bfloat16"),
        ("base_models: tiny\n", "base_models='tiny' must be a list of texts"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(yaml_file(tmp_path, text))
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("server: {port: 1}\nsampling: {}\nserver: {host: x}\n", "server", (3, 1)),
        ("server:\n  port: 1\n  port: 2\n", "port", (3, 2)),
        ("server: {port: 1, port: 2}\n", "port", (1, 1)),
    ],
)
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, text: str, key: str, lines: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=f"line {lines[0]} has the key '{key}' of line {lines[1]} again"):
        load(yaml_file(tmp_path, text))


def test_a_merged_key_may_be_given_again(tmp_path: Path) -> None:
    """Here in a section that PyYAML merges into another before it reads it."""
    text = "a: {b: {c: &c {<<: {port: 1, host: x},\n  port: 2}}}\nserver: {<<: *c, host: y}\n"
    assert read_yaml(yaml_file(tmp_path, text))["server"] == {"port": 2, "host": "y"}


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"server: {port: 9000\n"])
def test_what_is_no_yaml_is_refused_in_one_line(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "tinsmith.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load(file)
    message = str(raised.value)
    assert message.startswith(f"cannot read the configuration file {file}: ")
    assert content is None or message.endswith("; it must be YAML in UTF-8")
    assert "\n" not in message


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="unknown option 'prot'; the options are base_models, data_dir, database_url, checkpoint_root, log_level, "
        "log_format, ",
    ):
        load(options={"prot": 1})


def test_a_path_means_the_same_wherever_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` is replaced, as a shell does where it sees one. A path may contain an `=`, behind a name and without one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model = tmp_path / "lr=1e-4,bs=8" / "a model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    file = tmp_path / "file.yaml"
    file.write_text(
        "checkpoint_root: ~/saved\nmodels: {compile_cache: ~/compiled}\nbase_models: ['~/lr=1e-4,bs=8/a model']\n"
    )
    config = load(file, {"vllm_dir": "~/weights"}, {"TINSMITH_DATA_DIR": "~/data"})
    assert config.data_dir == f"{tmp_path}/data"
    assert config.checkpoint_root == f"{tmp_path}/saved"
    assert config.models.compile_cache == f"{tmp_path}/compiled"
    assert config.vllm.vllm_dir == f"{tmp_path}/weights"
    assert base_model_sources(config) == {str(model): str(model)}
    (tmp_path / "link").symlink_to(model)
    for spec in (f"m={model}", "m=~/lr=1e-4,bs=8/a model", f"m={model}/", "m=~/link", "m=~/link/"):
        assert base_model_sources(load(options={"base_models": [spec]})) == {"m": str(model)}


def test_base_models_get_a_name_and_a_source(tmp_path: Path) -> None:
    directory = tmp_path / "lr=1"
    directory.mkdir()
    for place in (tmp_path, directory):
        (place / "config.json").write_text("{}")
    config = load(
        options={"base_models": [f"mine={tmp_path}", str(directory), "Qwen/Qwen3-4B", "small=org/model-1.5b"]}
    )
    assert base_model_sources(config) == {
        "mine": str(tmp_path),
        str(directory): str(directory),
        "Qwen/Qwen3-4B": "Qwen/Qwen3-4B",
        "small": "org/model-1.5b",
    }


@pytest.mark.parametrize(
    ("specs", "complaint"),
    [
        ([], "no base model to serve; give at least one --base-model"),
        (["a=org/x", "a=org/y"], "two have the name 'a'"),
        (["a:b=org/x"], "name without spaces and colons"),
        (["=org/x"], "name without spaces and colons"),
        (["a=/no/such/place"], "there is no directory '/no/such/place'"),
        (["./models"], "there is no directory './models'"),
        (["a=/no/such=place"], "there is no directory '/no/such=place'"),
        (["/no/such=place"], "'/no/such=place': there is no directory '/no/such=place'"),
        (
            ["tiny=none"],
            (
                "there is no directory 'none', and a Hub id looks like ORGANISATION/MODEL; "
                "if it is the name of a served model"
            ),
        ),
        (["tiny="], "there is no directory ''"),
        (["a=DIRECTORY/file"], "DIRECTORY/file' is a file"),
        (["a/b/c"], "a Hub id looks like ORGANISATION/MODEL"),
        (["a=DIRECTORY"], "holds no model"),
    ],
)
def test_base_models_that_cannot_be_are_refused(specs: list[str], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as raised:
        base_model_sources(load(options={"base_models": [spec.replace("DIRECTORY", str(tmp_path)) for spec in specs]}))
    assert complaint.replace("DIRECTORY", str(tmp_path)) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("kv_cache_gib", "2.5", 2.5),
        ("kv_cache_gib", "2GiB", 2.0),
        ("kv_cache_gib", "512 MiB", 0.5),
        ("kv_cache_gib", "1tib", 1024.0),
        ("max_body_mib", "1.5GiB", 1536),
        ("port", "8000", 8000),
        ("long_poll_s", 1, 1.0),
        ("long_poll_s", 2.5, 2.5),
        ("ended_model_ttl_s", "1e5", 100000.0),
        ("device", "auto", "auto"),
        ("device", "cuda", "cuda"),
        ("device", "cuda:11", "cuda:11"),
    ],
)
def test_a_text_is_read_as_a_number_and_a_size_may_name_its_unit(name: str, given: Any, taken: Any) -> None:
    config = load(options={name: given})
    section = next(each.path[0] for each in settings() if each.name == name)
    read = getattr(getattr(config, section), name)
    assert (read, type(read)) == (taken, type(taken))
