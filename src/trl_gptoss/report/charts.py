"""Line charts as inline SVG: no script, no external resource; colours come from the page's CSS variables."""

import math
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24


@dataclass(kw_only=True, slots=True)
class Series:
    """One curve.

    label (`str`): as in the legend.
    points (`list[tuple[float, float]]`): (step, value), in the order of the steps; values may be NaN or infinite, such
        points are left out and counted.
    markers (`bool`): draw the points too (few points, e.g. evaluations).
    band (`list[tuple[float, float, float]]`): (step, low, high) of a shaded area behind the curve.
    """

    label: str
    points: list[tuple[float, float]]
    markers: bool = False
    band: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def finite(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.points if math.isfinite(y)]


def number(value: float) -> str:
    """A value as people read it: at most four significant digits, powers of ten where they are shorter."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten apart) inside [low, high]."""
    if not low < high:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    spacing = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / spacing - 1e-9)
    return [k * spacing for k in range(first, math.floor(high / spacing + 1e-9) + 1)]


def smooth(points: list[tuple[float, float]], width: int) -> list[tuple[float, float]]:
    """Moving average over the up to `width` points around each point."""
    half = width // 2
    result = []
    for i, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, i - half) : i + half + 1]]
        result.append((x, sum(near) / len(near)))
    return result


class _Scale:
    """Data coordinates to pixels."""

    def __init__(self, x: list[float], y: list[float]) -> None:
        self.x0, self.x1 = min(x), max(x)
        self.y0, self.y1 = min(y), max(y)
        if self.y0 == self.y1:  # a constant is shown by its height over 0
            self.y0, self.y1 = min(0.0, 1.25 * self.y0), max(0.0, 1.25 * self.y1)
            self.y1 += 1.0 if self.y0 == self.y1 else 0.0
        else:
            pad = 0.06 * (self.y1 - self.y0)
            # Metrics that are never negative and come near 0 are shown from 0 on: their height then means something.
            self.y0 = 0.0 if 0 <= self.y0 < 0.5 * self.y1 else self.y0 - pad
            self.y1 += pad

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x0) / (self.x1 - self.x0) if self.x1 > self.x0 else 0.5
        up = (y - self.y0) / (self.y1 - self.y0)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def path(self, points: list[tuple[float, float]]) -> str:
        return " ".join(f"{px:.1f},{py:.1f}" for px, py in (self.at(x, y) for x, y in points))


def _axes(scale: _Scale) -> list[str]:
    parts = []
    for y in ticks(scale.y0, scale.y1):
        _, py = scale.at(scale.x0, y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{py + 3.5:.1f}" text-anchor="end">{number(y)}</text>')
    for x in ticks(scale.x0, scale.x1, 5):
        if x == int(x):
            px, _ = scale.at(x, scale.y0)
            parts.append(f'<text class="tick" x="{px:.1f}" y="{HEIGHT - 7}" text-anchor="middle">{number(x)}</text>')
    return parts


def _curve(series: Series, scale: _Scale, index: int) -> list[str]:
    points = series.finite
    colour = f"c{index % 6}"
    parts = []
    if series.band:
        upper = [(x, high) for x, _, high in series.band]
        lower = [(x, low) for x, low, _ in reversed(series.band)]
        parts.append(f'<polygon class="band {colour}" points="{scale.path(upper + lower)}"/>')
    if len(points) >= 20 and not series.markers:  # noisy per-step values: faint curve, bold average
        parts.append(f'<polyline class="raw {colour}" points="{scale.path(points)}"/>')
        width = max(5, len(points) // 12) | 1
        parts.append(f'<polyline class="line {colour}" points="{scale.path(smooth(points, width))}"/>')
    else:
        parts.append(f'<polyline class="line {colour}" points="{scale.path(points)}"/>')
    radius = 3 if series.markers or len(points) == 1 else 0
    for x, y in points:  # the title is the tooltip; points of dense curves are invisible but can be hovered
        px, py = scale.at(x, y)
        shown = "dot" if radius else "hover"
        parts.append(
            f'<circle class="{shown} {colour}" cx="{px:.1f}" cy="{py:.1f}" r="{radius or 5}">'
            f"<title>{escape(series.label)}\nstep {number(x)}: {number(y)}</title></circle>"
        )
    return parts


# The page's colours in light mode, for a file that stands alone.
_ALONE = (
    "text{font:11px system-ui,sans-serif;fill:#657083}.title{font-size:14px;fill:#1c2430}"
    ".grid{stroke:#e9edf2}.line,.raw{fill:none;stroke-width:2}.raw{stroke-width:1;opacity:.35}.band{opacity:.15}"
    ".hover{display:none}"
)
_COLOURS = ("#2f6fdb", "#e07b25", "#2a9d5b", "#b04ad1", "#c9a21a", "#1f9fb5")
_TITLE, _LEGEND = 24, 18


def standalone_svg(title: str, curves: list[Series]) -> str:
    """The chart as an SVG file with its own colours, title and legend, or an empty string if no curve has a finite value.

    Args:
        title (`str`): heading; escaped here, like every label.
        curves (`list[Series]`): drawn over one pair of axes.
    """
    curves = [s for s in curves if s.finite]
    if not curves:
        return ""
    x = [p[0] for s in curves for p in s.finite]
    y = [p[1] for s in curves for p in s.finite] + [v for s in curves for _, *pair in s.band for v in pair]
    scale = _Scale(x, y)
    body = _axes(scale)
    for index, series in enumerate(curves):
        body += _curve(series, scale, index)
    style = _ALONE + "".join(
        f".c{i}{{stroke:{colour}}}.band.c{i},.dot.c{i},.key.c{i}{{fill:{colour};stroke:none}}"
        for i, colour in enumerate(_COLOURS)
    )
    legend = []
    for i, series in enumerate(curves):
        top = _TITLE + HEIGHT + i * _LEGEND
        text = escape(f"{series.label}: {number(series.finite[-1][1])}")
        legend.append(f'<rect class="key c{i % 6}" x="{LEFT}" y="{top}" width="10" height="10"/>')
        legend.append(f'<text x="{LEFT + 16}" y="{top + 9}">{text}</text>')
    height = _TITLE + HEIGHT + len(curves) * _LEGEND + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH * 2}" height="{height * 2}">'
        f'<style>{style}</style><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        f'<text class="title" x="{LEFT}" y="17">{escape(title)}</text>'
        f'<g transform="translate(0 {_TITLE})">{"".join(body)}</g>{"".join(legend)}</svg>\n'
    )


def chart(title: str, curves: list[Series], note: str = "") -> str:
    """A titled card with a line chart of all curves, or an empty string if none has a finite value.

    Args:
        title (`str`): heading; escaped here, like every label.
        curves (`list[Series]`): drawn over one pair of axes.
        note (`str`, *optional*, defaults to `""`): one line under the heading.
    """
    curves = [s for s in curves if s.finite]
    if not curves:
        return ""
    x = [p[0] for s in curves for p in s.finite]
    y = [p[1] for s in curves for p in s.finite] + [v for s in curves for _, *pair in s.band for v in pair]
    scale = _Scale(x, y)
    svg = _axes(scale)
    for index, series in enumerate(curves):
        svg += _curve(series, scale, index)
    lost = sum(len(s.points) - len(s.finite) for s in curves)
    if lost:
        note = f"{note} {lost} value{'s' if lost > 1 else ''} not finite".strip()
    legend = "".join(
        f'<span class="key"><i class="c{i % 6}"></i>{escape(s.label)} <b>{number(s.finite[-1][1])}</b></span>'
        for i, s in enumerate(curves)
    )
    caption = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<figure class="card"><figcaption>{escape(title)}</figcaption>{caption}'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">{"".join(svg)}</svg>'
        f'<div class="legend">{legend}</div></figure>'
    )
