"""The demo's tables."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from headrace.demo.verdict import Verdict
from storage.cost import CostReport
from storage.reports import Amount, LatencyLine, Percentiles

_NS_PER_S = 1_000_000_000
_SHOWN = 5


def throughput(lines: Iterable[LatencyLine]) -> Table:
    """Per class and bucket: count, outcomes, rates, percentiles of queue, inference and total."""
    table = _table("Per class and bucket (times: P50 / P95 / P99, seconds)")
    for name in ("class", "bucket"):
        table.add_column(name)
    table.add_column("count", justify="right")
    table.add_column("outcomes")
    for name in ("req/s", "tokens/s", "queue", "inference", "total"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(
            line.class_name,
            line.bucket,
            f"{line.count:,}",
            ", ".join(f"{status} {count:,}" for status, count in line.outcomes.items()),
            f"{line.requests_per_s:.1f}",
            f"{line.tokens_per_s:,.0f}",
            *(_percentiles(value) for value in (line.queue_ms, line.inference_ms, line.latency_ms)),
        )
    return table


def windows(metrics_page: str) -> Table:
    """Sizes of the windows in which requests were pulled, from a worker's metrics page."""
    table = _table("Windows (requests pulled together)")
    table.add_column("class")
    for name in ("windows", "requests", "mean size", "P50 ≤", "P95 ≤"):
        table.add_column(name, justify="right")
    for class_name, (count, total, buckets) in sorted(_histogram(metrics_page, "headrace_window_requests").items()):
        quantiles = [next((f"{edge:g}" for edge, below in buckets if below >= q * count), "-") for q in (0.5, 0.95)]
        mean = f"{total / count:.1f}" if count else "-"
        table.add_row(class_name, f"{count:,.0f}", f"{total:,.0f}", mean, *quantiles)
    return table


def cost(report: CostReport) -> Table:
    """By business line on both bases, then the lines that no tenant pays, down to the bill."""
    table = _table("Cost by business line, both bases (USD)")
    table.add_column("line")
    for name in ("requests", "prompt tok", "cached", "output tok", "charge", "GPU time", "allocated"):
        table.add_column(name, justify="right")
    for line in report.lines:
        tokens = (line.prompt_tokens, line.cached_tokens, line.output_tokens)
        allocated = Amount(line.allocated_ns, line.allocated_usd)
        table.add_row(
            line.name or "(none)",
            f"{line.requests:,}",
            *(f"{count:,}" for count in tokens),
            _usd(Fraction(line.charge_usd)),
            *_amount(allocated),
        )
    table.add_section()
    for name, amount in report.unpaid.items():
        if amount.ns:
            table.add_row(f"[dim]{name.replace('_', ' ')}[/]", "", "", "", "", "", *_amount(amount))
    table.add_section()
    charged = _usd(report.charge_usd)
    table.add_row("sum of lines", f"{report.requests:,}", "", "", "", charged, *_amount(report.total))
    table.add_row("bill (provisioned time × price)", "", "", "", "", "", *_amount(report.bill))
    return table


def print_verdict(console: Console, verdict: Verdict) -> None:
    """Lost, doubled, unreconciled: a line each, with the first culprits."""
    rows: list[tuple[str, list[str]]] = [
        ("lost", verdict.lost),
        ("without a result on the topic", verdict.unpublished),
        ("doubled", verdict.doubled),
        ("reconciliation", [str(finding) for finding in verdict.findings]),
    ]
    console.print(f"[bold]Of {verdict.published:,} published:[/]")
    for name, culprits in rows:
        console.print(f"  {name}: [{'red' if culprits else 'green'}]{len(culprits)}[/]")
        for culprit in culprits[:_SHOWN]:
            console.print(f"    {culprit}", markup=False)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", header_style="bold")


def _percentiles(value: Percentiles | None) -> str:
    return "-" if value is None else " / ".join(_seconds(ms / 1000) for ms in (value.p50, value.p95, value.p99))


def _seconds(value: float) -> str:
    digits = 3 if value < 1 else 2 if value < 10 else 1
    return f"{value:,.{digits}f}"


def _usd(amount: Fraction) -> str:
    return f"{float(amount):.6f}"


def _amount(amount: Amount) -> tuple[str, str]:
    return f"{amount.ns / _NS_PER_S:.3f} s", _usd(amount.usd)


def _histogram(page: str, name: str) -> dict[str, tuple[float, float, list[tuple[float, float]]]]:
    """Class → (count, sum, [(upper edge, count at or below it)])."""
    found: dict[str, tuple[float, float, list[tuple[float, float]]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples if family.name == name else ():
            count, total, buckets = found.get(sample.labels["class"], (0.0, 0.0, []))
            if sample.name.endswith("_count"):
                count = sample.value
            elif sample.name.endswith("_sum"):
                total = sample.value
            elif sample.name.endswith("_bucket"):
                buckets.append((float(sample.labels["le"]), sample.value))
            found[sample.labels["class"]] = (count, total, buckets)
    return found
