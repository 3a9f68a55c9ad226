"""Typed constructors: the one home of a knob is a parameter that checks its own type."""

from pydantic import ConfigDict, validate_call

checked = validate_call(config=ConfigDict(arbitrary_types_allowed=True, extra="forbid"))
"""Decorates an ``__init__`` that Hydra may call: int -> float, list -> tuple, str -> Path; all else is an error."""
