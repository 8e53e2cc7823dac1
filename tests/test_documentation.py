"""What a machine can check of the documentation in the code: that it is there where a reader needs it."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "tinsmith"
SHORT = 5
"""Lines of a method's body up to which its name and types may say enough."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Path below the repository and syntax tree of every module that is not generated."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.name.endswith("_pb2.py"):
            yield str(path.relative_to(PACKAGE.parent)), ast.parse(path.read_text(encoding="utf-8"))


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Those of the modules, not the ones inside functions."""
    for path, module in modules():
        yield from ((path, node) for node in module.body if isinstance(node, ast.ClassDef))


def methods(class_: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in class_.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def is_protocol(class_: ast.ClassDef) -> bool:
    return any("Protocol" in ast.unparse(base) for base in class_.bases)


def test_a_public_method_without_docstring_is_short_or_declared_by_a_protocol() -> None:
    """Ruff's D102 knows neither exception, so it is off."""
    declared = {method.name for _, class_ in classes() if is_protocol(class_) for method in methods(class_)}
    undocumented = [
        f"{path}:{method.lineno} {class_.name}.{method.name}"
        for path, class_ in classes()
        if not class_.name.startswith("_")
        for method in methods(class_)
        if not method.name.startswith("_") and ast.get_docstring(method) is None
        if is_protocol(class_) or (method.name not in declared and lines_of(method) > SHORT)
    ]
    assert not undocumented, "\n".join(undocumented)


def lines_of(method: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (method.body[-1].end_lineno or 0) - method.body[0].lineno + 1
