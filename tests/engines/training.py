"""A tiny model that is trained by torch in a Ray actor, and what it says to prompts."""

from __future__ import annotations

from pathlib import Path

import ray
import torch

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_experts": 4}
PROMPT = 5
CLEAR = 0.03
"""A margin between the likeliest token and the next that numbers of another order of additions do not close."""


def made(kind: str) -> torch.nn.Module:
    """A Qwen3 of a kind ("dense", with tied embeddings, or "moe"), the same each time."""
    import transformers as t

    torch.manual_seed(7)
    common = SIZES | {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.1}
    if kind == "dense":
        module = t.Qwen3ForCausalLM(t.Qwen3Config(**common, tie_word_embeddings=True))
    else:
        module = t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**common, **EXPERTS))
    return module.to(torch.bfloat16)


def save(module: torch.nn.Module, folder: Path) -> None:
    """A checkpoint as they are published."""
    module.save_pretrained(folder)


class Trained:
    """The model, while it is trained."""

    def __init__(self, kind: str) -> None:
        self.module = made(kind)
        self.draw = torch.Generator().manual_seed(1)
        self.more = {"output_router_logits": True} if kind == "moe" else {}

    def step(self, rate: float = 1e-2) -> float:
        """Of training, on noise. Returns the loss."""
        tokens = torch.randint(SIZES["vocab_size"], (2, 16), generator=self.draw)
        optimizer = torch.optim.SGD(self.module.parameters(), lr=rate)
        loss = self.module(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def nudge(self, every: int) -> None:
        """Changes one element of so many."""
        with torch.no_grad():
            for tensor in self.module.parameters():
                tensor.view(-1)[::every] *= 1.5

    def save(self, folder: str) -> None:
        save(self.module, Path(folder))

    def tokens(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        """Greedy ones, and the smallest margin by which one of them was the likeliest."""
        out, margin = list(prompt), float("inf")
        with torch.no_grad():
            for _ in range(count):
                logits = self.module(torch.tensor([out])).logits[0, -1].float()
                first, second = logits.topk(2).values.tolist()
                margin = min(margin, first - second)
                out.append(int(logits.argmax()))
        return out[len(prompt) :], margin

    def clear(self, count: int, tokens: int, margin: float = CLEAR) -> list[tuple[list[int], list[int]]]:
        """Prompts whose next tokens leave no doubt (they are likeliest by that margin), and these: greedy, of the weights as they are now."""
        found: list[tuple[list[int], list[int]]] = []
        while len(found) < count:
            prompts = torch.randint(SIZES["vocab_size"], (64, PROMPT), generator=self.draw)
            margins, routes, out = torch.full((64,), float("inf")), torch.full((64,), float("inf")), prompts
            with torch.no_grad():
                for _ in range(tokens):
                    said = self.module(out, **self.more)
                    top = said.logits[:, -1].float().topk(2)
                    margins = margins.minimum(top.values[:, 0] - top.values[:, 1])
                    for router in said.router_logits if self.more else ():  # who is nearly chosen may be chosen by others
                        best = router.float().view(*out.shape, -1).topk(EXPERTS["num_experts_per_tok"] + 1).values
                        routes = routes.minimum((best[..., -2] - best[..., -1]).amin(dim=1))
                    out = torch.cat((out, top.indices[:, :1]), dim=1)
            clear = out[(margins > margin) & (routes > CLEAR)].tolist()
            found += [(row[:PROMPT], row[PROMPT:]) for row in clear]
        return found[:count]


@ray.remote(num_cpus=0)
class Training(Trained):
    """In an actor."""

    def __init__(self, kind: str) -> None:
        import mooncake_ray

        mooncake_ray.install()
        torch.set_num_threads(1)
        super().__init__(kind)

    def join(self, group) -> None:
        from mooncake_ray.weights.layouts.checkpoint import checkpoint_names
        from mooncake_ray.weights.source import ModuleSource

        self.member = group.trainer(ModuleSource(self.module, checkpoint_names(self.module.config)), 0, 1)
