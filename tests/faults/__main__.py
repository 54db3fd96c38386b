"""``python -m tests.faults [NAME…] [--rounds N] [--seed S]``: all faults, a line of JSON each, and their table.

Exit status 1 when a fault lost, doubled, charged twice or left something stuck, or could not be run to its end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from benchmarks import results
from tests.faults.catalogue import FAULTS, Fault
from tests.faults.row import Row
from tests.faults.site import Site

ROOT = Path(__file__).parents[2]
OUTAGE_S = 20.0
CREW = 6
LINES = ROOT / "build" / "faults.jsonl"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("tests.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(fault.name for fault in FAULTS))
    parser.add_argument("--rounds", type=int, help="of each fault (default: its own number)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    unknown = set(options.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [fault for fault in FAULTS if (fault.name in options.names if options.names else fault.rounds)]
    folder = Path(tempfile.mkdtemp(prefix="headrace-faults-"))
    site = Site(folder, outage_s=OUTAGE_S, crew=CREW)
    broken = []
    try:
        site.start()
        for fault in chosen:
            row = run(site, fault, options.rounds or fault.rounds or fault.test_rounds, options.seed)
            if row is None or not row.sound:
                broken.append(fault.name)
    finally:
        site.stop()
        shutil.rmtree(folder, ignore_errors=True)
    write_table()
    if broken:
        print(f"not sound: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


def run(site: Site, fault: Fault, rounds: int, seed: int) -> Row | None:
    """One fault's row, kept in ``build/faults.jsonl`` in place of its former one; None: it did not come to its end."""
    started = time.monotonic()
    try:
        row = fault.run(site, random.Random(seed), rounds)
    except Exception:  # noqa: BLE001 - the other faults are still worth their run
        traceback.print_exc()
        site.start()
        return None
    line = dataclasses.asdict(row) | {"seed": seed, "took_s": round(time.monotonic() - started)}
    print(json.dumps(line), flush=True)
    results.keep(LINES, line)
    return row


def write_table() -> None:
    """Puts the rows of ``build/faults.jsonl`` between the markers of RESULTS.md, beside those of other faults."""
    rows = results.rows_between_markers("faults")
    lines = {str(line["name"]): line for line in results.lines(LINES)}
    for fault in FAULTS:
        if (row := lines.get(fault.name)) is not None:
            rows[fault.name] = (
                f"| `{fault.name}` | {fault.what} | {row['rounds']} | {row['requests']} | {row['lost']} "
                f"| {row['doubled']} | {row['double_charged']} | {row['stuck']} "
                f"| {row['recovery_p50_s']} / {row['recovery_max_s']} | {fault.bound_s or ''} | {row['wasted_gpu_s']} "
                f"| {row['seed']} |\n"
            )
    head = (
        "| fault | what | rounds | requests | lost | doubled | charged twice | stuck | recovery P50 / max, s "
        "| bound, s | GPU s wasted | seed |\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n"
    )
    body = "".join(rows[fault.name] for fault in FAULTS if fault.name in rows)
    results.put_between_markers("faults", "Faults (`make faults`)", head + body)


if __name__ == "__main__":
    sys.exit(main())
