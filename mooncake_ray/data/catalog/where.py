"""Conditions on the tags of rows, as data: they are sent to where the tags are."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_ray.errors import SchemaError

__all__ = ["Tag", "Where", "check_tags"]

Tag = str | int | float | bool | None

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, several: value in several,
    "not in": lambda value, several: value not in several,
}


@dataclass(frozen=True, slots=True)
class Where:
    """Holds for a row whose tags meet every condition. A row without one of the tags does not."""

    conditions: tuple[tuple[str, str, Any], ...] = ()
    """`(tag, operator, operand)`."""

    @classmethod
    def of(cls, wanted: Mapping[str, Any] | None) -> Where:
        """Reads `{"status": "done", "version": {">=": 3, "<": 9}, "group": {"in": ["a", "b"]}}`: a value to be equal to, or operators.

        Raises:
            ValueError: an operator is unknown, or what `in` is to look into is no list, tuple or set.
        """
        out = []
        for tag, condition in (wanted or {}).items():
            for name, operand in condition.items() if isinstance(condition, Mapping) else [("==", condition)]:
                if name not in _OPERATORS:
                    raise ValueError(f"the condition on tag {tag!r} has the operator {name!r}, expected one of {list(_OPERATORS)}")
                if name.endswith("in"):
                    if not isinstance(operand, list | tuple | set | frozenset):
                        raise ValueError(f"the condition {name!r} on tag {tag!r} takes a list, got {type(operand).__name__}")
                    operand = tuple(operand)
                out.append((tag, name, operand))
        return cls(tuple(out))

    def holds(self, tags: Mapping[str, Tag]) -> bool:
        """Whether the tags meet the conditions.

        Raises:
            SchemaError: a tag cannot be compared with what it is to be compared with, such as a text with a number.
        """
        for tag, name, operand in self.conditions:
            if tag not in tags:
                return False
            try:
                if not _OPERATORS[name](tags[tag], operand):
                    return False
            except TypeError as e:
                raise SchemaError(f"tag {tag!r} of a row is {tags[tag]!r}, which {name!r} cannot compare with {operand!r}") from e
        return True


def check_tags(tags: Mapping[str, Tag]) -> None:
    """Raises SchemaError where a tag is no text, number, truth value or None."""
    for tag, value in tags.items():
        if not isinstance(tag, str) or not (value is None or isinstance(value, str | int | float)):
            raise SchemaError(f"tag {tag!r} is a {type(value).__name__}, expected a text, a number, a truth value or None under a name")
