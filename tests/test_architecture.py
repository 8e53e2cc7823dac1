"""The house keeps its shape: rooms import one way, torch stays in its rooms, what we touch inside others is known.

Invariant: Rooms import one way, and modules in no circle; torch stays in its rooms; what we touch inside transformers
and inside vLLM is listed. Also: `tests/with_vllm/test_inside_vllm.py`.
"""

import ast
import operator
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import transformers

from tests.preloaded import REAL_PYTHON
from tinsmith.models.base import BaseModel

PACKAGE = Path(__file__).parent.parent / "tinsmith"
RL = Path(__file__).parent.parent / "rl" / "tinsmith_rl"
"""The client, a package of its own: it talks to any Tinker server through the SDK and imports none of ours."""

STARTS_PYTHON = re.compile(
    r'.*(?:"-m", "tinsmith|"-c"|get_context\(|ProcessPoolExecutor\(|multiprocessing\.Process\().*'
)
IN_ANY_DIRECTORY = (
    'sys.executable, "-P", "-m"',
    "vllm_python or sys.executable",
    '{"PYTHONSAFEPATH": "1"}',
    "_set_safe_path",
)
"""How programs start that import nothing of the working directory; vLLM's and multiprocessing's by environment."""

RANKS = {
    "errors": 0,
    "logs": 1,
    "observing": 1,
    "config_values": 1,
    "config": 2,
    "http_client": 2,
    "wire": 3,
    "chat": 4,
    "store": 4,
    "protocol": 5,
    "kernels": 6,
    "models": 7,
    "memory": 8,
    "rendering": 8,
    "training": 9,
    "sampling": 10,
    "worker": 11,
    "engine": 11,
    "console": 6,
    "server": 12,
    "commands": 14,
    "cli": 15,
}
"""A room imports rooms of a lower rank only, or itself."""

MAY_IMPORT_TORCH = {"kernels", "models", "memory", "rendering", "training", "sampling", "worker"}

ENGINE_MAY_IMPORT = {"engine", "errors", "logs", "observing", "config", "wire", "store", "protocol"}
"""The engine orders what workers do, and talks to them with messages only: it outlives them."""

TRANSFORMERS_NAMES = {
    "AttentionInterface",
    "AutoConfig",
    "AutoImageProcessor",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoTokenizer",
    "GenerationConfig",
    "GptOssConfig",
    "GptOssForCausalLM",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "PreTrainedTokenizerFast",
    "Qwen2Tokenizer",
    "Qwen3Config",
    "Qwen3ForCausalLM",
    "Qwen3MoeConfig",
    "Qwen3MoeForCausalLM",
    "Qwen3VLConfig",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeConfig",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5Config",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeConfig",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5Tokenizer",
    "logging",
    "models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
    "models.qwen2_vl.image_processing_pil_qwen2_vl.smart_resize",
}
"""All that the package imports of transformers: a new version is checked against this list first."""

INSIDE_A_MODEL = [
    "config.get_text_config",
    "config.image_token_id",
    "config.vision_config.spatial_merge_size",
    "generation_config.eos_token_id",
    "get_output_embeddings",
    "model.get_image_features",
    "model.language_model.get_input_embeddings",
    "model.visual.blocks",
    "model.visual.deepstack_merger_list",
    "model.visual.deepstack_visual_indexes",
    "model.visual.merger",
    "model.visual.patch_embed.proj.weight",
    "model.visual.pos_embed.weight",
    "model.visual.rotary_pos_emb.attention_scaling",
    "model.visual.rotary_pos_emb.inv_freq",
    "model.visual.spatial_merge_size",
    "set_attn_implementation",
]
"""What models/base.py, models/vision_tower.py and the self-check use of a loaded image-text model."""


def modules(package: Path = PACKAGE) -> list[Path]:
    return [path for path in sorted(package.rglob("*.py")) if not path.name.endswith("_pb2.py")]


def room_of(module: str) -> str:
    """`tinsmith.wire.sample` -> `wire`."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> list[tuple[str, list[str]]]:
    """(module, names) of every import statement, also those inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, [alias.name for alias in node.names]))
        elif isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
    return found


def may_import(room: str, module: str) -> bool:
    """Whether modules of the room may import this one."""
    package, other = module.split(".", maxsplit=1)[0], room_of(module)
    if module.startswith("tinsmith.") and other != room:
        allowed = {"engine": ENGINE_MAY_IMPORT}.get(room, RANKS.keys())
        return RANKS[other] < RANKS[room] and other in allowed
    if package in ("torch", "transformers", "tokenizers"):
        return room in MAY_IMPORT_TORCH or (room == "chat" and package == "tokenizers")
    return package != "tinker" and (package != "tinsmith_rl" or room == "cli")


def test_rooms_import_one_way() -> None:
    found = [(path.relative_to(PACKAGE).with_suffix(""), module) for path in modules() for module, _ in imports(path)]
    assert len(found) > 1000
    assert [f"{path} imports {module}" for path, module in found if not may_import(path.parts[0], module)] == []


def test_the_client_imports_what_its_project_installs_and_nothing_of_the_server() -> None:
    """It uses transformers for tokenizers, chat templates and image sizes only, which need no torch.

    The cookbook needs one.
    """
    project = tomllib.loads((RL.parent / "pyproject.toml").read_text())["project"]
    stated = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = {re.split(r"[><=]", requirement)[0] for requirement in stated}
    installed = {{"pillow": "PIL", "pyyaml": "yaml", "scikit-learn": "sklearn"}.get(name, name) for name in names}
    imported = {module.split(".")[0] for path in modules(RL) for module, _ in imports(path)}
    assert imported - {*sys.stdlib_module_names, "tinsmith_rl", "tinker_cookbook"} == installed


def test_the_client_renders_conversations_with_the_servers_file_which_imports_neither() -> None:
    shared = PACKAGE / "chat" / "format.py"
    assert (RL / "format.py").resolve() == shared
    assert not [module for module, _ in imports(shared) if module.startswith("tinsmith")]
    rendering = [path for path in modules() + modules(RL) if "apply_chat_template(" in path.read_text()]
    assert rendering == []


@pytest.mark.parametrize("package", [PACKAGE, RL], ids=lambda package: package.name)
def test_modules_import_each_other_in_no_circle(package: Path) -> None:
    """Imports inside functions count too, those for type checkers only as well: a reader follows them all."""
    paths = {".".join(path.relative_to(package).with_suffix("").parts): path for path in modules(package)}
    imported = {module: imported_modules(path) & paths.keys() - {module} for module, path in paths.items()}
    reached = {module: _reached(module, imported) for module in paths}
    circles = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in paths
        if module in reached[module]
    }
    assert circles == set()


def imported_modules(path: Path) -> set[str]:
    """All modules that a module may have imported: `from a import b` names `a`, and `a.b` if that is one."""
    names = {name for module, names in imports(path) for name in [module, *(f"{module}.{name}" for name in names)]}
    return {name.partition(".")[2] for name in names if name.startswith(("tinsmith.", "tinsmith_rl."))}


def _reached(start: str, imported: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = imported[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_workers_open_no_database() -> None:
    """They may run on other hosts than the server, and SQLite in WAL mode is damaged by processes of several hosts."""
    for path in (PACKAGE / "worker").glob("*.py"):
        for module, names in imports(path):
            opens = {
                "Store",
                "RecordedSequences",
                "open_database",
                "sqlite3",
                "sqlalchemy",
                "tinsmith.store.recorded_sequences",
            }
            assert not opens & {module, *names}, f"{path.name} imports {opens & {module, *names}} of {module}"
    code = "import sys, tinsmith.protocol.questions; assert 'sqlalchemy' not in sys.modules"
    subprocess.run([REAL_PYTHON, "-c", code], check=True)


def test_what_runs_inside_vllm_needs_nothing_else_of_the_package() -> None:
    """vLLM's environment has none of our dependencies but those that vLLM has too."""
    allowed = {*sys.stdlib_module_names, "numpy", "safetensors", "torch", "vllm"}
    for path in (PACKAGE / "sampling" / "inside_vllm").glob("*.py"):
        for module, _ in imports(path):
            assert module.startswith("tinsmith.sampling.inside_vllm") or module.split(".")[0] in allowed, (
                f"{path.name} imports {module}"
            )
    for package in (PACKAGE, PACKAGE / "sampling"):
        assert not imports(package / "__init__.py")


def test_what_we_touch_of_transformers_is_listed_and_there(vision_base: BaseModel) -> None:
    imported = {
        f"{module}.{name}" for path in modules() + modules(RL) for module, names in imports(path) for name in names
    }
    used = {name.removeprefix("transformers.") for name in imported if name.startswith("transformers.")}
    assert used == TRANSFORMERS_NAMES
    for dotted in used:
        operator.attrgetter(dotted)(transformers)
    for dotted in INSIDE_A_MODEL:
        operator.attrgetter(dotted)(vision_base.network)


def test_the_http_side_and_the_engine_never_load_torch() -> None:
    modules = ["cli", "server.main", "server.http_side", "engine.loop", "engine.__main__", "protocol.link"]
    modules = [*(f"tinsmith.{module}" for module in (*modules, "wire.sample", "store.store")), "tinsmith_rl.__main__"]
    code = f"""
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    assert not {{"torch", "transformers"}} & set(sys.modules), module
"""
    subprocess.run([REAL_PYTHON, "-c", code], check=True)


def test_no_program_imports_from_the_working_directory() -> None:
    files = [file for directory in (PACKAGE, RL, PACKAGE.parent / "examples") for file in directory.rglob("*.py")]
    started = [line for file in files for line in STARTS_PYTHON.findall(file.read_text())]
    assert len(started) == 13
    assert [line for line in started if not any(safe in line for safe in IN_ANY_DIRECTORY)] == []


def test_no_context_of_a_generator_suppresses_an_error() -> None:
    """From Python 3.12 on it keeps the error and so a failed pass's tensors; `errors.Reported` suppresses instead."""
    suppressing = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                "contextmanager" in ast.unparse(each) for each in node.decorator_list
            ):
                handlers = [each for part in ast.walk(node) if isinstance(part, ast.Try) for each in part.handlers]
                suppressing += [
                    f"{path}:{each.lineno}" for each in handlers if not isinstance(each.body[-1], ast.Raise)
                ]
    assert suppressing == []
