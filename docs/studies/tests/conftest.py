"""The studies' tests share the fixtures of `tests/`."""

from tests.conftest import fresh, launches, quiet, schema_at_hand  # noqa: F401
