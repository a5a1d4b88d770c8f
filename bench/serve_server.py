"""The endpoint on a Ray of its own, over a store: `python -m bench.serve_server DIR`. Says its URL, and ends when stdin does."""

from __future__ import annotations

import socket
import sys


def main(directory: str) -> None:
    import ray
    from ray import serve

    from mooncake_ray.serve import run

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        run(directory)
        print(f"http://127.0.0.1:{port}/v1/versions/latest/files/model.safetensors", flush=True)
        sys.stdin.read()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
