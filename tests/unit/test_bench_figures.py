"""Figures of benchmarks: median against target, the table, the lines of JSON, and a run that fails."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.__main__ import measure
from benchmarks.catalogue import BENCHMARKS, Benchmark
from benchmarks.figure import Figure, Goal, table
from benchmarks.site import Site


@pytest.mark.parametrize(
    ("target", "value", "holds"),
    [
        ("≥ 0.6", 0.6, True),
        ("≥ 0.6", 0.59, False),
        ("> 1.0; aim 1.5", 1.0, False),
        ("> 1.0; aim 1.5", 1.01, True),
        ("≤ 60", 61.0, False),
        ("0.95–1.05", 0.95, True),
        ("0.95–1.05", 1.06, False),
        ("report", 7.0, None),
        ("report; aim ≤ 60", 61.0, None),
    ],
)
def test_target_is_held_as_it_is_written(target: str, value: float, holds: bool | None) -> None:
    assert Goal("a", "what", "×", target).holds(value) is holds


def test_figure_is_the_median_of_its_runs_and_not_their_mean() -> None:
    figure = Figure.of(Goal("a.b", "what", "×", "≥ 0.6"), [0.1, 0.61234, 9.0])
    assert figure.line() == {
        "name": "a.b", "value": 0.612, "unit": "×", "target": "≥ 0.6", "holds": True, "runs": (0.1, 0.612, 9.0)
    }  # fmt: skip


def test_target_is_judged_before_the_value_is_rounded() -> None:
    assert not Figure.of(Goal("a.b", "what", "×", "≥ 0.6"), [0.5996]).holds


def test_table_keeps_the_order_of_goals_and_leaves_out_what_was_not_measured() -> None:
    goals = [Goal("b", "second", "/s"), Goal("a", "first", "×", "≥ 2"), Goal("c", "never run", "×")]
    lines = [Figure.of(goals[1], [1.5]).line(), Figure.of(goals[0], [12345.6]).line()]
    rows = table(goals, lines, {}).splitlines()[2:]
    assert rows == ["| `b` | second | 12,346 /s | report |  | 12,346 |", "| `a` | first | 1.5 × | ≥ 2 | **no** | 1.5 |"]


def test_row_of_another_day_stays_until_it_is_measured_anew(tmp_path: Path) -> None:
    goals = [Goal("a", "first", "×"), Goal("b", "second", "×")]
    file = tmp_path / "RESULTS.md"
    results.put_between_markers("x", "H", table(goals, [Figure.of(goal, [1.0]).line() for goal in goals], {}), file)
    former = results.rows_between_markers("x", file)
    rows = table(goals, [Figure.of(goals[1], [2.0]).line()], former).splitlines()[2:]
    assert rows == ["| `a` | first | 1.0 × | report |  | 1.0 |", "| `b` | second | 2.0 × | report |  | 2.0 |"]


def test_new_line_takes_the_place_of_the_former_one_of_its_name(tmp_path: Path) -> None:
    file = tmp_path / "build" / "bench.jsonl"
    results.keep(file, {"name": "a", "value": 1}, {"name": "b", "value": 2})
    results.keep(file, {"name": "a", "value": 3})
    assert results.lines(file) == [{"name": "b", "value": 2}, {"name": "a", "value": 3}]


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "RESULTS.md"
    file.write_text("# Results\n\nbefore\n")
    results.put_between_markers("x", "Heading", "one\n", file)
    file.write_text(file.read_text() + "\nafter\n")
    results.put_between_markers("x", "Heading", "two\n", file)
    text = file.read_text()
    assert text == "# Results\n\nbefore\n\n## Heading\n\n<!-- x: begin -->\ntwo\n<!-- x: end -->\n\nafter\n"


def test_benchmark_that_fails_in_a_run_is_named_and_the_others_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def bad(site: Site) -> Mapping[str, float]:
        """Fails in its second run."""
        if site.run:
            raise RuntimeError("199,999 rows for 200,000 requests")
        return {"x.bad": 1.0}

    def good(site: Site) -> Mapping[str, float]:
        """Gives the number of the run."""
        return {"x.good": float(site.run)}

    chosen = [Benchmark(f"x.{run.__name__}", run, (Goal(f"x.{run.__name__}", "what", "×"),)) for run in (bad, good)]
    assert measure(Site(tmp_path), chosen, 3, tmp_path / "lines") == ["x.bad"]
    assert [(line["name"], line["runs"]) for line in results.lines(tmp_path / "lines")] == [("x.good", [0.0, 1.0, 2.0])]
    assert "199,999 rows" in capsys.readouterr().err


def test_no_two_figures_of_the_catalogue_have_one_name() -> None:
    names = [goal.name for benchmark in BENCHMARKS for goal in benchmark.goals]
    assert len(names) == len(set(names))
