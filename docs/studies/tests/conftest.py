"""The studies' tests share the fixtures of `tests/`."""

from tests.conftest import *  # noqa: F403
