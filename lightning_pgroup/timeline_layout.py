"""Where everything of a timeline stands, in pixels, so that words fit and none lies on another. Pure; both pictures draw it."""

from dataclasses import dataclass, field, replace

from lightning_pgroup.records import ABORTED, LOST
from lightning_pgroup.timeline_parts import OPEN, Timeline
from lightning_pgroup.timeline_rows import Bar, Row, rows_of
from lightning_pgroup.timeline_style import GENERATION_STYLES, STAGE_STYLES, STYLES
from lightning_pgroup.timeline_words import clean, cut, note_of, ticks, title_of, width_of, words_of_failure

SIZE = 11.0
"""Size of all words but the title, pixels."""

TITLE_SIZE = 14.0
MARGIN = 14.0
NARROW = 5.0
"""Narrower bars have no edge and no pattern, of which they would be full."""

_SMALLEST = 2.0
_WIDEST_NAME = 260.0
_FLAG = 17.0
_CAP = 12.0
_WORST = (ABORTED, LOST, OPEN)
_CROSS = "the first rank of a failure (its number is above, its cause below)"
_PADDING = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A bar, or a sample of one in the legend. ``on_top`` is whether it lies on another one."""

    x: float
    y: float
    width: float
    height: float
    style: str
    words: str = ""
    on_top: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """Words. ``x`` is their left end, their middle or their right end, ``y`` the middle of their height.

    ``on`` is the style of the bar that they stand on, or empty.
    """

    x: float
    y: float
    text: str
    size: float = SIZE
    anchor: str = "start"
    on: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of a ``kind``: ``"grid"``, ``"failure"``, ``"launch"``, ``"row"`` or ``"cross"``."""

    x1: float
    y1: float
    x2: float
    y2: float
    kind: str


@dataclass(kw_only=True, slots=True)
class Layout:
    """A whole picture."""

    width: float
    height: float = 0.0
    boxes: list[Box] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Bands:
    """How high the three bands of a row are, and the gap after them."""

    group: float
    stage: float
    trainer: float
    gap: float

    @property
    def height(self) -> float:
        return self.group + self.stage + self.trainer + self.gap


def lay_out(timeline: Timeline, *, widest: float, listed: int, hover: bool = False) -> Layout:
    """Lay out a picture.

    Args:
        timeline: What to show.
        widest: The picture is at most so wide, pixels; how high it is depends on the number of ranks.
        listed: How many failures are marked and listed.
        hover: Whether the bars have words that are shown on hover; then no failures are listed.
    """
    rows = rows_of(timeline, with_words=hover)
    most = max(len(bars) for row in rows for bars in (row.groups, row.stages))
    layout = Layout(width=min(widest, max(1000.0, 240.0 + 60.0 * most)))
    bands = _Bands(18, 17, 15, 12) if len(rows) <= 40 else _Bands(11, 7, 0, 4) if len(rows) <= 200 else _Bands(4, 2, 0, 1)
    left = MARGIN + min(_WIDEST_NAME, max(width_of(row.name, SIZE) for row in rows)) + 10
    right = layout.width - MARGIN - 6
    length = max(timeline.end - timeline.start, 1e-3)
    scale = _Scale(timeline.start, left, (right - left) / length, right)
    head = _heading(layout, timeline, rows)
    top = head + _FLAG * bool(timeline.launches[1:]) + _FLAG * bool(timeline.failures)
    bottom = top + bands.height * len(rows)
    for time, text in ticks(length, max(2, int((right - left) / 110))):
        x = scale.at(timeline.start + time)
        layout.lines.append(Line(x1=x, y1=top, x2=x, y2=bottom, kind="grid"))
        layout.labels.append(
            Label(x=min(x, layout.width - width_of(text, SIZE) / 2), y=bottom + 10, text=text, anchor="middle")
        )
    _flags(layout, timeline, scale, head, bottom, listed)
    floor = -1.0
    for count, row in enumerate(rows):
        y = top + bands.height * count
        middle = y + bands.gap / 2 + (bands.height - bands.gap) / 2
        if middle - SIZE * 0.75 > floor:
            layout.labels.append(Label(x=left - 10, y=middle, text=cut(row.name, _WIDEST_NAME, SIZE), anchor="end"))
            floor = middle + SIZE * 0.75
        layout.lines.append(Line(x1=MARGIN, y1=y, x2=right, y2=y, kind="row"))
        _row(layout, row, y + bands.gap / 2, bands, scale)
    layout.lines.append(Line(x1=MARGIN, y1=bottom, x2=right, y2=bottom, kind="row"))
    layout.height = _failure_list(layout, timeline, bottom + 30, listed) if not hover else bottom + 24
    return layout


def _heading(layout: Layout, timeline: Timeline, rows: list[Row]) -> float:
    """The title and the legend; returns where the picture may go on."""
    room = layout.width - 2 * MARGIN
    y = MARGIN + TITLE_SIZE / 2
    layout.labels.append(Label(x=MARGIN, y=y, text=cut(title_of(timeline), room, TITLE_SIZE), size=TITLE_SIZE))
    if note := note_of(timeline):
        y += 19
        layout.labels.append(Label(x=MARGIN, y=y, text=cut(note, room, SIZE)))
    bars = [bar for row in rows for bar in (*row.groups, *row.stages)]
    shown = {bar.style for bar in bars} | {OPEN for bar in bars if bar.is_open}
    for names in (GENERATION_STYLES, STAGE_STYLES):
        x, y = MARGIN, y + 21
        for name in (name for name in names if name in shown):
            text = STYLES[name].meaning
            if x > MARGIN and x + 30 + width_of(text, SIZE) > layout.width - MARGIN:
                x, y = MARGIN, y + 19
            layout.boxes.append(Box(x=x, y=y - 6, width=22, height=12, style=name))
            layout.labels.append(Label(x=x + 28, y=y, text=text))
            x += 28 + width_of(text, SIZE) + 16
        if names is GENERATION_STYLES and any(bar.cross for bar in bars):
            layout.lines += _cross(x + 4, y, 4)
            layout.labels.append(Label(x=x + 14, y=y, text=_CROSS))
    return y + 16


def _flags(layout: Layout, timeline: Timeline, scale: "_Scale", y: float, bottom: float, listed: int) -> None:
    """Lines through all rows where an attempt begins and where a failure is, with their numbers above where these fit."""
    y += 8
    if timeline.launches[1:]:
        end = 0.0
        for run, attempt, time in timeline.launches:
            x, text = scale.at(time), cut(clean(f"run {run}" + ("" if attempt is None else f" attempt {attempt}")), 220, SIZE)
            layout.lines.append(Line(x1=x, y1=y - 6, x2=x, y2=bottom, kind="launch"))
            width = width_of(text, SIZE)
            left = x + 4 if x + 4 + width < layout.width else x - 4 - width
            if left > end:
                layout.labels.append(Label(x=left, y=y, text=text))
                end = left + width + 8
        y += _FLAG
    end = 0.0
    for failure in timeline.failures[:listed]:
        x, text = scale.at(failure.time), str(failure.number)
        half = width_of(text, SIZE) / 2
        layout.lines.append(Line(x1=x, y1=y + 7, x2=x, y2=bottom, kind="failure"))
        if x - half > end:
            layout.labels.append(Label(x=x, y=y, text=text, anchor="middle"))
            end = x + half + 3


def _row(layout: Layout, row: Row, y: float, bands: _Bands, scale: "_Scale") -> None:
    for bars, height in ((row.groups, bands.group), (row.stages, bands.stage), (row.trainers, bands.trainer)):
        if height:
            for bar in merge(bars, scale.per_second):
                _bar(layout, bar, y, height, scale)
        y += height


def merge(bars: list[Bar], per_second: float) -> list[Bar]:
    """Join neighbours that are too narrow to be seen apart, so that a picture stays small.

    Those of one kind up to two pixels, others up to one, which then look like the worst of them.
    """
    merged: list[Bar] = []
    counts: list[int] = []
    for bar in bars:
        last = merged[-1] if merged else None
        if last is None or not _can_join(last, bar, (max(bar.end, last.end) - last.start) * per_second):
            merged.append(bar)
            counts.append(1)
            continue
        counts[-1] += 1
        worst = min((last.style, bar.style), key=lambda style: _WORST.index(style) if style in _WORST else len(_WORST))
        first = last.words if counts[-1] == 2 else _first(last)
        words = f"{counts[-1]}, too narrow to be seen apart. The first: {first}"
        merged[-1] = replace(
            last, end=max(bar.end, last.end), style=worst, labels=(), words=words, cross=last.cross or bar.cross
        )
    return merged


def _can_join(last: Bar, bar: Bar, width: float) -> bool:
    if last.inner != bar.inner or last.is_open or bar.is_open:
        return False
    return width < _SMALLEST / 2 or (width < _SMALLEST and last.style == bar.style and not (last.cross or bar.cross))


def _first(bar: Bar) -> str:
    return bar.words.partition(". The first: ")[2]


def _bar(layout: Layout, bar: Bar, y: float, height: float, scale: "_Scale") -> None:
    x = scale.at(bar.start)
    width = max(scale.at(bar.end) - x, 1.0)
    if bar.inner:
        y, height = y + height - 4, 4
    layout.boxes.append(Box(x=x, y=y, width=width, height=height, style=bar.style, words=bar.words, on_top=bar.inner))
    room = width - 2 * _PADDING
    if bar.is_open:
        cap = min(_CAP, width / 2)
        layout.boxes.append(Box(x=x + width - cap, y=y, width=cap, height=height, style=OPEN, words=bar.words, on_top=True))
        room -= cap
    if bar.cross:
        half = min(4.0, height / 2 - 2, width / 2)
        layout.lines += _cross(x + width - 1 - half, y + height / 2, half)
        room -= 2 * half + _PADDING
    text = next((text for text in bar.labels if width_of(text, SIZE) <= room), "")
    if text and not bar.inner and height >= SIZE + 3:
        layout.labels.append(Label(x=x + _PADDING + room / 2, y=y + height / 2, text=text, anchor="middle", on=bar.style))


def _cross(x: float, y: float, half: float) -> list[Line]:
    return [Line(x1=x - half, y1=y - sign * half, x2=x + half, y2=y + sign * half, kind="cross") for sign in (1, -1)]


def _failure_list(layout: Layout, timeline: Timeline, y: float, listed: int) -> float:
    room, many_hosts = layout.width - 2 * MARGIN, len(timeline.hosts) > 1
    for failure in timeline.failures[:listed]:
        words = words_of_failure(failure, timeline.start, many_hosts=many_hosts)
        layout.labels.append(Label(x=MARGIN, y=y, text=cut(words, room, SIZE)))
        y += 17
    if left_out := len(timeline.failures) - listed if timeline.failures[listed:] else 0:
        layout.labels.append(Label(x=MARGIN, y=y, text=f"… and {left_out} more failures, which the .html and the .json show"))
        y += 17
    return y + 4


@dataclass(frozen=True, slots=True)
class _Scale:
    start: float
    left: float
    per_second: float
    right: float

    def at(self, time: float) -> float:
        return min(self.right, max(self.left, self.left + (time - self.start) * self.per_second))
