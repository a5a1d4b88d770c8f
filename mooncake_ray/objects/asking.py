"""Asking this node's engine, whether it is up already or not."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from mooncake_ray.errors import BrokerDiedError, GetTimeoutError
from mooncake_ray.objects import nodes
from mooncake_ray.transfer.deadline import Deadline
from mooncake_ray.transfer.door import Door

if TYPE_CHECKING:
    from mooncake_ray.objects.session import Session

__all__ = ["ask_engine"]

T = TypeVar("T")
_AGAIN_S = 0.05
_ENSURE_EVERY_S = 5.0


def ask_engine(
    session: Session, what: str, ask: Callable[[Door, float], AbstractContextManager[bytes]], take: Callable[[bytes], T], deadline: Deadline
) -> T:
    """Asks until it answers; sees to it that there is one.

    Args:
        what: Is asked for; for errors.
        ask: A request, given the door and the seconds that are left. Gives the id of an object that is pinned meanwhile.
        take: What to do with that; its result is returned.

    Raises:
        GetTimeoutError: no answer before the deadline.
        BrokerDiedError: this node's pool is gone.
        What `ask` and `take` do.
    """
    ensured, last = float("-inf"), ""
    while True:
        try:
            left = deadline.left(what)
        except GetTimeoutError as e:
            why = nodes.why_none()
            raise GetTimeoutError(f"{e}: {last}" + (f" (a service did not start: {why})" if why else "")) from None
        try:
            with ask(session.door, left) as id:
                return take(id)
        except BrokerDiedError:
            raise
        except ConnectionError as e:
            last = f"this node's engine cannot be asked: {e}"
        if time.monotonic() - ensured > _ENSURE_EVERY_S:
            nodes.ensure(session.key[1], session.config)
            ensured = time.monotonic()
        time.sleep(_AGAIN_S)
