"""``python -m benchmarks [NAME_OR_PREFIX…] [--runs N] [--scale X] [--list]``: figures as JSON lines, and their table.

Exit status 1 when a benchmark could not be measured. A missed target is a figure, not a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import psycopg

from benchmarks import machine, results
from benchmarks.catalogue import BENCHMARKS, Benchmark
from benchmarks.figure import Figure, table
from benchmarks.site import ROOT, Site
from contract.settings import ENV_PREFIX
from headrace.stack.processes import interrupt_on_signals

_BUILD = ROOT / "build"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    unknown = [word for word in options.names if not any(each.is_meant_by(word) for each in BENCHMARKS)]
    if unknown:
        print(f"no such benchmark: {', '.join(unknown)}; --list shows all", file=sys.stderr)
        return 2
    chosen = [each for each in BENCHMARKS if not options.names or any(map(each.is_meant_by, options.names))]
    if options.list:
        for benchmark in chosen:
            print(f"{benchmark.name}: {benchmark.what}")
            for goal in benchmark.goals:
                print(f"    {goal.name} ({goal.unit}; {goal.target}): {goal.what}")
        return 0
    interrupt_on_signals()
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX) and "__" in name]:
        del os.environ[name]  # nobody's own settings may decide a figure
    os.environ[f"{ENV_PREFIX}CONFIG"] = os.devnull
    # Figures of a quick try must not pass for figures.
    lines = options.build / ("bench.jsonl" if options.scale == 1 else "bench-tried.jsonl")
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    site = Site(folder, scale=options.scale)
    try:
        failed = measure(site, chosen, options.runs, lines)
        _show(site, lines, to_results=options.scale == 1 and options.build == _BUILD)
    finally:
        site.stop()
        shutil.rmtree(folder, ignore_errors=True)
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME_OR_PREFIX", help="default: all")
    parser.add_argument("--runs", type=int, default=3, help="of each benchmark; a figure is their median")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="share of the requests, for a quick try that leaves the table alone"
    )
    parser.add_argument("--list", action="store_true", help="what there is to measure")
    parser.add_argument("--build", type=Path, default=_BUILD, help="folder of the JSON lines; another one: no table")
    return parser


def measure(site: Site, chosen: Sequence[Benchmark], runs: int, lines: Path) -> list[str]:
    """Measures ``chosen`` and keeps their figures in ``lines``; names of those that could not be measured."""
    failed = []
    for benchmark in chosen:
        try:
            figures = _figures(site, benchmark, runs)
        except Exception:  # noqa: BLE001 - the other benchmarks are still worth their run
            traceback.print_exc()
            failed.append(benchmark.name)
            continue
        for figure in figures:
            print(json.dumps(figure.line(), ensure_ascii=False), flush=True)
        results.keep(lines, *(figure.line() for figure in figures))
    return failed


def _figures(site: Site, benchmark: Benchmark, runs: int) -> list[Figure]:
    values = []
    for site.run in range(runs):
        values.append(benchmark.measure(site))
        print(f"{benchmark.name}, run {site.run + 1} of {runs}: {json.dumps(values[-1])}", file=sys.stderr, flush=True)
    return [Figure.of(goal, [run[goal.name] for run in values]) for goal in benchmark.goals]


def _show(site: Site, lines: Path, *, to_results: bool) -> None:
    goals = [goal for benchmark in BENCHMARKS for goal in benchmark.goals]
    if not to_results:
        print(table(goals, results.lines(lines), {}))
        return
    site.start()
    with psycopg.connect(site.postgres.url) as connection:
        version = connection.execute("SHOW server_version").fetchone()
    about = machine.describe(str(version[0]) if version else "")
    text = table(goals, results.lines(lines), results.rows_between_markers("bench"))
    results.put_between_markers("bench", "Speed (`make bench`)", f"{about}\n{text}")


if __name__ == "__main__":
    sys.exit(main())
