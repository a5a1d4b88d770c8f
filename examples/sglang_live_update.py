"""A model is trained here and served by SGLang, which gets every step's weights while it answers.

RAY_AUTH_MODE=token python -m sglang.launch_server --model-path MODEL --custom-weight-loader mooncake_ray.engines.sglang.load
python examples/sglang_live_update.py MODEL http://127.0.0.1:30000
"""

from __future__ import annotations

import sys
import threading

import ray
import torch

import mooncake_ray as mr
from mooncake_ray.engines.sglang import SGLangEngine
from mooncake_ray.weights.layouts.checkpoint import checkpoint_names
from mooncake_ray.weights.source import ModuleSource

STEPS, TOKENS = 3, 192


@ray.remote(num_cpus=0)
class Trainer:
    def __init__(self, group: mr.WeightSyncGroup, model: str) -> None:
        import transformers

        self.module = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.member = group.trainer(ModuleSource(self.module, checkpoint_names(self.module.config)), 0, 1)

    def step(self) -> float:
        tokens = torch.randint(self.module.config.vocab_size, (2, 16))
        loss = self.module(tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def answer(engine: SGLangEngine, out: list) -> None:
    body = {"input_ids": [1, 2, 3, 4], "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}}
    out.append(engine.server.call("generate", body, timeout_s=300))


def main(model: str, url: str) -> None:
    mr.install()
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    group = mr.WeightSyncGroup("live")
    trainer = Trainer.remote(group, model)
    engine = SGLangEngine(url)
    engine.attach(group, "sglang")
    group.sync()
    for _ in range(STEPS):
        answers: list = []
        request = threading.Thread(target=answer, args=(engine, answers))
        request.start()
        loss = ray.get(trainer.step.remote())
        report = group.sync()
        request.join()
        spans = ", ".join(f"{s['end'] - s['start']} of version {s['version']}" for s in answers[0]["meta_info"]["weight_versions"])
        print(f"loss {loss:.3f}; version {report.version} by {report.mode}, paused for {report.pause_s * 1e3:.0f} ms; tokens: {spans}")
    print(f"the engine serves version {engine.weight_version}")
    engine.detach()
    group.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
