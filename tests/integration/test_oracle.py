"""Ray's own behaviour as the oracle: each case must turn out the same with the pool installed.

ORACLE_SUBJECT="pool decorated" (`make oracle`) also has our decorator in place of Ray's, without an installed pool. ORACLE_SUBJECT=plain
compares plain Ray with plain Ray, which shows a case that is not deterministic.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from oracle_cases import CASES
from oracle_outcome import first_difference
from oracle_runner import run_mode

SUBJECTS = os.environ.get("ORACLE_SUBJECT", "pool").split()
VALUES_ONLY = {f"oracle_cases.{theme}" for theme in ("containers", "torch_values", "numpy_values", "pickles")}  # where nothing is remote
MANY_WORKERS = ("actors", "cancellation", "captured", "concurrency", "detached", "errors", "forms", "restarts")
SLOW = {f"oracle_cases.{theme}" for theme in MANY_WORKERS}  # left to `make oracle`
MIN_ROUTED_CASES = 20

pytestmark = pytest.mark.timeout(1800)


def names_for(subject):
    return [name for name, case in CASES.items() if subject != "decorated" or case.__module__ not in VALUES_ONLY]


@pytest.fixture(scope="session")
def run_of(request, tmp_path_factory):
    """The results of a mode, by case; each mode runs once, all of them at the same time, with the cases that pytest was asked for."""
    asked = {item.callspec.params.get("name") for item in request.session.items if item.path == Path(__file__)}

    def start(mode, oracle):
        names = [name for name in CASES if name in asked and (oracle or name in names_for(mode))]
        return threads.submit(run_mode, mode, tmp_path_factory.mktemp("oracle" if oracle else mode), names)

    runs = [("plain", True), *((mode, False) for mode in SUBJECTS)]
    with ThreadPoolExecutor(len(runs)) as threads:
        started = {run: start(*run) for run in runs}
        yield lambda mode, *, oracle=False: started[mode, oracle].result()


def cases():
    for subject in SUBJECTS:
        for name in names_for(subject):
            yield pytest.param(subject, name, marks=[pytest.mark.slow] if CASES[name].__module__ in SLOW else [])


@pytest.mark.parametrize(("subject", "name"), cases())
def test_oracle(subject, name, run_of):
    expected, actual = run_of("plain", oracle=True)[name], run_of(subject)[name]
    if "skipped" in expected["outcome"]:
        pytest.skip(expected["outcome"]["skipped"])
    unusable = {"raised", "ended"} & expected["outcome"].keys() if isinstance(expected["outcome"], dict) else set()
    assert not unusable, f"plain Ray gives no answer: {expected['outcome']}\n{expected.get('trace', '')}"
    difference = first_difference(expected["outcome"], actual["outcome"])
    assert difference is None, f"{difference}\n{actual.get('trace', '')}"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_oracle_is_not_vacuous(subject, run_of):
    assert all(result["routed"] == 0 for result in run_of("plain", oracle=True).values()), "the oracle must be plain Ray"
    if subject == "plain":
        pytest.skip("plain Ray routes nothing")
    routed = sorted(name for name, result in run_of(subject).items() if result["routed"] > 0)
    assert len(routed) >= MIN_ROUTED_CASES, f"only {len(routed)} of {len(names_for(subject))} cases routed anything: {routed}"
