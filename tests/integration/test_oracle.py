"""Ray's own behaviour as the oracle: each case must turn out the same with the pool installed.

ORACLE_SUBJECT=plain compares plain Ray with plain Ray, which shows a case that is not deterministic.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from oracle_cases import CASES
from oracle_outcome import first_difference
from oracle_runner import run_mode

SUBJECT = os.environ.get("ORACLE_SUBJECT", "pool")
MIN_ROUTED_CASES = 20

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="session")
def oracle_run(tmp_path_factory):
    return run_mode("plain", tmp_path_factory.mktemp("oracle"), list(CASES))


@pytest.fixture(scope="session")
def subject_run(tmp_path_factory):
    return run_mode(SUBJECT, tmp_path_factory.mktemp("subject"), list(CASES))


@pytest.mark.parametrize("name", CASES)
def test_oracle(name, oracle_run, subject_run):
    expected, actual = oracle_run[name], subject_run[name]
    if "skipped" in expected["outcome"]:
        pytest.skip(expected["outcome"]["skipped"])
    unusable = {"raised", "ended"} & expected["outcome"].keys() if isinstance(expected["outcome"], dict) else set()
    assert not unusable, f"plain Ray gives no answer: {expected['outcome']}\n{expected.get('trace', '')}"
    difference = first_difference(expected["outcome"], actual["outcome"])
    assert difference is None, f"{difference}\n{actual.get('trace', '')}"


def test_oracle_is_not_vacuous(subject_run):
    if SUBJECT == "plain":
        pytest.skip("plain Ray routes nothing")
    routed = sorted(name for name, result in subject_run.items() if result["routed"] > 0)
    assert len(routed) >= MIN_ROUTED_CASES, f"only {len(routed)} of {len(CASES)} cases routed anything: {routed}"
