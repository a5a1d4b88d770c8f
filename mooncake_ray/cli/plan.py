"""`mooncake-ray plan`: what would a sync of weights between two layouts move, over which links, and how long would it take?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncake_ray.cli.text import count, size, table
from mooncake_ray.config import parse_bytes
from mooncake_ray.errors import ConfigError

if TYPE_CHECKING:
    from mooncake_ray.weights.plan import Delivery, Publication
    from mooncake_ray.weights.traffic import Prediction, Traffic

__all__ = ["add", "draw", "lines"]

_EXAMPLES = """\
layouts:
  Sizes of parallel groups: tp, pp, ep, etp (tensor parallelism of experts), dp, cp, vpp. A trainer's are Megatron's; dp is that of all but
  experts, so there are tp x cp x dp x pp ranks. An engine's dp counts all copies of it, of all engines together.

examples:
  mooncake-ray plan qwen3-30b-a3b ep=8,etp=1,tp=2,dp=8 tp=4,dp=4
  mooncake-ray plan kimi-k2 tp=8,pp=8,ep=32,etp=1,dp=4 ep=32,dp=64 --nic-gbit 400 --png k2.png
  mooncake-ray plan ./my-model/config.json tp=4 tp=2,dp=2 --colocate
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "plan",
        help="what would a sync of weights move, and how long would it take?",
        description="Plans how a model's weights go from a trainer's layout to an engine's, as a running sync does, and prints what would move "
        "over which links. Nothing is started, and no weights are read.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "model", metavar="MODEL", help="a built-in model's name (--models lists them), or a path to a config.json of Hugging Face"
    )
    p.add_argument("trainer", metavar="TRAINER", help='the trainer\'s layout: "tp=8,pp=4,ep=32,etp=1,dp=16"')
    p.add_argument("engine", metavar="ENGINE", help='the engines\' layout: "tp=8,dp=4"')
    p.add_argument("--models", action=_Models, help="list the built-in models")
    p.add_argument("--dtype", metavar="DTYPE", help="of the weights (default: the config's, or bfloat16)")
    p.add_argument("--ranks-per-host", type=int, default=8, metavar="N", help="of trainers and of engines (default: 8)")
    p.add_argument("--colocate", action="store_true", help="the engines are on the trainers' hosts")
    p.add_argument("--hosts-per-rack", type=int, default=0, metavar="N", help="hosts of other racks are farther away (default: all alike)")
    p.add_argument("--nics", type=int, default=0, metavar="N", help="network devices of a host (default: one a rank)")
    p.add_argument(
        "--nic-gbit", type=float, default=400.0, metavar="GBIT", help="speed of each, in Gbit/s in each direction (default: 400)"
    )
    p.add_argument("--host-copy", default="100GB", metavar="SIZE", help="that a host copies in memory in a second (default: 100GB)")
    p.add_argument("--bucket", default="64MiB", metavar="SIZE", help="about the size of what is published in one piece (default: 64MiB)")
    p.add_argument("--limit", type=int, default=20, metavar="N", help="at most so many links, the busiest first (default: 20)")
    p.add_argument("--png", type=Path, metavar="FILE", help="draw the bytes from host to host as a heat map (needs matplotlib)")
    p.add_argument("--json", action="store_true", help="one JSON document")
    p.set_defaults(run=run)


class _Models(argparse.Action):
    """Prints the names and ends."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from mooncake_ray.weights.models import MODELS, tensors_of

        rows = []
        for name, config in MODELS.items():
            metas = [t.meta for t in tensors_of(config)]
            rows.append(
                (name, f"{sum(m.nbytes // m.itemsize for m in metas) / 1e9:.1f} B", str(len(metas)), str(config["num_hidden_layers"]))
            )
        print("\n".join(table(("MODEL", "PARAMETERS", "TENSORS", "LAYERS"), rows, right=(1, 2, 3))))
        parser.exit()


def run(args: argparse.Namespace) -> int:
    for name in ("ranks_per_host", "limit"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for name in ("nics", "hosts_per_rack"):
        if getattr(args, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must not be negative, got {getattr(args, name)}")
    if not 0 < args.nic_gbit < 1e6:
        raise ConfigError(f"--nic-gbit must be from 0 to a million, got {args.nic_gbit}")
    copy, bucket = parse_bytes(args.host_copy), parse_bytes(args.bucket)
    if copy < 1 or bucket < 1 << 10:
        raise ConfigError(f"--host-copy must be positive, and --bucket at least 1 KiB; got {args.host_copy} and {args.bucket}")
    draw_to = _drawing(args.png) if args.png else None

    from mooncake_ray.weights.described import Parallel, described, joined, on_hosts  # here, as NumPy takes longer to import than to run
    from mooncake_ray.weights.models import config_of
    from mooncake_ray.weights.plan import deliver_plan, divide, publish_plan
    from mooncake_ray.weights.traffic import Speeds, traffic_of

    config = config_of(args.model)
    source = described(config, Parallel.parse(args.trainer), engine=False, dtype=args.dtype)
    target = described(config, Parallel.parse(args.engine), engine=True, dtype=args.dtype)
    prefixes = ("host", "host") if args.colocate else ("trainer", "engine")
    places = [
        on_hosts(p.ranks, args.ranks_per_host, prefix, args.hosts_per_rack) for p, prefix in zip((source, target), prefixes, strict=True)
    ]
    topology = joined(*places, nics=args.nics or args.ranks_per_host)
    publication = publish_plan(source, topology=topology, target=target, bucket_bytes=bucket)
    delivery = deliver_plan(publication, divide(target, bucket, publication), topology=topology)
    traffic = traffic_of(publication, delivery, topology)
    prediction = traffic.predict(Speeds(args.nic_gbit * 1e9 / 8, copy))
    if args.json:
        print(json.dumps(_document(publication, delivery, traffic, prediction), indent=2))
    else:
        print("\n".join(lines(publication, delivery, traffic, prediction, args.limit)))
    if draw_to:
        draw_to(traffic, f"{args.model}: {args.trainer} to {args.engine}")
    return 0


def lines(publication: Publication, delivery: Delivery, traffic: Traffic, prediction: Prediction, limit: int) -> list[str]:
    """What moves, then how long it takes, then the links."""
    load, got, total = publication.load, delivery.load, int(publication.nbytes.sum())
    spread = load.max() / load.mean() if total else 1.0
    tensors = count(len({*publication.tensor.tolist()}), "tensor")
    objects, buckets = count(len(publication.objects), "object"), count(publication.buckets, "bucket")
    trainers = f"{count(len(load), 'rank')} on {count(len(traffic.sources), 'host')}"
    engines = f"{count(len(got), 'rank')} on {count(len(traffic.targets), 'host')}"
    wanted, most = size(int(traffic.applied.sum())), size(int(got.max(initial=0)))
    out = [
        f"model     {size(total)} in {tensors}, published as {count(len(publication), 'region')} in {objects} of {buckets}",
        f"trainers  {trainers} send {size(traffic.leaving)}, {size(int(load.max(initial=0)))} at most, {spread:.3f} of the mean",
        f"engines   {engines} want {wanted} in {count(delivery.units, 'unit')}: {size(traffic.leaving)} from trainers ({most} a rank at most),",
        f"          the rest from each other, {size(int(traffic.relay.sum()))} of it from host to host",
        f"plan      {publication.digest[:16]} / {delivery.digest[:16]}",
        "",
        f"publish   {_time(prediction.publish_s)}  (training waits)",
        f"move      {_time(prediction.move_s)}  (bound by {prediction.bound_by}; receivers' links alone need {_time(prediction.floor_s)})",
        f"apply     {_time(prediction.apply_s)}  (engines pause)",
        "",
    ]
    links = _links(traffic)
    rows = [(a, b, size(read), size(relay)) for a, b, read, relay in links[:limit]]
    out += table(("FROM", "TO", "READ", "RELAYED"), rows, right=(2, 3))
    if len(links) > limit:
        out.append(f"and {count(len(links) - limit, 'link')} more")
    return out


def _links(traffic: Traffic) -> list[tuple[str, str, int, int]]:
    """(from, to, bytes read, bytes relayed), the busiest first."""
    found: dict[tuple[str, str], list[int]] = {}
    for kind, (senders, matrix) in enumerate(((traffic.sources, traffic.read), (traffic.targets, traffic.relay))):
        for i, j in zip(*matrix.nonzero(), strict=True):
            found.setdefault((senders[i], traffic.targets[j]), [0, 0])[kind] += int(matrix[i, j])
    return sorted(((a, b, *n) for (a, b), n in found.items()), key=lambda link: (-link[2] - link[3], link[:2]))


def _document(publication: Publication, delivery: Delivery, traffic: Traffic, prediction: Prediction) -> dict[str, Any]:
    load, got = publication.load, delivery.load
    return {
        "digests": {"publication": publication.digest, "delivery": delivery.digest},
        "model_bytes": int(publication.nbytes.sum()),
        "regions": len(publication),
        "objects": len(publication.objects),
        "units": delivery.units,
        "sent": {"bytes": traffic.leaving, "max": int(load.max(initial=0)), "mean": float(load.mean()) if len(load) else 0.0},
        "received": {"max": int(got.max(initial=0)), "mean": float(got.mean()) if len(got) else 0.0},
        "relayed_bytes": int(traffic.relay.sum()),
        "seconds": asdict(prediction),
        "links": [{"from": a, "to": b, "read_bytes": read, "relayed_bytes": relay} for a, b, read, relay in _links(traffic)],
    }


def _drawing(path: Path) -> Any:
    """What draws to that path; fails at once where it cannot."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--png needs matplotlib: pip install matplotlib") from None
    if not path.parent.is_dir():
        raise ConfigError(f"--png: there is no directory {path.parent}")
    matplotlib.use("Agg")
    return lambda traffic, title: draw(traffic, title, path)


def draw(traffic: Traffic, title: str, path: Path) -> None:
    """Bytes from host (rows) to host (columns), reads and relays together."""
    from matplotlib import pyplot as plt
    from matplotlib.colors import PowerNorm

    senders, matrix = traffic.matrix()
    across, down = (min(24.0, max(4.0, 0.28 * n)) for n in matrix.shape[::-1])
    figure, axes = plt.subplots(figsize=(across + 3, down + 2), layout="constrained")
    image = axes.imshow(matrix / (1 << 30), cmap="viridis", aspect="auto", interpolation="nearest", norm=PowerNorm(0.5))
    figure.colorbar(image, ax=axes, label="GiB")
    for axis, names, label in ((axes.xaxis, traffic.targets, "receives"), (axes.yaxis, senders, "sends")):
        step = -(-len(names) // 64)  # more names than that cannot be read
        axis.set_ticks(range(0, len(names), step), names[::step], fontsize=7)
        axis.set_label_text(label)
    axes.tick_params(axis="x", rotation=90)
    axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"drawn: {path}", file=sys.stderr)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
