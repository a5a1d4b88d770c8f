"""An SGLang engine in a program of its own, without a server. Joins a group, and answers lines of JSON.

python sglang_in_process.py FOLDER GROUP ADDRESS
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1")


def main(folder: str, group: str, address: str) -> None:
    import sglang

    from mooncake_ray.engines.sglang import SGLangEngine

    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints is for the log
    engine = sglang.Engine(
        model_path=folder,
        device="cpu",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        cuda_graph_backend_decode="disabled",
        cuda_graph_backend_prefill="disabled",
        disable_overlap_schedule=True,
        grammar_backend="none",
        mem_fraction_static=0.2,
        max_total_tokens=2048,
        max_running_requests=4,
        context_length=256,
        sleep_on_idle=True,
        custom_weight_loader=["mooncake_ray.engines.sglang.load"],
    )

    def generate(prompt: list[int], tokens: int) -> dict:
        return engine.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True})

    generate([1, 2, 3], 2)  # its loop has run in this thread before
    handle = SGLangEngine.over(engine)
    handle.attach(group, "in-process", address=address)
    threads = ThreadPoolExecutor(1)
    print(json.dumps("attached"), file=said, flush=True)
    for line in sys.stdin:
        match json.loads(line):
            case ["generate", prompt, tokens]:
                answer = generate(prompt, tokens)["output_ids"]
            case ["start", prompt, tokens]:
                running = threads.submit(generate, prompt, tokens)
                answer = True
            case ["end"]:
                answer = running.result()["meta_info"]["weight_versions"]
            case ["state"]:
                answer = [handle.weight_version, handle.checksums()]
            case ["disk", path, version]:
                answer = handle.update_from_disk(path, version)
        print(json.dumps(answer), file=said, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
