"""`@mooncake_ray.remote`: `@ray.remote` for functions and actor classes whose data goes through the pool, without `install()`.

The decorated body opens the pool's seams in the process that runs it; Ray's own caller-side hook (`__ray_invocation_decorator__`, which
travels with pickled handles) opens them in whichever process calls it, so that the caller answers for what is returned to it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray.actor import ActorClass
from ray.remote_function import RemoteFunction

from mooncake_ray.objects import install, routing

__all__ = ["remote"]


def remote(*args: Any, **options: Any) -> Any:
    """Use it as `ray.remote`: bare or with options, on functions and on classes. It may also stand above or below `@ray.remote`, and on
    single methods of an actor class.

    Bare on a plain function or class, what it returns has `.remote`, `.options` and `.bind`, and is still a function or class, so that
    `@ray.remote` can go above it. On what `@ray.remote` returned, or with options, it returns what `ray.remote` would.

    Raises:
        TypeError: positional arguments beside the target; a class that defines `remote`, `options` or `bind` itself.
    """
    if (len(args) == 1 and not options and callable(args[0])) or (len(args) == 1 and isinstance(args[0], RemoteFunction | ActorClass)):
        return _decorate(args[0])
    if args:
        raise TypeError("use @mooncake_ray.remote, or @mooncake_ray.remote(num_cpus=…) with keyword options only")
    with_options = ray.remote(**options)
    return lambda target: with_options(_wrap(target))


def _decorate(target: Any) -> Any:
    if isinstance(target, RemoteFunction):
        return _remake(target._function, target._default_options)
    if isinstance(target, ActorClass):
        return _remake(target.__ray_metadata__.modified_class.__ray_actor_class__, target._default_options)
    wrapped = _wrap(target)
    if inspect.isclass(wrapped):
        for name in _FACES:
            if hasattr(wrapped, name):
                raise TypeError(
                    f"{wrapped.__name__}.{name} would hide the remote class's own {name}; put @ray.remote above @mooncake_ray.remote"
                )
            setattr(wrapped, name, _Face(name))
    else:
        for name in _FACES:
            setattr(wrapped, name, _Face(name).of(wrapped))
    return wrapped


def _remake(target: Any, options: dict[str, Any] | None) -> Any:
    wrapped = _wrap(target)
    return ray.remote(**options)(wrapped) if options else ray.remote(wrapped)


_FACES = ("remote", "options", "bind")


class _Face:
    """`.remote` and its like on a decorated function or class. Not a function, so that Ray does not take it for a method."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is not None:
            raise AttributeError(self.name)
        return self.of(owner)

    def of(self, target: Any) -> Any:
        return _Bound(self.name, target)


class _Bound:
    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target = name, target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(_made(self.target), self.name)(*args, **kwargs)


@functools.cache
def _made(target: Any) -> Any:
    return ray.remote(target)


def _wrap(target: Any) -> Any:
    if inspect.isclass(target):
        for name, member in list(vars(target).items()):
            if inspect.isfunction(member) and not (name.startswith("__") and name != "__init__" and name != "__call__"):
                setattr(target, name, _wrap_function(member))
        return target
    if not inspect.isfunction(target):
        raise TypeError(f"@mooncake_ray.remote takes a function or a class, got {type(target).__name__}")
    return _wrap_function(target)


def _wrap_function(f: Callable[..., Any]) -> Any:
    if hasattr(f, "__ray_invocation_decorator__"):
        return f  # decorated already, a method in a decorated class say
    wrapper: Any
    if inspect.isasyncgenfunction(f):

        @functools.wraps(f)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            _running()
            async for item in f(*args, **kwargs):
                yield item

    elif inspect.iscoroutinefunction(f):

        @functools.wraps(f)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            _running()
            return await f(*args, **kwargs)

    elif inspect.isgeneratorfunction(f):

        @functools.wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            _running()
            return (yield from f(*args, **kwargs))

    else:

        @functools.wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            _running()
            return f(*args, **kwargs)

    # Ray unwraps methods before it reads what decorators left on them, so what `wraps` points at must not be found.
    del wrapper.__wrapped__
    wrapper.__signature__ = inspect.signature(f)
    wrapper.__ray_invocation_decorator__ = _invocation
    return wrapper


def _running() -> None:
    """A decorated body begins, in a worker or called directly."""
    worker = ray_worker.global_worker
    if worker.connected and worker.mode == ray_worker.WORKER_MODE:
        install.open_seams()
        routing.decorated_task(worker.core_worker.get_current_task_id().binary())


def _invocation(invocation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def invoke(args: Any, kwargs: Any) -> Any:
        install.open_seams()
        state = routing.state
        outer, state.chosen = state.chosen, True
        try:
            return install.submit(lambda: invocation(args, kwargs))
        finally:
            state.chosen = outer

    return invoke
