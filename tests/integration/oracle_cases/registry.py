"""The cases by name."""

from __future__ import annotations

import functools
import typing

CASES: dict[str, typing.Callable] = {}


def case(function=None, *, needs=None):
    """Registers a case; `needs` names a module without which it is skipped."""
    if function is None:
        return functools.partial(case, needs=needs)
    assert function.__name__ not in CASES
    function.needs = needs
    CASES[function.__name__] = function
    return function
