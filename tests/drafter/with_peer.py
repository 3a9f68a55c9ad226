"""Speculators' classes for the tests that compare with them: ``peer`` is None where it is not installed."""

import warnings
from typing import Any

import pytest

try:
    with (
        warnings.catch_warnings()
    ):  # importing them compiles a function, and torch's compiler uses deprecated torch.jit
        warnings.simplefilter("ignore")
        import speculators_peer as peer
except ImportError:
    peer: Any = None

needs_peer = [
    pytest.mark.peer,
    pytest.mark.skipif(peer is None, reason="speculators is not installed: make test-services"),
]
