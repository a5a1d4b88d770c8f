"""The task, the tiny policy and the arithmetic of GRPO. Plain torch: nothing here knows Ray.

The task is counting on: a prompt names a number, and the answer counts on from there to the last number,
then stops.

    BOS 55  ->  56 57 58 59 60 EOS

The score comes from checking a response, so no example answers are needed. A random policy starts below
0.01; one that has learned what follows each number, and when to stop, gets 1.

Shapes: B rows, P = `PROMPT_LENGTH`, R = `RESPONSE_LENGTH`, V = `VOCAB_SIZE`. Prompts all have length P;
responses are padded to R on the right, and `response_mask` is 1 up to and including their EOS.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:  # takes seconds to import, and only processes that hold a policy need it
    from transformers import LlamaForCausalLM

NUMBERS = 61  # the tokens 0 … 60 are the numbers
PAD, BOS, EOS = NUMBERS, NUMBERS + 1, NUMBERS + 2
VOCAB_SIZE = NUMBERS + 3
PROMPT_LENGTH = 2
RESPONSE_LENGTH = 16

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
KL_COEFFICIENT = 0.05


def make_prompts(rows: int, generator: torch.Generator) -> Tensor:
    """Returns random prompts `BOS first`, int64 (rows, P), whose answers fit into R tokens."""
    first = torch.randint(NUMBERS - RESPONSE_LENGTH, NUMBERS, (rows,), generator=generator)
    return torch.stack([torch.full_like(first, BOS), first], dim=1)


def right_answers(prompts: Tensor) -> Tensor:
    """Returns the answers to prompts (B, P): the numbers that follow, EOS, padding. int64 (B, R)."""
    counted = prompts[:, 1:2] + torch.arange(1, RESPONSE_LENGTH + 1)
    return torch.where(counted < NUMBERS, counted, torch.where(counted == NUMBERS, EOS, PAD))


def score_responses(prompts: Tensor, responses: Tensor, response_mask: Tensor) -> Tensor:
    """Scores responses by how far they get before the first mistake.

    The right tokens before it are divided by the length of the right answer, or of the response if that
    is larger. So only the exact answer gets 1: neither stopping early nor going on after the end pays.

    Args:
        prompts: int64 (B, P).
        responses: int64 (B, R).
        response_mask: int64 (B, R).

    Returns:
        float32 (B,), from 0 to 1.
    """
    answers = right_answers(prompts)
    right = (responses == answers) & (answers != PAD)
    right_so_far = right.long().cumprod(dim=1)
    length = torch.maximum((answers != PAD).sum(dim=1), response_mask.sum(dim=1))
    return right_so_far.sum(dim=1) / length


def build_policy(seed: int) -> LlamaForCausalLM:
    """Returns a two-layer transformer of about 90,000 random parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=PROMPT_LENGTH + RESPONSE_LENGTH,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def sample_responses(policy: LlamaForCausalLM, prompts: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Samples one response per row at temperature 1, with a KV cache.

    Args:
        policy: Any causal language model of transformers.
        prompts: int64 (B, P).
        generator: Source of all randomness.

    Returns:
        `responses` and `response_mask`, int64 (B, R), and `rollout_log_dist`, float32 (B, R, V): the
        log-probabilities of all tokens that each response token was drawn from.
    """
    from transformers import DynamicCache

    # Newer versions of transformers call the argument `cache`.
    cache_argument = "cache" if "cache" in inspect.signature(policy.forward).parameters else "past_key_values"
    cache, tokens = DynamicCache(), prompts
    rows = len(prompts)
    responses = torch.full((rows, RESPONSE_LENGTH), PAD)
    mask = torch.zeros((rows, RESPONSE_LENGTH), dtype=torch.int64)
    log_dist = torch.zeros((rows, RESPONSE_LENGTH, VOCAB_SIZE))
    running = torch.ones(rows, dtype=torch.bool)
    for position in range(RESPONSE_LENGTH):
        logits = policy(input_ids=tokens, use_cache=True, **{cache_argument: cache}).logits[:, -1]
        log_dist[:, position] = logits.log_softmax(dim=-1)
        drawn = torch.multinomial(log_dist[:, position].exp(), 1, generator=generator)
        tokens = torch.where(running[:, None], drawn, PAD)
        responses[:, position] = tokens[:, 0]
        mask[:, position] = running
        running = running & (tokens[:, 0] != EOS)
        if not running.any():
            break
    return {"responses": responses, "response_mask": mask, "rollout_log_dist": log_dist}


def response_log_dist(policy: LlamaForCausalLM, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Returns log-probabilities of all tokens at each response position.

    Args:
        policy: Any causal language model of transformers.
        input_ids: int64 (B, P + R), prompt and response.
        attention_mask: int64 (B, P + R), 0 on padding.

    Returns:
        float32 (B, R, V).
    """
    logits = policy(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    return logits[:, PROMPT_LENGTH - 1 : -1].log_softmax(dim=-1)


def token_log_probs(log_dist: Tensor, tokens: Tensor) -> Tensor:
    """Picks the log-probabilities (B, R) of tokens (B, R) from a distribution (B, R, V)."""
    return log_dist.gather(-1, tokens[..., None])[..., 0]


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean over the positions where the mask (0 or 1, same shape as values) is 1."""
    return (values * mask).sum() / mask.sum()


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Returns the exact KL(p || q) per position, (B, R), of two distributions (B, R, V)."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def entropy(log_p: Tensor) -> Tensor:
    """Returns the entropy per position, (B, R), of a distribution (B, R, V)."""
    return -(log_p.exp() * log_p).sum(dim=-1)


def group_advantages(rewards: Tensor, groups: np.ndarray) -> Tensor:
    """Normalises each reward by mean and standard deviation of the responses to the same prompt.

    Args:
        rewards: float32 (B,).
        groups: (B,), equal for the responses to one prompt.

    Returns:
        float32 (B,).
    """
    _, numbers = np.unique(groups, return_inverse=True)
    group = torch.from_numpy(numbers)
    size = torch.bincount(group)
    mean = torch.zeros(len(size)).index_add(0, group, rewards) / size
    centred = rewards - mean[group]
    variance = torch.zeros(len(size)).index_add(0, group, centred**2) / size
    return centred / (variance[group].sqrt() + 1e-4)


def grpo_loss(log_dist: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Computes the clipped GRPO loss, averaged over tokens, plus the KL divergence to the reference.

    Args:
        log_dist: float32 (B, R, V), of the policy in training.
        batch: `responses`, `response_mask` and `old_log_probs` (B, R), `advantages` (B,),
            `ref_log_dist` (B, R, V), and, if tokens do not all count alike, `token_weights` (B, R).

    Returns:
        The loss, and what is worth watching.
    """
    mask = batch["response_mask"]
    ratio = (token_log_probs(log_dist, batch["responses"]) - batch["old_log_probs"]).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    advantages = batch["advantages"][:, None]
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    policy_loss = masked_mean(-gain * batch["token_weights"] if "token_weights" in batch else -gain, mask)
    reference_kl = masked_mean(kl_divergence(log_dist, batch["ref_log_dist"]), mask)
    loss = policy_loss + KL_COEFFICIENT * reference_kl
    metrics = {"loss": loss, "reference_kl": reference_kl, "clipped": masked_mean((ratio != clipped).float(), mask)}
    return loss, {name: value.item() for name, value in metrics.items()}
