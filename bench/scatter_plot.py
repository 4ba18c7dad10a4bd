"""A scatter plot as SVG: few points, each with a name, joined in their order."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _MARGIN = 640.0, 420.0, 70.0
_TICKS = 5


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis, from 0 on.

    Attributes:
      title: What it shows, with its unit.
      limit: A value at which a line is drawn across, or None.
    """

    title: str
    limit: float | None = None


def scatter_svg(
    title: str, x_axis: Axis, y_axis: Axis, points: Sequence[tuple[float, float, str]]
) -> str:
    """The picture, as text of an SVG file.

    Args:
      title: Above the picture.
      x_axis: From left to right.
      y_axis: From the bottom up.
      points: Of (x, y, name); joined by a line in this order.
    """
    most_x = 1.1 * max([x for x, _, _ in points] + [x_axis.limit or 0.0])
    most_y = 1.1 * max([y for _, y, _ in points] + [y_axis.limit or 0.0])

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _MARGIN + x / most_x * (_WIDTH - 2 * _MARGIN),
            _HEIGHT - _MARGIN - y / most_y * (_HEIGHT - 2 * _MARGIN),
        )

    left, bottom = at(0.0, 0.0)
    right, top = at(most_x, most_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH:g}" height="{_HEIGHT:g}" fill="white"/>',
        _text(_WIDTH / 2, 24.0, title, size=15),
        _text(_WIDTH / 2, _HEIGHT - 20, x_axis.title),
        f'<g transform="translate(18 {_HEIGHT / 2}) rotate(-90)">',
        _text(0.0, 0.0, y_axis.title),
        "</g>",
        _line(left, bottom, right, bottom, "black"),
        _line(left, bottom, left, top, "black"),
    ]
    for tick in range(_TICKS + 1):
        x, y = most_x * tick / _TICKS, most_y * tick / _TICKS
        parts.append(_text(at(x, 0.0)[0], bottom + 18, f"{x:.3g}"))
        parts.append(_text(left - 20, at(0.0, y)[1] + 4, f"{y:.3g}"))
    if x_axis.limit is not None:
        parts.append(_line(at(x_axis.limit, 0.0)[0], bottom, at(x_axis.limit, 0.0)[0], top, "#c33"))
    if y_axis.limit is not None:
        parts.append(_line(left, at(0.0, y_axis.limit)[1], right, at(0.0, y_axis.limit)[1], "#c33"))
    places = [at(x, y) for x, y, _ in points]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts.append(f'<polyline points="{joined}" fill="none" stroke="#357"/>')
    for (x, y), (_, _, name) in zip(places, points, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#357"/>')
        parts.append(_text(x + 6, y - 8, name, anchor="start"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "middle") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}>{html.escape(text)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}"/>'
