"""How each kind of bar of a timeline looks: a colour that colour-blind readers can tell, and a pattern besides."""

from dataclasses import dataclass

from lightning_pgroup.records import ABORTED, DESTROYED, LOST
from lightning_pgroup.timeline_parts import OPEN, Generation, StageSpan

INK = "#111111"
PAPER = "#ffffff"


@dataclass(frozen=True, slots=True)
class Style:
    """A kind of bar.

    Attributes:
        fill: Its colour.
        ink: The colour of words on it.
        hatch: Its pattern: none, a slash, a backslash, ``"-"``, ``"x"`` or ``"."``.
        meaning: What it stands for, for the legend; empty if it is not shown there.
    """

    fill: str
    ink: str
    hatch: str
    meaning: str


# The fills are from the palette of Okabe and Ito.
STYLES = {
    DESTROYED: Style("#0072b2", PAPER, "", "group, destroyed"),
    ABORTED: Style("#d55e00", INK, "/", "group, aborted"),
    LOST: Style("#f0e442", INK, "x", "group, ended by other code"),
    OPEN: Style("#ffffff", INK, ".", "no end on record"),
    "foreign": Style("#999999", INK, "\\", "group of other code"),
    "fit": Style("#56b4e9", INK, "", "fit"),
    "validate": Style("#f0e442", INK, "\\", "validate"),
    "test": Style("#e69f00", INK, "-", "test"),
    "predict": Style("#cc79a7", INK, "/", "predict"),
    "other": Style("#e6e6e6", INK, ".", "collective or block"),
    "trainer odd": Style("#d9d9d9", INK, "", ""),
    "trainer even": Style("#ffffff", INK, "", ""),
}

GENERATION_STYLES = (DESTROYED, ABORTED, LOST, OPEN, "foreign")
STAGE_STYLES = ("fit", "validate", "test", "predict", "other")


def style_of_generation(one: Generation) -> str:
    """The name of the style of a generation."""
    return "foreign" if one.number == 0 and one.outcome == OPEN else one.outcome


def style_of_stage(span: StageSpan) -> str:
    """The name of the style of a stage."""
    return span.name if span.name in STAGE_STYLES else "other"
