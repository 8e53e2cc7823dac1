"""A process of the test run that crashes fails the run."""

from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Count a crash as a failed test, also between tests: pytest-xdist only tells of it, and what was left does not
    run."""
    if error:
        node.config.pluginmanager.get_plugin("session").testsfailed += 1
