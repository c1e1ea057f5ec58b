"""Goodput and latencies against offered load, as a page that needs nothing beside itself."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

type Rows = Sequence[Mapping[str, Any]]  # each of a run: `variant`, `offered_rps` and its summary

PANELS = (
    ("good_arrivals_rps", "requests/s that came and were answered within their targets"),
    ("ttft_ms_p99", "TTFT, 99th percentile, ms"),
    ("tpot_ms_p99", "TPOT, 99th percentile, ms"),
)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito 2008: told apart by all
WIDTH, HEIGHT, MARGIN = 420, 260, 48


def page(title: str, rows: Rows) -> str:
    """Three panels over the offered load, a line a variant, and the figures themselves below."""
    variants = list(dict.fromkeys(str(row["variant"]) for row in rows))
    legend = " ".join(
        f'<span style="color:{_colour(i)}">&#9632; {html.escape(name)}</span>' for i, name in enumerate(variants)
    )
    panels = "".join(_panel(field, label, variants, rows) for field, label in PANELS)
    columns = [column for column in rows[0] if not isinstance(rows[0][column], Mapping)]
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_text(row.get(column)))}</td>" for column in columns) + "</tr>"
        for row in rows
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:2px 8px;text-align:right}</style>"
        f"<h1>{html.escape(title)}</h1><p>{legend}</p>{panels}<table><tr>{head}</tr>{body}</table></html>\n"
    )


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _panel(field: str, label: str, variants: Sequence[str], rows: Rows) -> str:
    points = {
        name: sorted(
            (row["offered_rps"], row[field]) for row in rows if row["variant"] == name and row[field] is not None
        )
        for name in variants
    }
    every = [point for line in points.values() for point in line]
    x_max, y_max = (
        _round_up(max((x for x, _ in every), default=1.0)),
        _round_up(max((y for _, y in every), default=1.0)),
    )
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{html.escape(label)}" font-family="sans-serif" font-size="11">',
        f'<text x="{MARGIN}" y="14">{html.escape(label)}</text>',
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 6}" text-anchor="end">offered requests/s</text>',
    ]

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = x / x_max, y / y_max
        return MARGIN + across * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN)

    for i in range(5):
        (x, y0), (x0, y) = place(x_max * i / 4, 0), place(0, y_max * i / 4)
        parts.append(f'<text x="{x:.1f}" y="{y0 + 14:.1f}" text-anchor="middle">{x_max * i / 4:g}</text>')
        parts.append(f'<text x="{x0 - 4:.1f}" y="{y + 4:.1f}" text-anchor="end">{y_max * i / 4:g}</text>')
        parts.append(f'<path d="M{x0:.1f} {y:.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>')
    for i, name in enumerate(variants):
        line = [place(x, y) for x, y in points[name]]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_colour(i)}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_colour(i)}"/>' for x, y in line]
    return "".join([*parts, "</svg>"])


def _round_up(value: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not below `value`."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)
