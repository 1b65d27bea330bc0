"""Mark cases that `make test` leaves out: further ones of a test that takes long, of which it runs others."""

from __future__ import annotations

from typing import Any

import pytest


def extended(*values: Any) -> Any:
    """Return a case of a parametrized test that `make test-extended` runs."""
    return pytest.param(*values, marks=pytest.mark.extended)
