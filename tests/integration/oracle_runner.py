"""Runs the oracle cases in fresh processes: plain Ray, Ray with the pool installed, or plain Ray with our decorator in place of Ray's.

Usage: python oracle_runner.py --mode plain|pool|decorated --out results.jsonl [case ...]
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import importlib
import inspect
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CASE_SECONDS = 240  # what a case takes is not looked at: a worker that imports torch on a busy machine takes half a minute
START_TRIES = 3
MAX_BROKEN = 6


# In the test process ---------------------------------------------------------------------------


def run_mode(mode: str, directory: Path, names: list[str]) -> dict[str, dict]:
    """Results of all named cases. A case that hangs or kills its process costs only itself."""
    results, failed_starts, broken = {}, 0, 0
    while remaining := [name for name in names if name not in results]:
        if broken == MAX_BROKEN:
            results.update({name: _ended("not run") for name in remaining})
            break
        ready, finished, interrupted, log = _run_once(mode, directory, remaining)
        results.update(finished)
        if interrupted:
            results[interrupted] = _ended("process died")
        if not ready:
            failed_starts += 1
            if failed_starts == START_TRIES:
                raise RuntimeError(f"the {mode} run did not start:\n{log}")
        elif len(finished) < len(remaining):
            broken += 1
    return results


def _ended(how: str) -> dict:
    return {"outcome": {"ended": how}, "routed": 0, "seconds": 0.0}


def _run_once(mode, directory, names):
    out = directory / f"{mode}-{len(list(directory.iterdir()))}.jsonl"
    log = out.with_suffix(".log")
    command = [sys.executable, str(HERE / "oracle_runner.py"), "--mode", mode, "--out", str(out), *names]
    with open(log, "wb") as stream:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=_environment(), check=False)
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    finished = {line["case"]: line for line in lines if "case" in line}
    begun = [line["begin"] for line in lines if "begin" in line]
    interrupted = next((name for name in begun if name not in finished), None)
    return {"ready": True} in lines, finished, interrupted, log.read_text(errors="replace")[-4000:]


def _environment():
    settings = {"RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    # An installed pool in the process of the tests must not install itself in the plain run.
    ours = {name: value for name, value in os.environ.items() if name != "RAY_RUNTIME_ENV_HOOK" and not name.startswith("MOONCAKE_RAY")}
    return {**ours, **settings, "PYTHONPATH": _python_path()}


def _python_path():
    return os.pathsep.join(filter(None, [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]))


# In the process of one mode --------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["plain", "pool", "decorated"], required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    with open(options.out, "w") as stream:
        _start(options.mode)
        _report(stream, {"ready": True})
        _run_cases(stream, options.names)
    import ray

    ray.shutdown()


def _start(mode):
    faulthandler.dump_traceback_later(120, exit=True)
    os.environ["ORACLE_MODE"] = mode
    import ray

    if mode == "pool":
        import mooncake_ray

        mooncake_ray.install()
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=400 * 2**20,
        runtime_env={"env_vars": {name: os.environ[name] for name in ("PYTHONPATH", "ORACLE_MODE")}},
    )
    from oracle_cases import warm_up

    warm_up()
    faulthandler.cancel_dump_traceback_later()


def _report(stream, line):
    stream.write(json.dumps(line) + "\n")
    stream.flush()


def _run_cases(stream, names):
    from oracle_cases import CASES

    gc.freeze()  # what the imports made needs no collecting after every case
    for name in names or CASES:
        _report(stream, {"begin": name})
        result = _run_case(CASES[name])
        _report(stream, {"case": name, **result})
        if result["outcome"] == {"ended": "timeout"}:
            faulthandler.dump_traceback(all_threads=True)
            os._exit(3)


def _run_case(case):
    """The case's outcome, from a thread of its own so that a hang can be told and left behind."""
    from oracle_outcome import routed, take_worker_routed

    result, before, began = {"outcome": {"ended": "timeout"}}, routed(), time.monotonic()
    faulthandler.dump_traceback_later(CASE_SECONDS + 15, exit=True)
    thread = threading.Thread(target=_evaluate, args=(case, result), daemon=True)
    thread.start()
    thread.join(CASE_SECONDS)
    faulthandler.cancel_dump_traceback_later()
    seconds = round(time.monotonic() - began, 2)
    return {**result, "routed": routed() - before + take_worker_routed(), "seconds": seconds}


def _evaluate(case, result):
    from oracle_outcome import outcome

    try:
        if case.needs:
            importlib.import_module(case.needs)
    except ImportError as error:
        result["outcome"] = {"skipped": str(error)}
        return
    try:
        value = asyncio.run(case()) if inspect.iscoroutinefunction(case) else case()
        result["outcome"] = outcome(value)
    except BaseException as error:
        result["outcome"] = {"raised": outcome(error)}
        result["trace"] = traceback.format_exc()[-3000:]
    gc.collect(1)


if __name__ == "__main__":
    # Remote functions and classes must be pickled by the name of the importable module.
    sys.path.insert(0, str(HERE))
    os.environ.update(_environment())
    main()
