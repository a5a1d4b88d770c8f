"""What an actor of this package answers to a client's call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray

from mooncake_ray.errors import GetTimeoutError, StoreError

__all__ = ["answer"]

_AGAIN_S = 0.05


def answer(who: str, call: Callable[[], ray.ObjectRef], within_s: float) -> Any:
    """What the actor answers; its errors as they were raised there. A call that may have been lost is repeated: it must do no harm.

    Args:
        who: For errors: "catalog 'rollouts'".
        call: Makes the call.

    Raises:
        StoreError: the actor is gone.
        GetTimeoutError: it did not answer in time.
    """
    end = time.monotonic() + within_s
    while True:
        try:
            return ray.get(call(), timeout=max(0.0, end - time.monotonic()))
        except ray.exceptions.ActorUnavailableError as e:
            if time.monotonic() >= end:
                raise GetTimeoutError(f"{who} could not be reached for {within_s:.0f} s") from e
            time.sleep(_AGAIN_S)
        except ray.exceptions.RayActorError as e:
            raise StoreError(f"{who} is gone, and all that it had: {e}") from e
        except ray.exceptions.GetTimeoutError as e:
            raise GetTimeoutError(f"{who} did not answer within {within_s:.0f} s") from e
        except ray.exceptions.RayTaskError as e:
            raise e.cause from None
