"""A timeline as one HTML file that needs nothing else: an SVG whose bars say on hover what they are, and a list of failures."""

from html import escape

from lightning_pgroup.timeline_layout import NARROW, SIZE, Label, lay_out
from lightning_pgroup.timeline_parts import Timeline
from lightning_pgroup.timeline_style import INK, STYLES, Style
from lightning_pgroup.timeline_words import title_of, width_of, words_of_failure

WIDEST = 6000.0
_FLAGGED = 1000
_SHOWN = 600

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --paper: #ffffff; --ink: #111111; --grid: #dddddd; --fail: #d55e00; }}
@media (prefers-color-scheme: dark) {{ :root {{ --paper: #16181b; --ink: #eeeeee; --grid: #3a3d42; --fail: #ff9a5c; }} }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 13px/1.5 "DejaVu Sans", Verdana, Arial, sans-serif; }}
.scroll {{ overflow-x: auto; }}
svg {{ display: block; font: {size}px "DejaVu Sans", Arial, sans-serif; }}
text {{ fill: var(--ink); dominant-baseline: central; }}
.grid, .row {{ stroke: var(--grid); }}
.launch {{ stroke: var(--ink); stroke-dasharray: 5 3; }}
.failure {{ stroke: var(--fail); stroke-dasharray: 2 2; }}
.cross {{ stroke: {ink}; stroke-width: 2; }}
rect.bar {{ stroke: #000000; stroke-opacity: .5; stroke-width: .5; }}
.pattern {{ pointer-events: none; }}
ul {{ list-style: none; margin: 0; padding: 8px 14px 20px; overflow-wrap: anywhere; }}
</style>
</head>
<body>
<div class="scroll">
<svg role="img" aria-label="{title}" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" \
xmlns="http://www.w3.org/2000/svg">
<defs>
{patterns}
</defs>
{drawing}
</svg>
</div>
{failures}
</body>
</html>
"""

_HATCHES = {
    "/": '<path d="M-1 7L7 -1"/>',
    "\\": '<path d="M-1 -1L7 7"/>',
    "-": '<path d="M0 3H6"/>',
    "x": '<path d="M-1 7L7 -1M-1 -1L7 7"/>',
    ".": '<circle cx="3" cy="3" r=".7"/>',
}


def render(timeline: Timeline) -> bytes:
    """The HTML."""
    layout = lay_out(timeline, widest=WIDEST, listed=_FLAGGED, hover=True)
    lines = [
        f'<line class="{one.kind}" x1="{one.x1:.1f}" y1="{one.y1:.1f}" x2="{one.x2:.1f}" y2="{one.y2:.1f}"/>'
        for one in layout.lines
    ]
    crosses = [line for line in lines if 'class="cross"' in line]
    bar = ' class="bar"'
    parts = [line for line in lines if 'class="cross"' not in line]
    for box in layout.boxes:
        where = f'x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"'
        style = STYLES[box.style]
        words = f"<title>{_safe(box.words)}</title>" if box.words else ""
        parts.append(f'<rect{"" if box.width < NARROW else bar} {where} fill="{style.fill}">{words}</rect>')
        if style.hatch and box.width >= NARROW:
            parts.append(f'<rect class="pattern" {where} fill="url(#{_pattern_name(style)})"/>')
    parts += crosses
    parts += [_text(label) for label in layout.labels]
    hatched = {style.hatch: style for style in STYLES.values() if style.hatch}
    failures = [words_of_failure(one, timeline.start, many_hosts=len(timeline.hosts) > 1) for one in timeline.failures]
    return _PAGE.format(
        title=_safe(title_of(timeline)),
        size=SIZE,
        ink=INK,
        width=layout.width,
        height=layout.height,
        patterns="\n".join(_pattern(style) for style in hatched.values()),
        drawing="\n".join(parts),
        failures="<ul>\n" + "\n".join(f"<li>{_safe(line)}</li>" for line in failures) + "\n</ul>" if failures else "",
    ).encode()


def _text(label: Label) -> str:
    plate, fill = "", ""
    if label.on:
        style, width = STYLES[label.on], width_of(label.text, label.size)
        fill = f' style="fill: {style.ink}" pointer-events="none"'
        if style.hatch:
            corner = f'x="{label.x - width / 2:.1f}" y="{label.y - label.size * 0.6:.1f}"'
            plate = f'<rect class="pattern" {corner} width="{width:.1f}" height="{label.size * 1.2:.1f}" fill="{style.fill}"/>'
    size = f' font-size="{label.size}"' if label.size != SIZE else ""
    where = f'x="{label.x:.1f}" y="{label.y:.1f}" text-anchor="{label.anchor}"'
    return f"{plate}<text {where}{size}{fill}>{_safe(label.text)}</text>"


def _pattern_name(style: Style) -> str:
    return f"hatch-{ord(style.hatch)}"


def _pattern(style: Style) -> str:
    return (
        f'<pattern id="{_pattern_name(style)}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<g stroke="{INK}" stroke-opacity=".6" stroke-width=".8" fill="{INK}">{_HATCHES[style.hatch]}</g></pattern>'
    )


def _safe(text: str) -> str:
    return escape(text if len(text) <= _SHOWN else text[:_SHOWN] + "…", quote=True)
