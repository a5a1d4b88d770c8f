"""The Ray side of the demo: rollout workers, the scoring task and the trainer.

This is ordinary Ray code. Which store carries the batches and the weights is not visible here.

Columns of a batch (shapes as in `grpo_model`):

    prompts (B, P)   responses, response_mask, rollout_log_probs (B, R)   input_ids, attention_mask (B, P + R)
    rollout_log_dist, ref_log_dist (B, R, V)   rewards, solved (B,)   uid (B,), one value per prompt
"""

from __future__ import annotations

from typing import Any

import grpo_model as model
import ray
import torch

from mooncake_ray import DataProto

LEARNING_RATE = 3e-3
MINI_BATCHES = 4
MAX_ROLLOUT_KL = 1e-3


@ray.remote
class RolloutWorker:
    """Samples responses with its own copy of the policy, and holds the reference policy."""

    def __init__(self, rank: int, seed: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.seed = rank, seed
        self.policy, self.reference = model.build_policy(seed), model.build_policy(seed)
        self.version = -1

    def load_weights(self, weights: dict[str, Any]) -> int:
        """Copies the trainer's weights into the policy and returns their version.

        The reference policy keeps the first weights it is given.

        Args:
            weights: What `Trainer.weights` returned.
        """
        self.policy.load_state_dict(weights["state_dict"])
        if self.version < 0:
            self.reference.load_state_dict(weights["state_dict"])
        self.version = weights["version"]
        return self.version

    def generate(self, prompts: DataProto, group_size: int) -> DataProto:
        """Samples `group_size` responses to every prompt.

        Args:
            prompts: `prompts` (rows, P), `uid`, and in meta_info the `weight_version` to sample with.

        Returns:
            rows * group_size rows, the responses to a prompt next to each other.

        Raises:
            RuntimeError: The weights loaded here are not those of `weight_version`.
        """
        if self.version != prompts.meta_info["weight_version"]:
            raise RuntimeError(f"rollout worker {self.rank} has weights {self.version}, expected {prompts.meta_info['weight_version']}")
        seed = (self.seed * 1_000_003 + self.version) * 1009 + self.rank
        batch = prompts.repeat(group_size, interleave=True)
        tensors = model.sample_responses(self.policy, batch.batch["prompts"], torch.Generator().manual_seed(seed))
        return batch.union(DataProto.from_dict(tensors=self._complete(batch.batch["prompts"], tensors)))

    @torch.no_grad()
    def _complete(self, prompts: torch.Tensor, sampled: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Adds what follows from the sampled columns, and the reference policy's view of them."""
        input_ids = torch.cat([prompts, sampled["responses"]], dim=1)
        attention_mask = torch.cat([torch.ones_like(prompts), sampled["response_mask"]], dim=1)
        return sampled | {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "rollout_log_probs": model.token_log_probs(sampled["rollout_log_dist"], sampled["responses"]),
            "ref_log_dist": model.response_log_dist(self.reference, input_ids, attention_mask),
        }


@ray.remote
def score(batch: DataProto) -> DataProto:
    """Returns `rewards` (0 to 1) and `solved` (0 or 1) of a rollout worker's batch, float32 (B,)."""
    columns = batch.batch
    rewards = model.score_responses(columns["prompts"], columns["responses"], columns["response_mask"])
    return DataProto.from_dict(tensors={"rewards": rewards, "solved": (rewards == 1).float()})


@ray.remote
class Trainer:
    """Owns the policy in training. Its weight version is the number of updates made."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self.seed = seed
        self.policy = model.build_policy(seed)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.version = 0

    def weights(self) -> dict[str, Any]:
        """Returns `version` and `state_dict` for the rollout workers."""
        return {"version": self.version, "state_dict": self.policy.state_dict()}

    def weight_bytes(self) -> int:
        """Returns the size of the state_dict's tensors."""
        return sum(tensor.nbytes for tensor in self.policy.state_dict().values())

    def update(self, batch: DataProto) -> dict[str, float]:
        """Trains on one batch and returns the metrics of the update.

        Raises:
            RuntimeError: The batch was sampled with other weights than the current ones.
        """
        if batch.meta_info["weight_version"] != self.version:
            raise RuntimeError(f"got a batch of weights {batch.meta_info['weight_version']}, expected {self.version}")
        metrics = self._prepare(batch)
        used = ["input_ids", "attention_mask", "responses", "response_mask", "old_log_probs", "advantages", "ref_log_dist"]
        mini_batches = batch.select(batch_keys=used).make_iterator(
            mini_batch_size=len(batch) // MINI_BATCHES,
            epochs=1,
            seed=self.seed * 1_000_003 + self.version,
            dataloader_kwargs={"shuffle": True},
        )
        steps = [self._train_on(mini_batch) for mini_batch in mini_batches]
        self.version += 1
        return metrics | {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}

    @torch.no_grad()
    def _prepare(self, batch: DataProto) -> dict[str, float]:
        """Adds `old_log_probs` and `advantages` to the batch.

        Raises:
            RuntimeError: The policy here does not agree with the distributions that the rollout workers
                sampled from, so either the weights or the batch did not arrive as they were sent.
        """
        columns = batch.batch
        mask, rollout = columns["response_mask"], columns["rollout_log_dist"]
        old = model.response_log_dist(self.policy, columns["input_ids"], columns["attention_mask"])
        rollout_kl = model.masked_mean(model.kl_divergence(rollout, old), mask).item()
        if not rollout_kl < MAX_ROLLOUT_KL:
            raise RuntimeError(f"KL(rollout || trainer) is {rollout_kl:.2e}, expected less than {MAX_ROLLOUT_KL:.0e}")
        columns["old_log_probs"] = model.token_log_probs(old, columns["responses"])
        columns["advantages"] = model.group_advantages(columns["rewards"], batch.non_tensor_batch["uid"])
        drift = model.masked_mean((columns["old_log_probs"] - columns["rollout_log_probs"]).abs(), mask).item()
        return {"rollout_kl": rollout_kl, "rollout_drift": drift, "entropy": model.masked_mean(model.entropy(rollout), mask).item()}

    def _train_on(self, mini_batch: DataProto) -> dict[str, float]:
        columns = mini_batch.batch
        log_dist = model.response_log_dist(self.policy, columns["input_ids"], columns["attention_mask"])
        loss, metrics = model.grpo_loss(log_dist, columns)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), max_norm=1.0)
        self.optimizer.step()
        return metrics | {"gradient_norm": norm.item()}
