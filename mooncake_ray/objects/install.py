"""Turns routing on and off.

`install()` in the driver, before `ray.init()`: the job's workers get a setup hook through Ray's own `RAY_RUNTIME_ENV_HOOK`, and the user's
hooks run as before. Nothing of Ray's public API is replaced; the seams are private functions: two on the way to the pickle (see `routing`),
one on the way back (see `losses`), the one under `ray.put`, and the three under `.remote()`, where tokens of by-value arguments must outlive
the submission.
`uninstall()` puts back what was there.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import ray
from ray import _raylet
from ray._common.utils import load_class
from ray._private import serialization as ray_serialization
from ray._private import worker as ray_worker
from ray.actor import ActorClass, ActorMethod
from ray.remote_function import RemoteFunction

from mooncake_ray.config import Config
from mooncake_ray.errors import ConfigError
from mooncake_ray.integrations import on_import
from mooncake_ray.objects import losses, routing, session
from mooncake_ray.objects.async_items import ItemExecutor

__all__ = ["install", "installed", "runtime_env", "runtime_env_hook", "uninstall", "worker_setup"]

_HOOK_VARIABLE = "RAY_RUNTIME_ENV_HOOK"
_OUR_HOOK = "mooncake_ray.ray_hook"
_USERS_HOOK_VARIABLE = "MOONCAKE_RAY_CHAINED_RUNTIME_ENV_HOOK"
_JOB_VARIABLE = "MOONCAKE_RAY_JOB"  # set in every worker of a job with our setup hook

_lock = threading.RLock()
_originals: list[tuple[Any, str, Any]] = []


def install(config: Config | None = None, **settings: Any) -> None:
    """Routes the tensors and arrays of this job through the pool. Call it in the driver before `ray.init()`. Idempotent.

    Args:
        config: Settings; default the environment's (`MOONCAKE_RAY_*`).
        **settings: Single fields of `Config`, such as `capacity_bytes=8 << 30`.

    Raises:
        ConfigError: a setting is out of range, or Ray is running already and its job lacks the setup hook (then pass
            `runtime_env=mooncake_ray.runtime_env()` to `ray.init`).
    """
    config = config or Config.from_env(**settings)
    if not config.enabled:
        return
    worker = ray_worker.global_worker
    if ray.util.client.ray.is_connected():
        return  # Ray Client pickles in another process: everything stays Ray's
    if worker.connected and worker.mode == ray_worker.SCRIPT_MODE and not _job_has_hook(worker):
        raise ConfigError("mooncake_ray.install() must come before ray.init(), or ray.init needs runtime_env=mooncake_ray.runtime_env()")
    session.configure(config)
    with _lock:
        if os.environ.get(_HOOK_VARIABLE) not in (None, _OUR_HOOK):
            os.environ[_USERS_HOOK_VARIABLE] = os.environ[_HOOK_VARIABLE]
        os.environ[_HOOK_VARIABLE] = _OUR_HOOK
        routing.everything = routing.job_wide = True
        open_seams()


def uninstall() -> None:
    """Restores Ray in this process, exactly. What is in the pool stays readable as long as refs to it live. Idempotent."""
    with _lock:
        routing.everything = False
        while _originals:
            owner, name, value = _originals.pop()
            setattr(owner, name, value)
        on_import.unwatch()
        if os.environ.get(_HOOK_VARIABLE) == _OUR_HOOK:
            del os.environ[_HOOK_VARIABLE]
            if users := os.environ.pop(_USERS_HOOK_VARIABLE, None):
                os.environ[_HOOK_VARIABLE] = users


def installed() -> bool:
    """Whether this process routes."""
    return bool(_originals) and routing.everything


def runtime_env(env: dict[str, Any] | None = None) -> dict[str, Any]:
    """A Ray runtime environment with the workers' setup hook; the hook that `env` has runs too, after ours."""
    env = dict(env or {})
    env["worker_process_setup_hook"] = _chained(env.get("worker_process_setup_hook"))
    env["env_vars"] = {**_settings_of(session.config()), **env.get("env_vars", {}), _JOB_VARIABLE: "1"}
    return env


def runtime_env_hook(env: dict[str, Any] | None) -> dict[str, Any]:
    """What `RAY_RUNTIME_ENV_HOOK=mooncake_ray.ray_hook` calls in `ray.init`: installs here, and has the workers do so."""
    if (users := os.environ.get(_USERS_HOOK_VARIABLE)) is not None:
        env = load_class(users)(env)
    if not Config.from_env().enabled:
        return env or {}
    if not installed():
        install()
    return runtime_env(env)


def worker_setup() -> None:
    """Runs in every worker of the job, before its first task."""
    settings = Config.from_env()
    session.configure(settings)
    routing.everything = settings.enabled
    routing.job_wide = True
    open_seams()
    if (here := session.current()) is not None:
        here.lifetimes.listen()  # even where nothing is routed, this process may call for what is


def open_seams() -> None:
    """Puts routing into this process, for whatever asks for it. Idempotent."""
    with _lock:
        if _originals:
            return
        on_import.watch()
        _replace(ray_serialization, "pickle", routing.RoutingPickle(ray_serialization.pickle))
        context = ray_serialization.SerializationContext
        _replace(context, "serialize", routing.serialize_with(context.serialize))
        _replace(ray_serialization, "RaySystemError", losses.error_maker(ray_serialization.RaySystemError))
        _replace(ray_worker.Worker, "put_object", _putting(ray_worker.Worker.put_object))
        for cls in (RemoteFunction, ActorMethod):
            _replace(cls, "_remote", _submitting(cls._remote))
        _replace(ActorClass, "_remote", _creating(ActorClass._remote))
        worker = ray_worker.global_worker
        if worker.connected and worker.mode == ray_worker.WORKER_MODE:
            worker.core_worker.reset_event_loop_executor(ItemExecutor(_raylet.async_task_id))


def _replace(owner: Any, name: str, value: Any) -> None:
    _originals.append((owner, name, inspect.getattr_static(owner, name)))
    setattr(owner, name, value)


def _putting(original: Callable[..., ray.ObjectRef]) -> Callable[..., ray.ObjectRef]:
    """`Worker.put_object`, after which what was claimed for the value also ends with the ref."""

    @functools.wraps(original)
    def put_object(self: Any, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        state = routing.state
        outer, state.token_of_put = state.token_of_put, None
        try:
            ref = original(self, *args, **kwargs)
            token = state.token_of_put
        finally:
            state.token_of_put = outer
        if token is not None and (here := session.current()) is not None:
            here.lifetimes.end_with(ref, token)
        return ref

    return put_object


def _submitting(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_remote`, holding the tokens of arguments by value until Ray has counted them, and noting what was submitted."""

    @functools.wraps(original)
    def _remote(self: Any, *args: Any, **kwargs: Any) -> Any:
        num_returns = kwargs.get("num_returns") or getattr(self, "_num_returns", None)
        function = getattr(self, "_method_name", None) or self._function_name
        return submit(functools.partial(original, self, *args, **kwargs), function=function, dynamic=num_returns in ("dynamic", -1))

    return _remote


def _creating(original: Callable[..., Any]) -> Callable[..., Any]:
    """`ActorClass._remote`: as above, and an actor that may restart is given its arguments again, so their claims last as long as it."""

    @functools.wraps(original)
    def _remote(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        tokens: list[ray.ObjectRef] = []
        handle = submit(lambda: original(self, args=args, kwargs=kwargs, **options), tokens=tokens)
        if options.get("max_restarts") and (here := session.current()) is not None:
            refs = [a for a in (*(args or ()), *(kwargs or {}).values()) if isinstance(a, ray.ObjectRef)]
            here.lifetimes.keep_for_restarts(handle._actor_id.hex(), tokens + refs)
        return handle

    return _remote


def submit(
    call: Callable[[], Any], *, function: str | None = None, dynamic: bool = False, tokens: list[ray.ObjectRef] | None = None
) -> Any:
    """Submits a task: tokens of its arguments are kept (in `tokens`) until `call` returns, and what it returns is answered for."""
    state = routing.state
    outer, state.held = state.held, [] if tokens is None else tokens
    try:
        here = session.current()
        if here is None:
            return call()
        here.lifetimes.listen()
        with here.lifetimes.submitting():
            result = call()
            here.lifetimes.submitted(result, function, dynamic)
        return result
    finally:
        state.held = outer


def _job_has_hook(worker: Any) -> bool:
    return (
        _JOB_VARIABLE in worker.runtime_env.get("env_vars", {})
        if isinstance(worker.runtime_env, dict)
        else _JOB_VARIABLE in str(ray.get_runtime_context().runtime_env)
    )


def _chained(users: str | Callable[[], Any] | None) -> str | Callable[[], Any]:
    ours = f"{__name__}.worker_setup"
    if users is None or users == ours:
        return ours

    def setup() -> None:
        worker_setup()
        (load_class(users) if isinstance(users, str) else users)()

    setup.__mooncake_ray__ = True  # type: ignore[attr-defined]
    return users if getattr(users, "__mooncake_ray__", False) else setup


def _settings_of(config: Config) -> dict[str, str]:
    plain = Config()
    values = ((f.name, getattr(config, f.name), getattr(plain, f.name)) for f in fields(Config))
    return {
        f"MOONCAKE_RAY_{name.upper()}": str(int(value) if isinstance(value, bool) else value)
        for name, value, default in values
        if value != default
    }
