"""``headrace cost``: both bases, down to the bill; tariffs and prices."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from fractions import Fraction
from typing import Any

import click

from contract.money import plain
from headrace.commands._output import Moment, epoch_ms, json_line, open_store, text_table
from storage import cost
from storage.reports import GROUPS, Group

_SHOWN_DIGITS = 6
_NS_PER_S = 1_000_000_000


class _Usd(click.ParamType[Decimal]):
    """An exact amount, not negative."""

    name = "usd"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Decimal:
        text = str(value)
        if not text.replace(".", "", 1).isdecimal() or not text.isascii():
            self.fail(f"{text!r} is no amount of US dollars such as 0.15", param, ctx)
        return Decimal(text)


@click.group(invoke_without_command=True)
@click.option("--by", type=click.Choice(GROUPS), default="business_line", show_default=True, help="One line for each.")
@click.option("--since", type=Moment(), help="From this day or time on (UTC).")
@click.option("--until", type=Moment(), help="Up to this day or time, exclusive.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with everything.")
@click.pass_context
def command(
    context: click.Context, by: Group, since: dt.datetime | None, until: dt.datetime | None, as_json: bool
) -> None:
    """What was spent, by business line, type, model or day.

    charge_usd is what tenants pay, by tariff. allocated_usd is what it cost: the share of GPU time at the
    GPU's price. Below stand the lines that no tenant pays; all lines together are the bill.
    """
    if context.invoked_subcommand is not None:
        return
    with open_store() as store:
        report = cost.cost_report(store, by, epoch_ms(since), epoch_ms(until))
    click.echo(json_line(report.to_json()) if as_json else _as_text(report))


@command.command("list")
def list_() -> None:
    """Tariffs and GPU prices, oldest first."""
    with open_store() as store:
        prices, tariffs = store.prices()
    for title, rows in (("GPU prices, US dollars an hour", prices), ("Tariffs, US dollars a million tokens", tariffs)):
        columns = list(rows[0]) if rows else ["(none)"]
        click.echo(f"{title}\n{text_table(columns, [list(row.values()) for row in rows])}\n")


@command.group()
def tariff() -> None:
    """What tenants pay per million tokens."""


@tariff.command("add")
@click.option("--model", help="Only for this model; default: for every model without tariffs of its own.")
@click.option("--from", "valid_from", type=Moment(), required=True, help="Holds from this day or time on (UTC).")
@click.option("--input", "input_usd", type=_Usd(), required=True, help="Prompt tokens that are computed.")
@click.option("--cached-input", "cached_input_usd", type=_Usd(), required=True, help="Prompt tokens from the cache.")
@click.option("--output", "output_usd", type=_Usd(), required=True, help="Tokens generated.")
def add_tariff(
    model: str | None, valid_from: dt.datetime, input_usd: Decimal, cached_input_usd: Decimal, output_usd: Decimal
) -> None:
    """Add a tariff. Requests are charged by the one in force when they are answered; old charges stay."""
    with open_store() as store:
        tariff_id = store.add_tariff(
            model=model,
            valid_from=valid_from,
            input_usd=input_usd,
            cached_input_usd=cached_input_usd,
            output_usd=output_usd,
        )
    click.echo(f"tariff {tariff_id} holds from {valid_from.isoformat()} for {model or 'every model'}")


@command.group()
def price() -> None:
    """What an hour of a worker's GPU costs us."""


@price.command("add")
@click.option("--gpu-kind", required=True, help="As workers name it in cost.gpu_kind.")
@click.option("--from", "valid_from", type=Moment(), required=True, help="Holds from this day or time on (UTC).")
@click.option("--usd-per-hour", type=_Usd(), required=True, help="Of one worker.")
def add_price(gpu_kind: str, valid_from: dt.datetime, usd_per_hour: Decimal) -> None:
    """Add a price of a kind of GPU. Time is priced by the one in force when it passed."""
    with open_store() as store:
        store.add_gpu_price(gpu_kind=gpu_kind, valid_from=valid_from, usd_per_hour=usd_per_hour)
    click.echo(f"{gpu_kind} costs {plain(usd_per_hour)} USD an hour from {valid_from.isoformat()}")


def _as_text(report: cost.CostReport) -> str:
    columns = [report.by, "requests", "prompt", "cached", "output", "charge_usd", "allocated_usd", "difference_usd"]
    lines: list[list[Any]] = [
        [
            line.name or "(none)",
            line.requests,
            line.prompt_tokens,
            line.cached_tokens,
            line.output_tokens,
            _usd(Fraction(line.charge_usd)),
            _usd(line.allocated_usd),
            _usd(line.difference_usd),
        ]
        for line in report.lines
    ]
    allocated = sum((line.allocated_usd for line in report.lines), Fraction(0))
    counts = [sum(column) for column in zip(*(line[1:5] for line in lines), strict=True)] or [0] * 4
    totals = [_usd(report.charge_usd), _usd(allocated), _usd(report.charge_usd - allocated)]
    lines.append(["all tenants", *counts, *totals])
    unpaid = [[name, _seconds(amount.ns), _usd(amount.usd)] for name, amount in report.unpaid.items()]
    unpaid.append(["all tenants", _seconds(sum(line.allocated_ns for line in report.lines)), _usd(allocated)])
    unpaid.append(["total", _seconds(report.total.ns), _usd(report.total.usd)])
    unpaid.append(["bill (provisioned × price)", _seconds(report.bill.ns), _usd(report.bill.usd)])
    return f"{text_table(columns, lines)}\n\n{text_table(['not paid by tenants', 'seconds', 'usd'], unpaid)}"


def _usd(amount: Fraction) -> str:
    return f"{Decimal(cost.decimal_usd(amount, _SHOWN_DIGITS)):.{_SHOWN_DIGITS}f}"


def _seconds(ns: int) -> str:
    return f"{ns / _NS_PER_S:.3f}"
