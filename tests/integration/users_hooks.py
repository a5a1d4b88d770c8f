"""A user's own hooks, which must run beside ours."""

import os


def setup():
    os.environ["USERS_HOOK"] = "ran"


def runtime_env(env):
    return {**(env or {}), "worker_process_setup_hook": "users_hooks.setup"}
