"""Corrections for off-policy tokens against plain Python, token by token, and against verl's; NumPy and torch alike; gradients; bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mooncake_ray.errors import ConfigError, SchemaError
from mooncake_ray.rollout.off_policy import (
    LOG_BOUND,
    OffPolicyMetrics,
    decoupled_weight,
    importance_ratio,
    masked,
    off_policy_metrics,
    staleness_histogram,
    truncated,
)

LEVELS = ("token", "sequence", "geometric")
thorough = settings(max_examples=100, deadline=None)
near = {"rel": 1e-4, "abs": 1e-6}


@st.composite
def batches(draw, tokens=0, dtype=np.float32, spread=6.0):
    """Log-probs of two policies and a mask, with anything at all where the mask is 0; at least so many tokens."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 6)))
    mask = draw(hnp.arrays(np.int64, shape, elements=st.integers(0, 1)))
    mask.flat[:tokens] = 1
    near_zero = st.floats(-spread, 0, width=32)
    logp, behaviour = (draw(hnp.arrays(np.float32, shape, elements=near_zero)).astype(dtype) for _ in range(2))
    logp[mask == 0], behaviour[mask == 0] = draw(st.sampled_from([(-1, -2), (np.nan, -np.inf), (-np.inf, -np.inf)]))
    return logp, behaviour, mask


def as_torch(*arrays):
    return [torch.from_numpy(array.copy()) for array in arrays]


def ratios(logp, behaviour, mask, level):
    """Token by token, in doubles."""
    out = np.zeros(mask.shape)
    for row in range(len(mask)):
        logs = {t: float(logp[row, t]) - float(behaviour[row, t]) for t in np.flatnonzero(mask[row])}
        for t, log in logs.items():
            log = log if level == "token" else sum(logs.values()) / (1 if level == "sequence" else len(logs))
            out[row, t] = math.exp(min(max(log, -LOG_BOUND), LOG_BOUND))
    return out


@given(batches(), st.sampled_from(LEVELS), st.sampled_from([np.int64, np.float32, bool]))
@thorough
def test_ratios(batch, level, mask_dtype):
    logp, behaviour, mask = batch
    got = importance_ratio(logp, behaviour, mask.astype(mask_dtype), level)
    assert got.dtype == np.float32 and got.shape == mask.shape
    np.testing.assert_allclose(got, ratios(logp, behaviour, mask, level), rtol=1e-4)
    assert (got[mask == 0] == 0).all() and (got[mask == 1] > 0).all()


@given(batches(), st.sampled_from(LEVELS), st.floats(0.25, 4))
@thorough
def test_what_is_above_the_cap_and_out_of_bounds(batch, level, cap):
    mask = batch[2]
    ratio = importance_ratio(*batch, level)
    tokens = [(row, t) for row, t in np.ndindex(*mask.shape) if mask[row, t]]
    above = [float(ratio[at]) > cap for at in tokens]
    weights, fraction = truncated(ratio, cap, mask)
    assert all(weights[at] == np.float32(min(float(ratio[at]), cap)) for at in tokens) and not weights[mask == 0].any()
    assert float(fraction) == pytest.approx(sum(above) / max(1, len(tokens)), **near)
    outside = [not cap / 2 <= float(ratio[at]) <= cap for at in tokens]
    left, fraction = masked(ratio, cap / 2, cap, mask)
    assert left.dtype == mask.dtype and not left[mask == 0].any()
    assert [not left[at] for at in tokens] == outside
    assert float(fraction) == pytest.approx(sum(outside) / max(1, len(tokens)), **near)
    if level == "token":
        weights, fraction = decoupled_weight(*batch, cap)
        assert all(weights[at] == (0 if out else ratio[at]) for at, out in zip(tokens, above, strict=True)) and not weights[mask == 0].any()
        assert float(fraction) == pytest.approx(sum(above) / max(1, len(tokens)), **near)


def test_the_bounds_themselves_are_inside():
    ratio, mask = np.array([[0.5, 2.0, 0.49, 2.01]]), np.ones((1, 4))
    assert masked(ratio, 0.5, 2.0, mask)[0].tolist() == [[1, 1, 0, 0]]
    weights, fraction = truncated(ratio, 2.0, mask)
    assert weights.tolist() == [[0.5, 2.0, 0.49, 2.0]] and fraction == 0.25
    logp = np.log(ratio)
    assert decoupled_weight(logp, np.zeros_like(logp), mask, 2.005)[0] == pytest.approx(np.array([[0.5, 2.0, 0.49, 0.0]]))


@given(batches(tokens=1), st.sampled_from(LEVELS), st.floats(0.25, 4))
@thorough
def test_metrics(batch, level, cap):
    on = batch[2] == 1
    ratio, by_token = ratios(*batch, level)[on], ratios(*batch, "token")[on]
    weights, logs = np.minimum(ratio, cap), np.log(by_token)
    got = off_policy_metrics(*batch, cap, level)
    assert got.ratio_mean == pytest.approx(ratio.mean(), **near)
    assert got.ratio_max == pytest.approx(ratio.max(), **near)
    assert got.truncated_fraction == pytest.approx(float((importance_ratio(*batch, level)[on] > cap).mean()), **near)
    assert got.kl_k1 == pytest.approx(-logs.mean(), **near)
    assert got.kl_k3 == pytest.approx((by_token - 1 - logs).mean(), rel=1e-4, abs=1e-5)
    assert got.effective_sample_size == pytest.approx(weights.sum() ** 2 / (weights**2).sum() / len(weights), **near)
    assert all(type(value) is float for value in vars(got).values())


def test_of_one_policy_there_is_nothing_to_correct():
    logp, mask = np.full((2, 3), -1.5, np.float32), np.ones((2, 3))
    for level in LEVELS:
        assert (importance_ratio(logp, logp, mask, level) == 1).all()
        assert off_policy_metrics(logp, logp, mask, 2.0, level) == OffPolicyMetrics(1.0, 1.0, 0.0, 0.0, 0.0, 1.0)


# NumPy and torch


@given(batches(tokens=1), st.sampled_from(LEVELS), st.floats(0.25, 4), st.sampled_from([np.float32, np.float64]))
@thorough
def test_numpy_and_torch_agree(batch, level, cap, dtype):
    logp, behaviour, mask = batch[0].astype(dtype), batch[1].astype(dtype), batch[2]
    theirs = as_torch(logp, behaviour, mask)
    pairs = [(importance_ratio(logp, behaviour, mask, level), importance_ratio(*theirs, level))]
    ratio = pairs[0][0]  # of both, or a ratio at a bound would be on either side of it
    for work in (lambda r, m: truncated(r, cap, m), lambda r, m: masked(r, cap / 2, cap, m)):
        pairs += zip(work(ratio, mask), work(*as_torch(ratio, mask)), strict=True)
    for mine, other in pairs:
        assert isinstance(other, torch.Tensor) and str(other.dtype) == f"torch.{mine.dtype}" and tuple(other.shape) == mine.shape
        np.testing.assert_allclose(mine, other.numpy(), rtol=1e-5)
        assert mine.dtype in (dtype, mask.dtype)
    mine, other = (off_policy_metrics(*arrays, 1e9, level) for arrays in ((logp, behaviour, mask), theirs))
    assert vars(mine) == pytest.approx(vars(other), **near)


def test_results_are_on_the_device_of_the_input():
    logp, behaviour, mask = (torch.empty(2, 3, device="meta") for _ in range(3))  # which has no values to look at, either
    for level in LEVELS:
        ratio = importance_ratio(logp, behaviour, mask, level)
        results = [ratio, *truncated(ratio, 2.0, mask), *masked(ratio, 0.5, 2.0, mask), *decoupled_weight(logp, behaviour, mask, 2.0)]
        assert {(result.device.type, result.dtype) for result in results} == {("meta", torch.float32)}
        assert [tuple(result.shape) for result in results] == [(2, 3), (2, 3), (), (2, 3), (), (2, 3), ()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_says_the_same():
    generator = torch.Generator().manual_seed(0)
    logp, behaviour = (-torch.rand(8, 100, generator=generator) for _ in range(2))
    mask = (torch.rand(8, 100, generator=generator) < 0.7).int()
    there = [tensor.cuda() for tensor in (logp, behaviour, mask)]
    for level in LEVELS:
        ratio = importance_ratio(*there, level)
        assert ratio.is_cuda
        torch.testing.assert_close(ratio.cpu(), importance_ratio(logp, behaviour, mask, level), rtol=1e-4, atol=0)
        assert vars(off_policy_metrics(*there, 1.5, level)) == pytest.approx(
            vars(off_policy_metrics(logp, behaviour, mask, 1.5, level)), rel=1e-3
        )
    ages = torch.randint(0, 9, (8, 100), generator=generator)
    assert staleness_histogram(ages.cuda(), there[2], 4).cpu().equal(staleness_histogram(ages, mask, 4))


# Gradients


@given(batches(dtype=np.float64, spread=2.0), st.sampled_from(LEVELS))
@settings(max_examples=25, deadline=None)
def test_gradients_are_those_of_the_ratio(batch, level):
    logp, behaviour, mask = as_torch(*batch)
    logp[mask == 0] = 0  # gradcheck compares with differences, which NaN has not
    behaviour[mask == 0] = 0
    assert torch.autograd.gradcheck(lambda x: importance_ratio(x, behaviour, mask, level), logp.requires_grad_())


def test_no_gradient_beyond_the_bounds_nor_of_what_does_not_count():
    logp = torch.tensor([[0.0, -50.0, 40.0, math.nan, 1.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 1]])
    ratio = importance_ratio(logp, torch.zeros_like(logp), mask)
    assert ratio[0].tolist() == pytest.approx([1, math.exp(-LOG_BOUND), math.exp(LOG_BOUND), 0, math.e])
    truncated(ratio, 2.0, mask)[0].sum().backward()
    assert logp.grad.tolist() == [[1, 0, 0, 0, 0]]
    logp.grad = None
    importance_ratio(logp, torch.zeros_like(logp), torch.tensor([[1, 0, 0, 0, 1]]), "sequence").sum().backward()
    assert logp.grad[0].tolist() == pytest.approx([2 * math.e, 0, 0, 0, 2 * math.e])
    weights, fraction = decoupled_weight(logp, torch.zeros_like(logp), mask, 2.0)
    assert not weights.requires_grad and not fraction.requires_grad


def test_a_nan_that_counts_is_seen():
    logp = np.array([[0.0, math.nan]], np.float32)
    ratio = importance_ratio(logp, np.zeros_like(logp), np.ones((1, 2)))
    assert np.isnan(ratio[0, 1])
    assert masked(ratio, 0.5, 2.0, np.ones((1, 2)))[0].tolist() == [[1, 0]]
    assert math.isnan(off_policy_metrics(logp, np.zeros_like(logp), np.ones((1, 2)), 2.0).ratio_mean)


# Histogram of ages


@given(st.data(), st.sampled_from([np.int8, np.int32, np.int64, np.uint8]), st.integers(0, 5))
@thorough
def test_histogram(data, dtype, most):
    shape = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 6)))
    ages = data.draw(hnp.arrays(dtype, shape, elements=st.integers(0, 8)))
    mask = data.draw(hnp.arrays(np.int64, shape, elements=st.integers(0, 1)))
    if dtype != np.uint8:
        ages[mask == 0] = -1  # as padding may be
    counted = ages[mask == 1].tolist()
    expected = [counted.count(age) for age in range(most + 1)] + [sum(age > most for age in counted)]
    for got in (staleness_histogram(ages, mask, most), staleness_histogram(*as_torch(ages, mask), most)):
        assert got.tolist() == expected and str(got.dtype).endswith("int64")


def test_more_bins_than_the_dtype_can_count():
    ages, mask = np.array([[100]], np.int8), np.ones((1, 1))
    for arrays in ((ages, mask), as_torch(ages, mask)):
        assert np.flatnonzero(staleness_histogram(*arrays, 300)).tolist() == [100]


# verl's


@pytest.fixture(scope="module")
def verl():
    from verl.trainer.ppo import rollout_corr_helper

    return rollout_corr_helper


@given(batches(tokens=1, spread=2.0), st.sampled_from(["token", "sequence"]), st.floats(0.25, 4))
@settings(max_examples=60, deadline=None)
def test_verl_has_the_same_weights(verl, batch, level, cap):
    logp, behaviour, mask = as_torch(*batch)
    logp[mask == 0] = behaviour[mask == 0] = 0  # verl multiplies by the mask
    ratio = importance_ratio(logp, behaviour, mask, level)
    weights, said = verl.compute_rollout_correction_weights(logp - behaviour, mask, level, cap)
    torch.testing.assert_close(truncated(ratio, cap, mask)[0], weights)
    got = off_policy_metrics(logp, behaviour, mask, cap, level)
    assert got.effective_sample_size == pytest.approx(said["rollout_is_eff_sample_size"], rel=1e-3)
    if level == "token":
        assert got.truncated_fraction == pytest.approx(said["rollout_is_ratio_fraction_high"], **near)
    low = cap / 2
    left, fraction = masked(ratio, low, cap, mask)
    if left.any():  # verl divides by zero otherwise
        weights, said = verl.compute_rollout_correction_weights(logp - behaviour, mask, level, f"{low!r}_{cap!r}")
        torch.testing.assert_close(ratio * left, weights)
        assert fraction.item() == pytest.approx(said["rollout_is_oob_ratio"], **near)
    said = verl.compute_offpolicy_metrics(logp, behaviour, mask)
    assert (got.kl_k1, got.kl_k3) == pytest.approx((said["kl"], said["k3_kl"]), rel=1e-3, abs=1e-5)


@given(batches(tokens=1, spread=1.0), st.floats(1.05, 4))
@settings(max_examples=60, deadline=None)
def test_verl_rejects_the_same_samples(verl, batch, high):
    logp, behaviour, mask = as_torch(*batch)
    logp[mask == 0] = behaviour[mask == 0] = 0
    # verl's bounds of k1 are on the inverse of the ratio.
    left, said = verl.compute_rollout_rejection_mask(logp - behaviour, mask, "seq_mean_k1", f"{1 / high!r}_{high * 1.5!r}")
    ratio = importance_ratio(logp, behaviour, mask, "geometric")
    mine, fraction = masked(ratio, 1 / (high * 1.5), high, mask)
    at_a_bound = np.isclose(ratio, high, rtol=1e-5) | np.isclose(ratio, 1 / (high * 1.5), rtol=1e-5)
    if not at_a_bound.any():
        assert mine.equal(left)
        assert fraction.item() == pytest.approx(said["rollout_rs_masked_fraction"], **near)


# Bad input

X, M = np.zeros((2, 3), np.float32), np.ones((2, 3))


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (lambda: importance_ratio(X, torch.zeros(2, 3), M), "behaviour_logp is a Tensor, expected a ndarray as the mask"),
        (lambda: importance_ratio(X, X, M.tolist()), "mask is a list, expected a numpy.ndarray or a torch.Tensor"),
        (lambda: importance_ratio(X, X[:, :1], M), r"behaviour_logp has the shape \(2, 1\), expected \(2, 3\)"),
        (lambda: importance_ratio(X[0], X[0], M[0]), r"mask has the shape \(3,\), expected \(samples, width\)"),
        (lambda: importance_ratio(X, X.astype(np.float64), M), "behaviour_logp is float64, expected float32 or float64, the same"),
        (lambda: importance_ratio(*[torch.zeros(2, 3).bfloat16()] * 3), "logp is torch.bfloat16, expected float32"),
        (lambda: importance_ratio(*[torch.zeros(2, 3)] * 2, torch.ones(2, 3, device="meta")), "logp is on cpu, expected meta"),
        (lambda: truncated(X.astype(int), 1.0, M), "ratio is int64"),
        (lambda: masked(X[:1], 0.5, 1.0, M), r"ratio has the shape \(1, 3\)"),
        (lambda: off_policy_metrics(X, X, np.zeros((2, 3)), 1.0), "no token counts"),
        (lambda: off_policy_metrics(X[:0], X[:0], M[:0], 1.0), "no token counts"),
        (lambda: staleness_histogram(X, M, 3), "ages are float32, expected integers"),
        (lambda: staleness_histogram(M > 0, M, 3), "ages are bool, expected integers"),
        (lambda: staleness_histogram(np.array([[0, -2]]), np.ones((1, 2)), 3), "the age of a token is -2"),
        (lambda: staleness_histogram(torch.tensor([[0, -2]]), torch.ones(1, 2), 3), "the age of a token is -2"),
    ],
)
def test_arrays_that_do_not_fit(work, text):
    with pytest.raises(SchemaError, match=text):
        work()


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (lambda: importance_ratio(X, X, M, "sample"), r"level is 'sample', expected one of \['token', 'sequence', 'geometric'\]"),
        (lambda: truncated(X, 0.0, M), "cap is 0.0, expected a positive number"),
        (lambda: decoupled_weight(X, X, M, math.nan), "cap is nan"),
        (lambda: masked(X, -1.0, 2.0, M), "low is -1.0"),
        (lambda: masked(X, 1.0, math.inf, M), "high is inf"),
        (lambda: masked(X, 2.0, 1.0, M), "low is 2.0, expected at most high, 1.0"),
        (lambda: staleness_histogram(X, M, -1), "most is -1, expected at least 0"),
    ],
)
def test_settings_that_are_none(work, text):
    with pytest.raises(ConfigError, match=text):
        work()
