"""``make bench`` from end to end, on a fiftieth of the cheapest benchmark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks import pipeline, results
from benchmarks.site import ROOT


def test_quick_try_measures_a_benchmark_and_its_figures_do_not_pass_for_figures(tmp_path: Path) -> None:
    argv = ["pipeline.vs_bare", "--scale", "0.02", "--runs", "1", "--build", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *argv], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = {line["name"]: line for line in results.lines(tmp_path / "bench-tried.jsonl")}
    assert figures.keys() == {goal.name for goal in pipeline.VS_BARE}
    assert all(line["value"] > 0 and len(line["runs"]) == 1 for line in figures.values())
    assert "| `pipeline.vs_bare` |" in done.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["bench-tried.jsonl"]
