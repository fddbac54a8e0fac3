"""`lightning-pgroup timeline`: records become intervals, and those a picture in which words fit, a page, and a trace."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch.distributed as dist

from lightning_pgroup import PGroupDDPStrategy, record_file, timeline_html, timeline_png, timeline_trace
from lightning_pgroup.command_line import main
from lightning_pgroup.record_file import read_records
from lightning_pgroup.timeline_layout import lay_out
from lightning_pgroup.timeline_model import build
from lightning_pgroup.timeline_parts import OPEN
from lightning_pgroup.timeline_style import GENERATION_STYLES, STAGE_STYLES, STYLES
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks
from tests.scripts import ROOT
from tests.snippets import blocks_of, run_blocks
from tests.test_records import EVENT


@pytest.fixture(scope="module", autouse=True)
def _fonts_are_open():
    """Matplotlib keeps the files of its fonts open from the first picture on."""
    timeline_png.render(build([line("created", 0)]))


T0 = 1_800_000_000.0
NASTY = '<script>alert("x")</script> $\\frac{1$ & \ud800 \x00 \x1b[31m ]]> 漢字'


def line(what, at, *, ended=(), host="node1", pid=None, **fields):
    """A line as a process writes it, at ``at`` seconds."""
    event = replace(EVENT, **{"run": "r", "attempt": 0, "trainer": 1, "why": "because", **fields}, what=what, start=T0 + at)
    record = json.loads(record_file._line(event, host, [T0 + end for end in ended]))
    return {**record, "pid": 100 + event.rank if pid is None else pid}


def sweep(ranks, stages):
    """What so many ranks write in so many stages, of which each fifth fails, and one rank is killed in the last."""
    names, at, lines = ("fit", "validate", "test", "predict"), 0.0, []
    for count in range(stages):
        last, fails = count == stages - 1, count % 5 == 4
        long = 0.5 + (count * 7 % 5) / 2
        for rank in range(ranks):
            about = {
                "rank": rank,
                "generation": count + 1,
                "stage": names[count % 4],
                "trainer": count // 3 + 1,
                "world_size": ranks,
            }
            lines.append(line("created", at + rank / 1000, duration=0.01, **about))
            if last and rank == 1:
                continue
            culprit = fails and rank == count % ranks
            end = at + long + (0 if culprit else 0.01)
            why = (
                f"the stage raised ValueError: boom {count}"
                if culprit
                else "the stage raised RuntimeError: " + "closed by peer " * 9
            )
            what, why = ("aborted", why) if fails or last else ("destroyed", "on_teardown: the stage ended")
            lines.append(line(what, end, ended=[end], why=why, duration=0.02, **about))
        at += long + 0.1
    return lines


def spans(process, start=T0):
    return [
        (one.name, one.trainer, one.depth, round(one.start - start, 3), None if one.end is None else round(one.end - start, 3))
        for one in process.stages
    ]


def test_intervals_of_one_process():
    """A reused group, a stage inside another one, a loss, a group of other code, and one of which no more is known."""
    (process,) = build(
        [
            line("created", 0, stage="fit", duration=0.5),
            line("reused", 2, stage="validate", ended=[]),
            line("reused", 4, stage="test", trainer=2, ended=[3.0, 3.5]),
            line("lost", 6, stage="fit", ended=[5.0]),
            line("adopted", 7, stage="fit", generation=0, run="", attempt=None),
            line("created", 9, stage="predict", generation=2, ended=[8.0]),
        ]
    ).processes
    assert spans(process) == [
        ("fit", 1, 0, 0, 3.5), ("validate", 1, 1, 2, 3.0), ("test", 2, 0, 4, 5.0),
        ("fit", 1, 0, 7, 8.0), ("predict", 1, 0, 9, None),
    ]  # fmt: skip
    assert [(one.number, one.began, one.outcome, one.start - T0, one.drawn_end - T0) for one in process.generations] == [
        (1, "created", "lost", 0, 6.25), (0, "adopted", OPEN, 7, 9), (2, "created", OPEN, 9, 9.25),
    ]  # fmt: skip


def test_order_copies_and_broken_lines_do_not_matter():
    lines = sweep(2, 6)
    broken = [
        {**lines[0], name: value}
        for name, value in (
            ("pid", "x"),
            ("start", float("nan")),
            ("what", "left"),
            ("ended", 3),
            ("duration", 10**400),
            ("ended", [10**400]),
        )
    ]
    broken += [
        {name: value for name, value in lines[0].items() if name != missing} for missing in ("why", "host", "generation")
    ]
    assert build([*reversed(lines), *broken, *lines]) == build(lines)
    with pytest.raises(ValueError, match="no records"):
        build(broken)


def test_a_killed_rank_is_open_until_the_others_have_ended_that_generation():
    lines = [line("created", 0, rank=rank) for rank in range(3)]
    lines += [line("aborted", 4 + rank, rank=rank, why=f"why {rank}", ended=[4 + rank]) for rank in (0, 2)]
    lines += [line("created", 9, rank=rank, generation=2) for rank in range(3)]
    timeline = build(lines)
    assert [(p.rank, p.generations[0].outcome, p.generations[0].drawn_end - T0) for p in timeline.processes] == [
        (0, "aborted", 4.25), (1, OPEN, 6.25), (2, "aborted", 6.25),
    ]  # fmt: skip
    (failure,) = timeline.failures
    assert (failure.generation, failure.rank, failure.why, failure.others, failure.missing) == (1, 0, "why 0", 1, (1,))


def test_an_attempt_that_follows_stands_in_the_same_row_and_hosts_are_named():
    lines = [line("created", 0, rank=rank, host=f"node{rank}") for rank in range(2)]
    lines += [line("created", 5, rank=rank, host=f"node{rank}", attempt=1) for rank in range(2)]  # the same pids again
    lines += [line("created", 5.1, rank=0, host="node9", run="another")]
    timeline = build(lines)
    texts = [label.text for label in lay_out(timeline, widest=1900, listed=20).labels]
    assert [text for text in texts if text.startswith("rank")] == ["rank 0 node0", "rank 0 node9 pid 100", "rank 1 node1"]
    assert [text for text in texts if text.startswith("run ")] == ["run r attempt 0", "run r attempt 1"]
    assert any("clocks of 3 hosts, which may differ" in text for text in texts)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 3), (16, 40), (4, 100), (90, 8), (300, 3)])
def test_no_words_overlap_or_leave_their_bar(ranks, stages):
    """As matplotlib itself measures them."""
    layout = lay_out(build(sweep(ranks, stages)), widest=timeline_png.WIDEST, listed=timeline_png.LISTED)
    figure = timeline_png.draw(layout)
    renderer = figure.canvas.get_renderer()
    texts = figure.axes[0].texts
    boxes = [text.get_window_extent(renderer) for text in texts]
    assert layout.width <= timeline_png.WIDEST
    whole = figure.bbox
    for text, box in zip(texts, boxes, strict=True):
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1, text.get_text()
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1, text.get_text()
    order = sorted(range(len(boxes)), key=lambda place: boxes[place].x0)
    for place, one in enumerate(order):
        for other in order[place + 1 :]:
            if boxes[other].x0 >= boxes[one].x1:
                break
            apart = boxes[other].y0 >= boxes[one].y1 or boxes[one].y0 >= boxes[other].y1
            assert apart, (texts[one].get_text(), texts[other].get_text())
    for label, box in zip(layout.labels, boxes, strict=True):
        if label.on:
            bars = [bar for bar in layout.boxes if bar.style == label.on and bar.y <= label.y <= bar.y + bar.height]
            assert any(bar.x <= box.x0 and box.x1 <= bar.x + bar.width for bar in bars), label
    shown = {label.text for label in layout.labels}
    assert {f"rank {rank}" for rank in range(0, ranks, max(1, ranks // 30))} <= shown or ranks > 200
    if stages <= 40 and ranks <= 16:
        assert sum(label.on in GENERATION_STYLES for label in layout.labels) > ranks * stages * 0.8, (
            "generations have their numbers"
        )


def test_a_large_picture_stays_small():
    layout = lay_out(build(sweep(1, 4000)), widest=1900, listed=20)
    assert len(layout.boxes) < 1.5 * 3 * 1900
    assert sum(box.style == "aborted" for box in layout.boxes) > 700, "failures are still seen"
    assert layout.width == 1900
    assert sum(text.text.startswith("… and ") for text in layout.labels) == 1


def lab(colour, matrix):
    """Where the eye that ``matrix`` stands for sees a colour, in CIELAB."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    seen = [sum(weight * part for weight, part in zip(row, linear, strict=True)) for row in matrix]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(weight * part for weight, part in zip(row, seen, strict=True)) for row in to_xyz]
    x, y, z = (max(part, 0.0) / white for part, white in zip(xyz, (0.9505, 1.0, 1.089), strict=True))
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


# Machado, Oliveira and Fernandes 2009, severity 1.
EYES = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
    "none": ((0.2126, 0.7152, 0.0722),) * 3,
}


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("names", [GENERATION_STYLES, STAGE_STYLES], ids=["generations", "stages"])
def test_all_eyes_can_tell_the_bars_of_a_band(names, eye):
    """Colours that are near each other for some eye have different patterns; so have those that only differ in lightness."""
    for one, other in itertools.combinations(names, 2):
        far = (
            sum((a - b) ** 2 for a, b in zip(*(lab(STYLES[name].fill, EYES[eye]) for name in (one, other)), strict=True)) ** 0.5
        )
        has_patterns = STYLES[one].hatch != STYLES[other].hatch
        assert has_patterns or far > 12, (one, other, far)
        assert eye == "none" or far > 15, (one, other, far)


def check_trace(content):
    """What the format asks for: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU."""
    trace = json.loads(content)
    tracks, named = {}, set()
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "ts"} <= event.keys()
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            key = {
                "process_name": "name",
                "thread_name": "name",
                "process_sort_index": "sort_index",
                "thread_sort_index": "sort_index",
            }
            assert isinstance(event["args"][key[event["name"]]], str if key[event["name"]] == "name" else int)
            named.add((event["name"], event["pid"], event["tid"] if event["name"].startswith("thread") else None))
        elif event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"]))
        else:
            assert (event["ph"], event["s"] in "gpt") == ("i", True)
    assert len({tid for _, tid in tracks}) == len(tracks), "each thread has a number of its own"
    for (pid, tid), slices in tracks.items():
        assert ("thread_name", pid, tid) in named
        assert ("process_name", pid, None) in named
        around = []
        for begin, minus in sorted(slices):
            while around and around[-1] <= begin:
                around.pop()
            assert not around or begin - minus <= around[-1], "slices of a track lie inside each other or apart"
            around.append(begin - minus)
    return trace["traceEvents"]


@pytest.mark.parametrize("lines", [sweep(2, 3), sweep(16, 40), [line("lost", 3, why=NASTY, stage=NASTY, host=NASTY)]])
def test_the_trace_has_the_form_that_perfetto_reads(lines):
    timeline = build(lines)
    events = check_trace(timeline_trace.render(timeline))
    groups = [event for event in events if event.get("cat") == "group" and event["name"].startswith("gen ")]
    assert len(groups) == sum(record["what"] == "created" for record in lines) or lines[0]["what"] == "lost"
    aborts = [event for event in events if event.get("cat") == "aborted"]
    assert len(aborts) == sum(record["what"] == "aborted" for record in lines)
    assert all(event["args"]["why"] for event in aborts)
    assert sum(event.get("cat") == "failure" for event in events) == len(timeline.failures)


class Page(HTMLParser):
    """Which tags and attributes a page has, and whether all of them are closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.attributes = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else_and_escapes_all_words():
    lines = [*sweep(2, 5), line("created", 1, host=NASTY, stage=NASTY, why=NASTY), line("aborted", 2, host=NASTY, why=NASTY)]
    text = timeline_html.render(build(lines)).decode()
    page = Page(text)
    assert not page.open
    assert not page.tags & {"script", "link", "img", "iframe", "object", "use", "image", "a"}
    assert not [name for name, value in page.attributes if name.startswith("on") or name in ("href", "src")]
    assert "@import" not in text
    assert set(re.findall(r"url\((.*?)\)", text)) <= {f"#hatch-{ord(style.hatch)}" for style in STYLES.values() if style.hatch}
    assert "prefers-color-scheme: dark" in text
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;" in text
    (svg,) = re.findall(r"<svg.*</svg>", text, re.DOTALL)
    root = ElementTree.fromstring(svg)
    titles = ["".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any("aborted at" in title and "ValueError: boom 4" in title for title in titles)
    assert any(
        re.match(r"Generation 1 on rank 0, 2 ranks, gloo, run r attempt 0, pid 100 on node1\. created at", one)
        for one in titles
    )
    assert any(re.match(r"fit of Trainer 1 on rank 1 from 0\.001 s to 0\.510 s, 509 ms", one) for one in titles)


def test_a_picture_with_words_that_no_font_has(tmp_path):
    lines = [line("created", 1, host=NASTY, stage=NASTY, why=NASTY), line("aborted", 2, host=NASTY, why=NASTY)]
    assert timeline_png.render(build(lines)).startswith(b"\x89PNG")


class KillsItself(TinyModel):
    def training_step(self, batch, batch_idx):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


class Fails(TinyModel):
    def training_step(self, batch, batch_idx):
        if dist.get_rank() == 1:
            raise ValueError("the loss is not finite")
        return super().training_step(batch, batch_idx)


def test_a_real_run_of_two_ranks_from_the_command_line(tmp_path, capsys):
    """Fit and test in one group, a stage that fails on rank 1, a new Trainer, and one that is killed."""

    def job(rank):
        for model in (TinyModel(), Fails(), KillsItself()):
            trainer = make_trainer(PGroupDDPStrategy(record=tmp_path / f"rank{rank}"))
            try:
                trainer.fit(model, datamodule=TinyData())
                trainer.test(model, datamodule=TinyData(), verbose=False)
            except (ValueError, RuntimeError):
                pass

    run_ranks(job, expect_death={1})
    folders = [str(tmp_path / f"rank{rank}") for rank in range(2)]
    zero, one = build([*read_records(folders[0]), *read_records(folders[1])]).processes
    assert (zero.rank, one.rank) == (0, 1)
    assert [(g.number, g.outcome) for g in zero.generations] == [(1, "destroyed"), (2, "aborted"), (3, "aborted")]
    assert [(g.number, g.outcome) for g in one.generations] == [(1, "destroyed"), (2, "aborted"), (3, OPEN)]
    assert one.generations[1].why_ended == "the stage raised ValueError: the loss is not finite"
    for process in (zero, one):
        fit, test, failed, _ = process.stages
        assert [stage.name for stage in process.stages] == ["fit", "test", "fit", "fit"]
        assert len({fit.trainer, failed.trainer}) == 2
        assert fit.start < fit.end <= test.start < test.end <= process.generations[0].ending <= failed.start < failed.end
    assert zero.stages[-1].end is not None
    assert one.stages[-1].end is None
    for suffix in ("png", "html", "json"):
        output = tmp_path / f"out.{suffix}"
        assert main(["timeline", *folders, "-o", str(output)]) == 0
        assert re.match(rf"{output}: Process groups of 2 ranks, 3 generations, 2 failures; 0 s is 20", capsys.readouterr().out)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert (
        "first on rank 1 (and 1 more rank): the stage raised ValueError: the loss is not finite"
        in (tmp_path / "out.html").read_text()
    )
    check_trace((tmp_path / "out.json").read_text())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.html", "out.json", "out.png", "rank0", "rank1"]


def test_the_example_and_the_commands_of_the_page_run(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "timeline.md").read_text()
    commands = re.findall(r"^\$ lightning-pgroup (.*)$", page, re.MULTILINE)

    def job(rank):
        return re.findall(r"the sweep goes on after (.*)", "".join(run_blocks(blocks_of("docs/timeline.md"), tmp_path)))

    first, second = run_ranks(job)
    assert len(first) == 1
    assert second == ["the loss is not finite"]
    monkeypatch.chdir(tmp_path)
    assert [command.split()[-1] for command in commands] == ["run.png", "run.html", "run.json"]
    for command in commands:
        assert main(command.split()) == 0
    listed = re.findall(r"<li>(.*)</li>", (tmp_path / "run.html").read_text())
    assert [re.sub(r" at [\d.]+ s", "", words) for words in listed] == [
        "1  gen 2 aborted, first on rank 1 (and 1 more rank): the stage raised ValueError: the loss is not finite"
    ]
    assert len((ROOT / "docs" / "timeline.png").read_bytes()) < 100_000


def test_wrong_arguments_say_what_is_right_and_end_with_2(tmp_path, capsys, monkeypatch):
    good = tmp_path / "good.jsonl"
    record_file.append(str(good), EVENT)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_bytes(b'\xff\xfe{"a": 1}\n[1]\n')
    (tmp_path / "folder.png").mkdir()
    content = good.read_bytes()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for arguments, message in [
        ([good, "-o", tmp_path / "x.svg"], "the output must end in .png, .html, .json, got"),
        ([good, "-o", tmp_path / "x"], "the output must end in .png, .html, .json, got"),
        ([good, "-o", tmp_path / "none" / "x.html"], "the folder of the output is not there"),
        ([tmp_path / "none", "-o", tmp_path / "x.html"], "none: No such file or directory"),
        ([tmp_path / "empty", "-o", tmp_path / "x.html"], "no records in"),
        ([tmp_path / "other.json", "-o", tmp_path / "x.html"], "that PGroupDDPStrategy(record=...) wrote"),
        ([good, tmp_path / "other.json", "-o", tmp_path / "other.json"], "would overwrite the records"),
        ([good, "-o", tmp_path / "x.png"], "pip install 'lightning-pgroup[plot]'"),
        ([good], "the following arguments are required: -o/--output"),
        (["-o", "x.html"], "the following arguments are required: RECORDS"),
    ]:
        with pytest.raises(SystemExit) as caught:
            main(["timeline", *map(str, arguments)])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
    monkeypatch.undo()
    with pytest.raises(SystemExit) as caught:
        main(["timeline", str(good), "-o", str(tmp_path / "folder.png")])
    assert caught.value.code == 2
    assert "can not be written" in capsys.readouterr().err
    assert good.read_bytes() == content
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "folder.png", "good.jsonl", "other.json"], (
        "nothing is left"
    )


def test_no_torch_and_no_pyplot_are_imported(tmp_path):
    record_file.append(str(tmp_path / "x.jsonl"), EVENT)
    code = """
    import sys
    from lightning_pgroup.command_line import main
    assert main(["timeline", "x.jsonl", "-o", "x.html"]) == 0
    assert "matplotlib" not in sys.modules
    assert main(["timeline", "x.jsonl", "-o", "x.png"]) == 0
    assert not {"torch", "lightning", "matplotlib.pyplot"} & sys.modules.keys()
    """
    command = [sys.executable, "-c", re.sub(r"^    ", "", code, flags=re.MULTILINE)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
