"""`@mooncake_ray.remote`: `@ray.remote` for functions and actor classes whose data goes through the pool, without `install()`.

The decorated body opens the pool's seams in the process that runs it; Ray's own caller-side hook (`__ray_invocation_decorator__`, which
travels with pickled handles) opens them in whichever process calls it, so that the caller answers for what is returned to it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
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

    Of a class, its own methods of every kind are decorated, and the public ones that it inherits (these not where `@ray.remote` goes above,
    which makes an actor of the class as it is). What a constructor is given goes Ray's way, unless installed.

    Raises:
        TypeError: positional arguments beside the target; a target that is neither function nor class; a class that defines `remote`,
            `options` or `bind` itself.
    """
    if len(args) == 1 and not options:
        return _decorate(args[0])
    if args:
        raise TypeError("use @mooncake_ray.remote, or @mooncake_ray.remote(num_cpus=…) with keyword options only")
    with_options = ray.remote(**options)
    return lambda target: with_options(_complete(_wrap(target)))


def _decorate(target: Any) -> Any:
    if isinstance(target, RemoteFunction):
        return _remake(target._function, target._default_options)
    if isinstance(target, ActorClass):
        return _remake(target.__ray_metadata__.modified_class.__ray_actor_class__, target._default_options)
    wrapped = _wrap(target)
    if inspect.isclass(wrapped):
        for name in _FACES:
            if not isinstance(inspect.getattr_static(wrapped, name, _FACES), _Face | tuple):
                raise TypeError(
                    f"{wrapped.__name__}.{name} would hide the remote class's own {name}; put @ray.remote above @mooncake_ray.remote"
                )
            setattr(wrapped, name, _Face(name))
    else:
        made = _Made(wrapped)
        for name in _FACES:
            setattr(wrapped, name, _Bound(name, made))
    return wrapped


def _remake(target: Any, options: dict[str, Any] | None) -> Any:
    wrapped = _complete(_wrap(target))
    return ray.remote(**options)(wrapped) if options else ray.remote(wrapped)


_FACES = ("remote", "options", "bind")
_MADE = "__mooncake_ray_made__"


class _Made:
    """What `ray.remote` makes of a decorated function or class, made when it is first wanted."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self._made: Any = None

    def get(self) -> Any:
        if self._made is None:
            self._made = ray.remote(_complete(_wrap(self.target)))
        return self._made

    def __reduce__(self) -> Any:
        return _Made, (self.target,)


class _Bound:
    """`.remote` or its like of a function or class."""

    def __init__(self, name: str, made: _Made) -> None:
        self.name, self.made = name, made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        install.open_seams()
        return getattr(self.made.get(), self.name)(*args, **kwargs)


class _Face:
    """`.remote` and its like on a decorated class and its subclasses. Not a function, so that Ray does not take it for a method."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> _Bound:
        if instance is not None or "__ray_actor_class__" in vars(owner):  # Ray's own subclass has Ray's own
            raise AttributeError(self.name)
        if _MADE not in vars(owner):
            setattr(owner, _MADE, _Made(owner))
        return _Bound(self.name, vars(owner)[_MADE])


def _wrap(target: Any) -> Any:
    if inspect.isclass(target):
        _wrap_methods(target)
        return target
    if not inspect.isfunction(target):
        raise TypeError(f"@mooncake_ray.remote takes a function or a class, got {type(target).__name__}: {target!r:.200}")
    return _wrap_function(target, target.__name__)


def _wrap_methods(cls: type) -> None:
    for name, member in list(vars(cls).items()):
        if (not name.startswith("__") or name in ("__init__", "__call__")) and (wrapped := _wrap_member(member, name)) is not None:
            setattr(cls, name, wrapped)


def _wrap_member(member: Any, name: str) -> Any:
    """A decorated method, the member itself if it is that already, None if it is no method."""
    if inspect.isfunction(member):
        return _wrap_function(member, name)
    if isinstance(member, staticmethod | classmethod) and inspect.isfunction(member.__func__):
        wrapped = _wrap_function(member.__func__, name)
        return member if wrapped is member.__func__ else type(member)(wrapped)
    return None


def _complete(target: Any) -> Any:
    """What `ray.remote` is given. Of a class with methods that it inherits, a subclass with these decorated: parents are left alone."""
    if not inspect.isclass(target):
        return target
    names = (name for name in dir(target) if not name.startswith("_") or name == "__call__")
    members = ((name, inspect.getattr_static(target, name)) for name in names)
    inherited = {name: wrapped for name, member in members if (wrapped := _wrap_member(member, name)) is not None and wrapped is not member}
    if not inherited:
        return target
    told = {name: getattr(target, name) for name in ("__module__", "__qualname__", "__doc__")}
    return types.new_class(target.__name__, (target,), {}, lambda body: body.update(told | inherited))


_HOOK = "__ray_invocation_decorator__"


def _wrap_function(f: Callable[..., Any], name: str) -> Any:
    """A function of the kind and the signature of `f`; `name` is what it is called by."""
    if hasattr(f, _HOOK):
        return f  # decorated already, a method in a decorated class say
    wrapper: Any
    if inspect.isasyncgenfunction(f):

        @functools.wraps(f)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            _running(wrapper, name, args)
            async with contextlib.aclosing(f(*args, **kwargs)) as items:
                async for item in items:
                    yield item

    elif inspect.iscoroutinefunction(f):

        @functools.wraps(f)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            _running(wrapper, name, args)
            return await f(*args, **kwargs)

    elif inspect.isgeneratorfunction(f):

        @functools.wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            _running(wrapper, name, args)
            return (yield from f(*args, **kwargs))

    else:

        @functools.wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            _running(wrapper, name, args)
            return f(*args, **kwargs)

    # Ray unwraps methods before it reads what decorators left on them, so what `wraps` points at must not be found.
    del wrapper.__wrapped__
    wrapper.__signature__ = inspect.signature(f)
    setattr(wrapper, _HOOK, _invocation)
    return wrapper


def _running(wrapper: Any, name: str, args: tuple[Any, ...]) -> None:
    """A decorated body begins: in a worker as its task, or called by another body, or without Ray."""
    worker = ray_worker.global_worker
    if worker.connected and worker.mode == ray_worker.WORKER_MODE:
        install.open_seams()
        if _is_the_task(worker.core_worker, wrapper, name, args):
            routing.decorated_task(worker.core_worker.get_current_task_id().binary())


def _is_the_task(core_worker: Any, wrapper: Any, name: str, args: tuple[Any, ...]) -> bool:
    """Whether the body is what the task was called for. If it is not, its caller need not answer for what the task returns."""
    actor_class = type(args[0]) if args else None
    if hasattr(actor_class, "__ray_actor_class__") and inspect.unwrap(getattr(actor_class, name, wrapper)) is not wrapper:
        return False  # the method of a base class (Ray's own wrappers can be unwrapped)
    called = getattr(core_worker, "get_current_task_function_name", None)
    return called is None or (called() or "").rpartition(".")[2] == name


def _invocation(invocation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def invoke(args: Any, kwargs: Any) -> Any:
        state = routing.state
        outer, state.chosen = state.chosen, True
        try:
            if state.held is not None:
                return invocation(args, kwargs)  # a seam is above, and notes what is submitted
            install.open_seams()  # the first call of all in this process
            num_returns = inspect.getclosurevars(invocation).nonlocals.get("num_returns")
            return install.submit(lambda: invocation(args, kwargs), dynamic=num_returns in ("dynamic", -1))
        finally:
            state.chosen = outer

    return invoke
