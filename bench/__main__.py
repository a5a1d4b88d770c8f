"""`python -m bench NAME [--json] [--quick] [--sizes SIZE ...] [--runs N]`."""

from __future__ import annotations

import argparse
import importlib
import sys

from bench import BENCHES, report


def parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:<14} {what}" for name, what in BENCHES.items())
    out = argparse.ArgumentParser(
        prog="python -m bench",
        description="Times this package against baselines that run interleaved with it.",
        epilog=f"benches:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("name", metavar="NAME", choices=BENCHES, help=f"one of: {', '.join(BENCHES)}")
    out.add_argument("--json", action="store_true", help="one JSON object a line instead of tables")
    out.add_argument("--quick", action="store_true", help="small payloads and few rounds: a minute or so")
    out.add_argument("--sizes", nargs="+", metavar="SIZE", help="only these payloads")
    out.add_argument("--runs", type=int, metavar="N", help="rounds of every case")
    return out


def main(arguments: list[str] | None = None) -> int:
    cli = parser()
    options = cli.parse_args(arguments)
    if options.runs is not None and options.runs < 1:
        cli.error("--runs must be at least 1")
    bench = importlib.import_module(f"bench.{options.name}")
    try:
        steps = bench.plan(options.sizes, quick=options.quick, runs=options.runs)
    except ValueError as e:
        cli.error(str(e))
    results: list[report.Result] = []
    try:
        for finished in bench.run(steps):
            results += finished
            for text in report.json_lines(finished) if options.json else report.tables(finished, bench.BASELINES):
                print(text, flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if not options.json:
        print(report.target_table(bench.targets(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
