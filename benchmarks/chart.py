"""A line chart as SVG text, for one thing over time. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 20, 60, 40
_COLOURS = ("#1f6feb", "#d1741f", "#2da44e", "#8250df")
_TICKS = 5

Points = Sequence[tuple[float, float]]


def lines(title: str, unit: str, series: Mapping[str, Points], *, top: float) -> str:
    """One line for each of ``series``, on axes from 0; ``unit`` is that of the horizontal one."""
    right = max((x for points in series.values() for x, _ in points), default=1.0) or 1.0
    width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> str:
        return f"{_LEFT + x / right * width:.1f},{_TOP + (1 - min(y, top) / top) * height:.1f}"

    parts = [f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>']
    for tick in range(_TICKS + 1):
        share = tick / _TICKS
        y, x = _TOP + (1 - share) * height, _LEFT + share * width
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8885"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * top:.3g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 20}" text-anchor="middle">{share * right:.0f}</text>')
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{unit}</text>')
    for place, (name, points) in enumerate(series.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        parts.append(f'<text x="{_LEFT + 130 * place}" y="44" fill="{colour}">{escape(name)}</text>')
        path = " ".join(at(x, y) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        f' font-size="11">\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )
