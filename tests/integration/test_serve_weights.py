"""The endpoint on Ray Serve: what other programs fetch is the model; replicas may die; nothing in use goes away."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import ray
import torch
from waiting import eventually
from weight_actors import TrainerRank, model

from mooncake_ray.errors import SnapshotNotFoundError
from mooncake_ray.serve.client import WeightClient
from mooncake_ray.sync.group import WeightSyncGroup
from mooncake_ray.testing import Allowed
from mooncake_ray.weights.snapshot import SnapshotStore
from mooncake_ray.weights.source import ModuleSource, StateDictSource

TOKEN = "let me in"
URL = "http://127.0.0.1:8099"
COMMAND = str(Path(sys.executable).with_name("mooncake-ray"))


FROM_HUB = """
import sys, torch
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained("any/name", revision="1", dtype=torch.bfloat16).save_pretrained(sys.argv[1])
"""


@pytest.fixture
def leaks_allowed():
    """Serve keeps its controller and proxy, and this process its threads to them, until Ray ends."""
    threads = ("*",)
    return Allowed(threads=threads, descriptors=("*",), maps=("*",), processes=("*",), pool_bytes=1 << 40, deadline_s=30.0)


@pytest.fixture(scope="module")
def serving(pool_ray):
    from ray import serve

    serve.start(http_options={"host": "127.0.0.1", "port": 8099})
    yield serve
    serve.shutdown()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A tiny model of a known family, and a folder with its configuration."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        tie_word_embeddings=False, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    made = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    config.save_pretrained(folder)
    made.generation_config.save_pretrained(folder)
    return made, folder


@pytest.fixture(scope="module")
def endpoint(serving, qwen, tmp_path_factory):
    from mooncake_ray.serve import run

    made, folder = qwen
    store = SnapshotStore(tmp_path_factory.mktemp("served") / "store", fsync=False)
    store.save(1, ModuleSource(made))
    handle = run(store.directory, files=str(folder), publish_token=TOKEN, keep=1, linger_s=0.2, max_poll_s=5.0)
    yield handle, store
    serving.delete("weights")


def generated(folder, made):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    prompt = torch.arange(1, 9)[None]
    ours, theirs = (m.generate(prompt, max_new_tokens=8, do_sample=False) for m in (made, loaded))
    return torch.equal(ours, theirs) and all(torch.equal(a, b) for a, b in zip(made.parameters(), loaded.parameters(), strict=True))


@pytest.mark.parametrize("how", ["urllib", "curl", "client", "command", "hub"])
def test_transformers_loads_what_was_fetched(endpoint, qwen, tmp_path, how):
    names = [f["name"] for f in json.load(urllib.request.urlopen(f"{URL}/v1/versions/latest", timeout=200))["files"]]
    assert names == ["model.safetensors", "config.json", "generation_config.json"]
    if how == "client":
        WeightClient(URL).download("latest", tmp_path)
    elif how == "command":
        done = subprocess.run([COMMAND, "pull", URL, tmp_path], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout.startswith("version 1: 3 files"), done.stdout + done.stderr
    elif how == "hub":
        env = os.environ | {"HF_ENDPOINT": f"{URL}/hub", "HF_HOME": str(tmp_path / "cache"), "NO_PROXY": "*"}
        done = subprocess.run([sys.executable, "-c", FROM_HUB, tmp_path], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    elif how == "curl" and shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    else:
        for name in names:
            address = f"{URL}/v1/versions/latest/files/{name}"
            if how == "urllib":
                with urllib.request.urlopen(address, timeout=200) as answer:
                    (tmp_path / name).write_bytes(answer.read())
            else:
                subprocess.run(["curl", "-fsSL", "-o", tmp_path / name, address], check=True, timeout=200)
    assert generated(tmp_path, qwen[0])


def test_ranges_and_tags_of_a_plain_client(endpoint):
    address = f"{URL}/v1/versions/1/files/model.safetensors"
    whole = urllib.request.urlopen(address, timeout=200)
    data, tag = whole.read(), whole.headers["ETag"]
    assert int(whole.headers["Content-Length"]) == len(data)

    def get(**headers):
        try:
            answer = urllib.request.urlopen(
                urllib.request.Request(address, headers={k.replace("_", "-"): v for k, v in headers.items()}), timeout=200
            )
        except urllib.error.HTTPError as e:
            answer = e
        with answer:
            return answer.status, answer.read(), answer.headers.get("Content-Range")

    assert get(Range="bytes=100-199") == (206, data[100:200], f"bytes 100-199/{len(data)}")
    assert get(Range="bytes=-5")[:2] == (206, data[-5:])
    assert get(Range="bytes=0-1", If_Range=tag)[0] == 206
    assert get(Range="bytes=0-1", If_Range='"other"')[:2] == (200, data)
    status, said, content_range = get(Range=f"bytes={len(data)}-")
    assert (status, content_range) == (416, f"bytes */{len(data)}") and json.loads(said)["status"] == 416
    assert get(If_None_Match=tag)[0] == 304


def test_a_handle_gives_refs_of_the_pool(endpoint, qwen):
    """In-cluster readers: payloads do not go through the replica."""
    handle, _ = endpoint
    mine = dict(qwen[0].state_dict())
    names = ["lm_head.weight", "model.norm.weight"]
    refs = handle.tensor_refs.remote("latest", names).result(timeout_s=200)
    assert list(refs) == names and all(isinstance(r, ray.ObjectRef) for r in refs.values())
    assert all(torch.equal(ray.get(ref, timeout=200), mine[name]) for name, ref in refs.items())
    again = handle.tensor_refs.remote("latest", names).result(timeout_s=200)
    assert again == refs  # they are not put twice
    manifest = handle.manifest.remote().result(timeout_s=200)
    assert manifest["model.norm.weight"]["shape"] == (64,) and len(manifest) == len(mine)
    with pytest.raises(SnapshotNotFoundError):
        handle.tensor_refs.remote(99).result(timeout_s=200)


def test_only_who_has_the_token_publishes(endpoint):
    request = urllib.request.Request(f"{URL}/v1/versions/50", b"x", method="PUT")
    for token, status in ((None, 401), ("wrong", 403)):
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=200)
        with error.value as answer:
            assert (answer.code, answer.headers["Content-Type"]) == (status, "application/problem+json")


def replica():
    """The actor."""
    (name,) = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if "Endpoint" in a["name"] and "REPLICA" in a["name"]]
    return ray.get_actor(name, namespace="serve")


def big(mib, seed):
    torch.manual_seed(seed)
    return {f"layers.{n}.w": torch.randint(0, 1 << 30, (1 << 17,), dtype=torch.int64).view(1024, 128) for n in range(mib)}


def test_a_replica_that_is_killed_while_a_version_is_read(serving, endpoint, tmp_path):
    """The client goes on with the one that Serve starts in its place."""
    client = WeightClient(URL, token=TOKEN, connections=2)
    tensors = big(64, 1)
    client.publish(20, tensors)
    victim, killed = replica(), []
    address = urlsplit(client._caller.address("GET", "versions/20/files/model.safetensors", until=time.monotonic() + 200))
    port = address.hostname, address.port

    def kill(there, total):
        if there > total // 4 and not killed:
            killed.append(there)
            with socket.create_connection(port, 60) as s:
                ray.kill(victim)
                with contextlib.suppress(ConnectionError):
                    s.recv(1)  # returns when it is gone

    got = client.download(20, tmp_path / "got", on_progress=kill, timeout_s=240)
    assert killed and got.broken and got.version == 20
    import safetensors.torch

    found = safetensors.torch.load_file(tmp_path / "got" / "model.safetensors")
    assert all(torch.equal(found[name], t) for name, t in tensors.items())


def test_what_is_pinned_or_read_survives_retention(endpoint):
    client = WeightClient(URL, token=TOKEN)
    tensors = {"w": torch.arange(8.0)}
    client.publish(30, tensors)
    with client.pin(30):
        for version in (31, 32):
            client.publish(version, tensors)
        eventually(lambda: client.versions() == [30, 32], "all but the newest and the pinned one are deleted")
        assert torch.equal(client.tensors(30)["w"], tensors["w"])
    eventually(lambda: client.versions() == [32], "what is not pinned any more is deleted")


def test_many_readers(endpoint, tmp_path):
    """64 at a time, of a port that makes fewer transfers: all get all of it."""
    client = WeightClient(URL, token=TOKEN)
    tensors = big(4, 2)
    client.publish(40, tensors)
    wrong, answers = [], []

    def read():
        found = WeightClient(URL, timeout_s=240).tensors(40)
        answers.append(1)
        wrong.extend(name for name, t in tensors.items() if not torch.equal(found[name], t))

    readers = [threading.Thread(target=read) for _ in range(64)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert len(answers) == 64 and not wrong


def test_new_versions_are_told_of(endpoint):
    """Through Serve's proxy: to a request that waits, and as an event of a stream that is open meanwhile."""
    client = WeightClient(URL, token=TOKEN)
    newest, found = client.versions()[-1], []
    with urllib.request.urlopen(f"{URL}/v1/events?limit=1&after={newest}", timeout=200) as events:
        assert events.headers["Content-Type"].startswith("text/event-stream")
        assert events.readline() == b"retry: 1000\n"
        waiting = threading.Thread(target=lambda: found.append(client.wait(newest)))
        waiting.start()
        client.publish(newest + 1, {"w": torch.ones(2)})
        assert f"id: {newest + 1}\nevent: version\n" in events.read().decode()
    waiting.join()
    assert found == [newest + 1]


def test_versions_of_a_group_are_stored(serving, tmp_path):
    """The endpoint is one more engine; what it stores is what trainers published."""
    from mooncake_ray.serve import run

    group = WeightSyncGroup("served")
    trainers = [TrainerRank.remote(group, "trainer", rank, 2) for rank in range(2)]
    ray.get([t.ready.remote() for t in trainers], timeout=120)
    run(tmp_path, name="grouped", route_prefix="/grouped", group="served", publish_token=TOKEN)
    try:
        client = WeightClient(f"{URL}/grouped", token=TOKEN)
        eventually(lambda: "endpoint" in group.versions(), "the endpoint joins the group")
        for version in (1, 2):
            ray.get([t.train.remote(version) for t in trainers], timeout=200)
            group.sync(version, timeout_s=120)
            with pytest.raises(SnapshotNotFoundError, match=f"at version {version}, not at 9"):
                client.store(9)
            assert client.store(version) == version
            expected = model(version)
            found = client.tensors(version)
            assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in expected)
        assert client.versions() == [1, 2]
    finally:
        serving.delete("grouped")
        group.shutdown()
        for trainer in trainers:
            ray.kill(trainer)


@pytest.mark.slow
def test_the_command(tmp_path):
    """`mooncake-ray serve`, with a Ray of its own."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    SnapshotStore(tmp_path / "store", fsync=False).save(5, StateDictSource({"w": torch.ones(3)}))
    env = {k: v for k, v in os.environ.items() if k != "RAY_RUNTIME_ENV_HOOK" and not k.startswith("MOONCAKE_RAY")}
    command = [COMMAND, "serve", "--store", str(tmp_path / "store"), "--port", str(port), "--address", "local"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = process.stdout.readline()
            assert said.startswith("serving "), said + process.stderr.read()
            assert torch.equal(WeightClient(f"http://127.0.0.1:{port}").tensors(5)["w"], torch.ones(3))
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0
        finally:
            process.kill()
