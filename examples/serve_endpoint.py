"""Trains a tiny Qwen3, saves a version after every few steps, and serves them over HTTP. A program that knows nothing of this package fetches
one by plain HTTP, and has transformers load it and write.

    python examples/serve_endpoint.py
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import ray
import torch
from ray import serve
from transformers import Qwen3Config, Qwen3ForCausalLM

from mooncake_ray.serve import WeightClient, run
from mooncake_ray.weights.snapshot import SnapshotStore
from mooncake_ray.weights.source import ModuleSource

STEPS, EVERY = 60, 20
TEXT = torch.tensor([list(b"the quick brown fox jumps over the lazy dog. ") * 3])

CLIENT = """
import json, sys, urllib.request
from pathlib import Path
url, folder = sys.argv[1], Path(sys.argv[2])
folder.mkdir()
about = json.load(urllib.request.urlopen(f"{url}/v1/versions/latest"))
for file in about["files"]:
    with urllib.request.urlopen(f"{url}/v1/versions/{about['version']}/files/{file['name']}") as answer:  # is sent on to a data port
        (folder / file["name"]).write_bytes(answer.read())
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
prompt = torch.tensor([list(b"the quick ")])
wrote = model.generate(prompt, max_new_tokens=33, do_sample=False)
print(f"version {about['version']} writes: {bytes(wrote[0].tolist()).decode(errors='replace')}")
"""


def train(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """The loss at the end."""
    for _ in range(steps):
        loss = model(TEXT, labels=TEXT).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def main() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            config.save_pretrained(home / "config")
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            run(home / "store", files=str(home / "config"), host="127.0.0.1")
            url = f"http://127.0.0.1:{port}"
            client, store = WeightClient(url), SnapshotStore(home / "store", keep=2)
            for version in range(EVERY, STEPS + 1, EVERY):
                loss = train(model, optimizer, EVERY)
                store.save(version, ModuleSource(model))
                print(f"step {client.wait(version - EVERY)}: loss {loss:.2f}; served: {client.versions()}")
            plain = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MOONCAKE_RAY"))}
            done = subprocess.run(
                [sys.executable, "-c", CLIENT, url, str(home / "fetched")], env=plain, capture_output=True, text=True, timeout=240
            )
            if done.returncode:
                raise RuntimeError(done.stderr)
            print(done.stdout, end="")
            got = client.download("latest", home / "again")  # in parallel, compared with digests, goes on where it was interrupted
            print(f"fetched again by the client: version {got.version}, {got.nbytes} bytes in {len(got.files)} files")
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
