"""The studies' tests share the fixtures of `tests/`. All are slow: they guard what only the project's authors run."""

from pathlib import Path

import pytest

from tests.conftest import *  # noqa: F403


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
