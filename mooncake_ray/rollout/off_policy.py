"""Corrections for tokens that another policy made than the one that learns from them: weights, masks, and how far apart the two are.

The behaviour policy is the one that made the tokens, as its engine computed it, under the weights of then. Arrays are padded, (samples, width),
and all of one kind: NumPy arrays, or torch tensors on one device. Results are of that kind, on that device, in the dtype of the log-probs.
Gradients flow through `importance_ratio` and `truncated`; a weight is a constant of the objective, so pass log-probs without a gradient, or
detach what comes back. All functions are pure, and safe from several threads.

    mask: 1 where a token counts, 0 for padding and for tokens of tools, prompts, ...; bool or numbers. What the log-probs are where it is 0
        does not matter, NaN included.
    log-probs: float32, or float64. In 16 bits the difference of two of them is mostly rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from mooncake_ray.errors import ConfigError, SchemaError

__all__ = [
    "LOG_BOUND",
    "Level",
    "OffPolicyMetrics",
    "decoupled_weight",
    "importance_ratio",
    "masked",
    "off_policy_metrics",
    "staleness_histogram",
    "truncated",
]

LOG_BOUND = 20.0
"""Logarithms of ratios are clamped to this, both ways, before they are exponentiated (exp(20) is 4.9e8), as verl's are."""

Array = Any  # numpy.ndarray or torch.Tensor
Level = Literal["token", "sequence", "geometric"]
_LEVELS = ("token", "sequence", "geometric")
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64), torch.float32, torch.float64)


def importance_ratio(logp: Array, behaviour_logp: Array, mask: Array, level: Level = "token") -> Array:
    """How much likelier the tokens are now than when they were made.

    Args:
        logp: Log-probs of the tokens under the policy that learns, (samples, width).
        behaviour_logp: The same, under the policy that made them.
        mask: See the module.
        level: `token`: each token's ratio. `sequence`: the product over the sample's tokens. `geometric`: their geometric mean, which does
            not grow with the length (GSPO, arXiv 2507.18071). The sample's is the ratio of each of its tokens.

    Returns:
        (samples, width); within exp(-20) and exp(20) where the mask is 1, without a gradient where that bound holds it; 0 where the mask is 0.

    Raises:
        SchemaError: Kinds, devices, shapes or dtypes are wrong or differ.
        ConfigError: There is no such level.
    """
    if level not in _LEVELS:
        raise ConfigError(f"level is {level!r}, expected one of {list(_LEVELS)}")
    xp, on = _of_floats(mask, logp=logp, behaviour_logp=behaviour_logp)
    log_ratio = _log_ratio(xp, on, logp, behaviour_logp)
    if level != "token":
        log_ratio = log_ratio.sum(1)[:, None]
        if level == "geometric":
            log_ratio = log_ratio / xp.asarray(xp.clip(on.sum(1), 1, None), dtype=logp.dtype)[:, None]
    return xp.where(on, xp.exp(xp.clip(log_ratio, -LOG_BOUND, LOG_BOUND)), 0.0)  # a sample's number goes to all its tokens


def truncated(ratio: Array, cap: float, mask: Array) -> tuple[Array, Array]:
    """Truncated importance sampling: no ratio above the cap (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", https://fengyao.notion.site/off-policy-rl).

    Returns:
        min(ratio, cap); and which fraction of the tokens had more, a scalar (0 if there are none).

    Raises:
        SchemaError: As `importance_ratio`.
        ConfigError: The cap is not positive.
    """
    _positive("cap", cap)
    xp, on = _of_floats(mask, ratio=ratio)
    return xp.clip(ratio, None, cap), _fraction(ratio > cap, on, ratio)


def masked(ratio: Array, low: float, high: float, mask: Array) -> tuple[Array, Array]:
    """Masked importance sampling: what is too far off is not learnt from at all. On tokens it is IcePop (Ring-1T, arXiv 2510.18855),
    on whole samples ("sequence", "geometric") the rejection of https://richardli.xyz/rl-collapse.

    Returns:
        The mask that is left, of the given one's dtype: 0 also where the ratio is outside [low, high]; and which fraction of the
        tokens that took, a scalar. The weight of what is left is `ratio * left`. IcePop divides the loss by the sum of the mask as it was;
        dividing by that of the one that is left keeps the scale of the gradient.

    Raises:
        SchemaError: As `importance_ratio`.
        ConfigError: The bounds are not positive, or the wrong way round.
    """
    _positive("low", low)
    _positive("high", high)
    if low > high:
        raise ConfigError(f"low is {low}, expected at most high, {high}")
    xp, on = _of_floats(mask, ratio=ratio)
    inside = (ratio >= low) & (ratio <= high)
    return xp.where(inside, mask, xp.zeros_like(mask)), _fraction(~inside, on, ratio)


def decoupled_weight(proximal_logp: Array, behaviour_logp: Array, mask: Array, cap: float) -> tuple[Array, Array]:
    """What the loss of each token is multiplied by in the decoupled PPO objective (AReaL, arXiv 2505.24298): the ratio of the proximal policy,
    which the clipping is around, to the behaviour policy. A token whose ratio is above the cap has weight 0, as in AReaL (its `token_mask`);
    AReaL divides the loss by the number of all tokens nevertheless.

    Args:
        proximal_logp: Under the weights that the step of training began with, (samples, width).
        behaviour_logp: Under the policy that made the tokens.
        mask: See the module.
        cap: Positive; AReaL takes more than 1.

    Returns:
        Weights (samples, width), without a gradient; and which fraction of the tokens was above the cap, a scalar.

    Raises:
        SchemaError: As `importance_ratio`.
        ConfigError: The cap is not positive.
    """
    _positive("cap", cap)
    ratio = _constant(importance_ratio(proximal_logp, behaviour_logp, mask))
    xp, on = _of_floats(mask, ratio=ratio)
    return xp.where(ratio > cap, 0.0, ratio), _fraction(ratio > cap, on, ratio)


def staleness_histogram(ages: Array, mask: Array, most: int) -> Array:
    """How many tokens there are of each age.

    Args:
        ages: In versions, integers (samples, width): `VersionSpans.ages`, padded.
        mask: See the module.
        most: The greatest age with a count of its own.

    Returns:
        int64 (most + 2,): tokens of age 0, 1, ..., most, and those beyond.

    Raises:
        SchemaError: Kinds, devices, shapes or dtypes are wrong or differ, or a token's age is negative.
        ConfigError: `most` is negative.
    """
    if most < 0:
        raise ConfigError(f"most is {most}, expected at least 0")
    xp, on = _alike(mask, ages=ages)
    if "int" not in str(ages.dtype):
        raise SchemaError(f"ages are {ages.dtype}, expected integers")
    counted = xp.asarray(ages[on], dtype=xp.int64)
    if (counted < 0).any():
        raise SchemaError(f"the age of a token is {int(counted.min())}, expected at least 0")
    return xp.bincount(xp.clip(counted, None, most + 1), minlength=most + 2)


@dataclass(frozen=True)
class OffPolicyMetrics:
    """How far the policy that learns is from the one that made the tokens. Plain numbers, for a log.

    Attributes:
        ratio_mean: Of the ratios of the level, over tokens; 1 is expected where both policies are what they are thought to be.
        ratio_max: The greatest of them.
        truncated_fraction: Of the tokens, whose ratio is above the cap.
        kl_k1: KL(behaviour || learning) in nats a token, estimated by the mean of -log r (r: the token's ratio), which may be negative.
        kl_k3: The same by the mean of r - 1 - log r, which is not (http://joschu.net/blog/kl-approx.html).
        effective_sample_size: Fraction of the tokens that as many equally weighted ones would be worth, in (0, 1], of truncated ratios.
    """

    ratio_mean: float
    ratio_max: float
    truncated_fraction: float
    kl_k1: float
    kl_k3: float
    effective_sample_size: float


def off_policy_metrics(logp: Array, behaviour_logp: Array, mask: Array, cap: float, level: Level = "token") -> OffPolicyMetrics:
    """Measures the two policies on the tokens of a batch, without a gradient. Waits for the device.

    Args:
        logp, behaviour_logp, mask, level: As `importance_ratio`.
        cap: As `truncated`.

    Raises:
        SchemaError: As `importance_ratio`, or no token counts.
        ConfigError: There is no such level, or the cap is not positive.
    """
    xp, on = _of_floats(mask, logp=logp, behaviour_logp=behaviour_logp)
    tokens = int(on.sum())
    if not tokens:
        raise SchemaError("no token counts: the mask is 0 everywhere")
    logp, behaviour_logp = _constant(logp), _constant(behaviour_logp)
    ratio = importance_ratio(logp, behaviour_logp, mask, level)
    weights, fraction = truncated(ratio, cap, mask)
    log_ratio = _log_ratio(xp, on, logp, behaviour_logp)
    k3 = importance_ratio(logp, behaviour_logp, mask) - xp.where(on, 1 + log_ratio, 0.0)
    effective = weights.sum() ** 2 / (weights**2).sum()
    numbers = [ratio.sum() / tokens, ratio.max(), fraction, -log_ratio.sum() / tokens, k3.sum() / tokens, effective / tokens]
    return OffPolicyMetrics(*xp.stack(numbers).tolist())


def _alike(mask: Array, **arrays: Array) -> tuple[Any, Array]:
    """What has the functions for them, NumPy or torch, and where the mask is not 0."""
    kind = next((kind for kind in (np.ndarray, torch.Tensor) if isinstance(mask, kind)), None)
    if kind is None:
        raise SchemaError(f"mask is a {type(mask).__name__}, expected a numpy.ndarray or a torch.Tensor")
    if mask.ndim != 2:
        raise SchemaError(f"mask has the shape {tuple(mask.shape)}, expected (samples, width)")
    for name, array in arrays.items():
        if not isinstance(array, kind):
            raise SchemaError(f"{name} is a {type(array).__name__}, expected a {kind.__name__} as the mask")
        if array.shape != mask.shape:
            raise SchemaError(f"{name} has the shape {tuple(array.shape)}, expected {tuple(mask.shape)} as the mask")
        if kind is torch.Tensor and array.device != mask.device:
            raise SchemaError(f"{name} is on {array.device}, expected {mask.device} as the mask")
    return (np if kind is np.ndarray else torch), mask != 0


def _of_floats(mask: Array, **arrays: Array) -> tuple[Any, Array]:
    """As `_alike`, for numbers that must be float32 or float64, and all the same."""
    out = _alike(mask, **arrays)
    first = next(iter(arrays.values())).dtype
    for name, array in arrays.items():
        if array.dtype not in _FLOATS or array.dtype != first:
            raise SchemaError(f"{name} is {array.dtype}, expected float32 or float64, the same in all")
    return out


def _log_ratio(xp: Any, on: Array, logp: Array, behaviour_logp: Array) -> Array:
    """0 where the mask is. The mask goes first: infinities that are only padding must not meet."""
    return xp.where(on, logp, 0.0) - xp.where(on, behaviour_logp, 0.0)


def _fraction(hit: Array, on: Array, ratio: Array) -> Array:
    """Of the tokens, a scalar of the ratio's dtype."""
    xp = np if isinstance(on, np.ndarray) else torch
    return xp.asarray((hit & on).sum() / xp.clip(on.sum(), 1, None), dtype=ratio.dtype)


def _constant(array: Array) -> Array:
    return array.detach() if isinstance(array, torch.Tensor) else array


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value}, expected a positive number")
