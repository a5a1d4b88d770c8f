"""A step of rollout, critic and training, whose driver never holds a batch: it joins, cuts and passes on refs.

python examples/batches.py
"""

from __future__ import annotations

import ray
import torch

import mooncake_ray as mr

ROLLOUTS, TRAINERS, ROWS, PROMPT, RESPONSE = 2, 2, 64, 128, 1024


@ray.remote
class Rollout:
    """Makes a padded batch, as verl's rollout workers do: prompts to the right of their half, responses to the left of theirs."""

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)

    def generate(self) -> mr.BatchRef:
        prompts = torch.randint(8, PROMPT, (ROWS, 1), generator=self.rng)
        responses = torch.randint(8, RESPONSE, (ROWS, 1), generator=self.rng)
        position = torch.arange(-PROMPT, RESPONSE)
        mask = ((position >= -prompts) & (position < responses)).long()
        tokens = torch.randint(0, 32_000, (ROWS, PROMPT + RESPONSE), generator=self.rng)
        answer = mask[:, PROMPT:]
        batch = {
            "input_ids": torch.where(mask == 1, tokens, 0),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": answer,
            "old_log_probs": torch.where(answer == 1, -torch.rand(answer.shape, generator=self.rng), 0.0),
            "uid": [f"prompt {row // 8}" for row in range(ROWS)],
        }
        ref = mr.put_batch(batch)
        dense = sum(column.nbytes for column in batch.values() if isinstance(column, torch.Tensor))
        print(f"{dense >> 10} KiB padded, stored in {ref.nbytes >> 10} KiB")
        return ref


@ray.remote
class Critic:
    def values(self, ref: mr.BatchRef) -> mr.BatchRef:
        """Reads two columns of the batch, and puts one that belongs beside them."""
        got = mr.get(ref, fields=["response_mask", "old_log_probs"])
        return mr.put_batch({"values": torch.where(got["response_mask"] == 1, got["old_log_probs"].exp(), 0.0)})


@ray.remote
class Trainer:
    def step(self, ref: mr.BatchRef) -> tuple[int, float]:
        """Reads its own rows, of the columns that it needs, without padding."""
        batch = mr.get(ref, fields=["input_ids", "old_log_probs", "values"], form="ragged").batch
        log_probs = batch["old_log_probs"]
        values = mr.Ragged.from_padded(
            batch["values"], lengths=log_probs.lengths()
        )  # put without a mask: nothing says how long its rows are
        return batch["input_ids"].values.numel(), float((log_probs.values * values.values).sum())


def main() -> None:
    mr.install()
    ray.init(num_cpus=ROLLOUTS + TRAINERS + 1)
    rollouts = [Rollout.remote(seed) for seed in range(ROLLOUTS)]
    critic, trainers = Critic.remote(), [Trainer.remote() for _ in range(TRAINERS)]
    batch = mr.concat_batches(ray.get([rollout.generate.remote() for rollout in rollouts]))
    batch = batch.append(ray.get(critic.values.remote(batch)))
    print(f"the driver has {batch}")
    parts = batch.chunk(TRAINERS, balance="tokens")
    for number, (tokens, loss) in enumerate(ray.get([t.step.remote(part) for t, part in zip(trainers, parts, strict=True)])):
        print(f"trainer {number}: {len(parts[number])} rows, {tokens} tokens, loss {loss:.2f}")
    print(f"bytes of the batch that the driver read: {mr.stats()['batch_bytes_read']}")


if __name__ == "__main__":
    main()
