"""Prints what Tinsmith promises and which tests guard it: `make invariants`, or `python -m tests.invariants`.

A promise is a paragraph of a test's docstring (of a module, a class or a function) that begins with "Invariant:". A
line that begins with "Also:" ends it, and names other files that guard the same promise.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Invariant:
    """A promise, the test whose docstring states it, and the other files that guard it, as paths from the repository's
    root."""

    promise: str
    test: str
    also: tuple[str, ...]


def invariants() -> Iterator[Invariant]:
    """Yield every promise, in the order of the files."""
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "Invariant:" in source else []:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = "" if isinstance(node, ast.Module) else f"::{node.name}"
                for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                    if paragraph.startswith("Invariant:"):
                        promise, _, also = " ".join(paragraph.removeprefix("Invariant:").split()).partition(" Also: ")
                        yield Invariant(
                            promise.strip(),
                            f"{path.relative_to(TESTS.parent)}{name}",
                            tuple(re.findall(r"`([^`]+)`", also)),
                        )


def main() -> None:
    """Print a table of Markdown."""
    print("| promise | tests |\n|---|---|")
    for invariant in invariants():
        print(f"| {invariant.promise} | {', '.join(f'`{test}`' for test in (invariant.test, *invariant.also))} |")


if __name__ == "__main__":
    main()
