"""Which decoder layers each of Megatron's pipeline stages has: even, uneven, virtual, or as a layout string says."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mooncake_ray.errors import PlanError

__all__ = ["layers_of_stages"]


def layers_of_stages(
    layers: int,
    pp: int,
    vpp: int = 1,
    *,
    first: int | None = None,
    last: int | None = None,
    embedding: bool = False,
    loss: bool = False,
    layout: str | Sequence[Sequence[str]] | None = None,
) -> list[list[range]]:
    """Numbers of the layers, from 0, for each stage and each of its virtual stages: `[pp rank][virtual stage]`.

    A model's layers go through all stages once for each virtual stage, in this order.

    Args:
        vpp: Virtual stages of each stage; what it has by `layout`, where that is given.
        first: Layers of the first stage, if it has not as many as the others (`num_layers_in_first_pipeline_stage`).
        last: Of the last one (`num_layers_in_last_pipeline_stage`).
        embedding: Whether the embedding takes the place of a layer (`account_for_embedding_in_pipeline_split`).
        loss: Whether the loss does.
        layout: As `pipeline_model_parallel_layout`: "Et*3|(tt|)*29,m|L", or a list of lists of "embedding", "decoder", "mtp", "loss".

    Raises:
        PlanError: the layers cannot be divided so.
    """
    if layout is not None:
        counts = _counts(layout, pp)
    else:
        counts = _divided(layers, pp, vpp, first, last, embedding, loss)
    if sum(counts) != layers:
        raise PlanError(f"{sum(counts)} layers are placed, but the model has {layers}")
    out: list[list[range]] = [[] for _ in range(pp)]
    at = 0
    for chunk, n in enumerate(counts):
        out[chunk % pp].append(range(at, at + n))
        at += n
    return out


def _divided(layers: int, pp: int, vpp: int, first: int | None, last: int | None, embedding: bool, loss: bool) -> list[int]:
    """Layers of each chunk, in the order they are run."""
    given = {stage: n for stage, n in ((0, first), (pp - 1, last)) if n is not None}
    if given and (embedding or loss):
        raise PlanError("either the first or last stage has a number of layers of its own, or the embedding or loss counts as one")
    rest, stages = layers + embedding + loss - sum(given.values()), pp - len(given)
    if rest < 0 or (rest % stages if stages else rest):
        raise PlanError(f"{rest} layers cannot be divided by {stages} stages")
    each = [given.get(stage, rest // stages if stages else 0) for stage in range(pp)]
    if uneven := [n for n in each if n % vpp]:
        raise PlanError(f"a stage's {uneven[0]} layers cannot be divided by {vpp} virtual stages")
    counts = [n // vpp for n in each] * vpp
    counts[0] -= embedding
    counts[-1] -= loss
    if min(counts) < 0:
        raise PlanError("a stage has no layer for the embedding or the loss to take the place of")
    return counts


def _counts(layout: str | Sequence[Sequence[str]], pp: int) -> list[int]:
    if isinstance(layout, str):
        text = layout.replace(",", "")
        for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
            text = re.sub(repeated, lambda m: m[1] * int(m[2]), text)
        if unknown := set(text) - set("EtmL|"):
            raise PlanError(f"{layout!r}: {sorted(unknown)} are none of E, t, m, L")
        counts = [stage.count("t") for stage in text.split("|")]
    else:
        counts = [sum(kind == "decoder" for kind in stage) for stage in layout]
    if len(counts) % pp:
        raise PlanError(f"{len(counts)} stages cannot be divided by {pp}")
    return counts
