"""The actors of the asynchronous demo: rollout workers with an engine each, the reward, and the learner.

Columns of a batch (shapes as in `grpo_model`): what `sample_responses` gives but the distributions, `input_ids`, `attention_mask` (B, P + R),
`rollout_log_probs` (B, R), and of the reward `rewards`, `solved` (B,).
"""

from __future__ import annotations

from typing import Any

import grpo_model as model
import numpy as np
import ray
import torch

from mooncake_ray import BatchRef, WeightSyncGroup
from mooncake_ray.engines.torch_module import TorchModuleEngine
from mooncake_ray.loops import LearnerTask, Rolled, RolloutTask
from mooncake_ray.rollout.off_policy import decoupled_weight
from mooncake_ray.weights.source import ModuleSource

LEARNING_RATE = 3e-3
MINI_BATCHES = 4
CAP = 5.0  # of what a token counts for that is likelier now than when it was made


def prompt(seed: int, number: int) -> torch.Tensor:
    """The prompt of a group, int64 (1, P): the same in every mode."""
    return model.make_prompts(1, torch.Generator().manual_seed(seed * 1_000_003 + number))


@ray.remote(num_cpus=0)
class Rollout:
    """Samples with the weights that its engine has. These stay as they are while a group is made."""

    def __init__(self, group: WeightSyncGroup, rank: int, seed: int) -> None:
        torch.set_num_threads(1)
        self.policy = model.build_policy(seed)
        self.engine = TorchModuleEngine(self.policy)
        self.member = group.engine(self.engine, f"rollout-{rank}")
        self.seed = seed

    def generate(self, task: RolloutTask) -> Rolled:
        prompts = torch.cat(task.prompts).repeat_interleave(task.group_size, dim=0)
        number = int(task.uids[0].rpartition("-")[2])
        with self.engine.serving() as version:
            made = model.sample_responses(self.policy, prompts, torch.Generator().manual_seed((self.seed * 1009 + number) * 1_000_003))
        columns = {
            "prompts": prompts,
            "responses": made["responses"],
            "response_mask": made["response_mask"],
            "input_ids": torch.cat([prompts, made["responses"]], dim=1),
            "attention_mask": torch.cat([torch.ones_like(prompts), made["response_mask"]], dim=1),
            "rollout_log_probs": model.token_log_probs(made["rollout_log_dist"], made["responses"]),
        }
        uids = [uid for uid in task.uids for _ in range(task.group_size)]
        return Rolled(columns, uids, version, tokens=made["response_mask"].sum(dim=1).numpy())


@ray.remote(num_cpus=0)
class Reward:
    def score(self, rolled: Rolled) -> Rolled:
        got = rolled.batch.get(["prompts", "responses", "response_mask"])
        rewards = model.score_responses(got["prompts"], got["responses"], got["response_mask"])
        return rolled.scored({"rewards": rewards, "solved": (rewards == 1).float()})


@ray.remote(num_cpus=0)
class Learner:
    """Clips around the policy that the step begins with, and weighs tokens by how far that is from the one that made them."""

    def __init__(self, group: WeightSyncGroup, seed: int) -> None:
        torch.set_num_threads(1)
        self.policy, self.reference = model.build_policy(seed), model.build_policy(seed)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.member = group.trainer(ModuleSource(self.policy), 0, 1)
        self.seed = seed

    def update(self, batch: BatchRef, task: LearnerTask) -> dict[str, float]:
        columns = batch.get()
        capped = self._prepare(columns, np.asarray(task.uids))
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(self.seed * 1_000_003 + task.step))
        steps = [self._train_on({name: column[rows] for name, column in columns.items()}) for rows in order.chunk(MINI_BATCHES)]
        means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        return means | {"reward": columns["rewards"].mean().item(), "solved": columns["solved"].mean().item(), "capped": capped}

    @torch.no_grad()
    def _prepare(self, columns: dict[str, Any], uids: np.ndarray) -> float:
        """Adds what the loss wants; returns which fraction of the tokens does not count, being too far from the present policy."""
        old = model.response_log_dist(self.policy, columns["input_ids"], columns["attention_mask"])
        columns["old_log_probs"] = model.token_log_probs(old, columns["responses"])
        columns["ref_log_dist"] = model.response_log_dist(self.reference, columns["input_ids"], columns["attention_mask"])
        columns["advantages"] = model.group_advantages(columns["rewards"], uids)
        weights, capped = decoupled_weight(columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"], CAP)
        columns["token_weights"] = weights
        return float(capped)

    def _train_on(self, columns: dict[str, torch.Tensor]) -> dict[str, float]:
        log_dist = model.response_log_dist(self.policy, columns["input_ids"], columns["attention_mask"])
        loss, metrics = model.grpo_loss(log_dist, columns)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), max_norm=1.0)
        self.optimizer.step()
        return metrics
