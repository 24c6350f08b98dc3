"""Test the report of a run in a browser: content, figures, layout and sorting."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optuna.trial import TrialState
from PIL import Image
from playwright.sync_api import Browser, Error, Page, sync_playwright

from hpo import Categorical, Float, SearchSpace
from hpo.objectives import Objectives
from hpo.results.confirmation import make_plan
from hpo.results.reader import RunReader
from hpo.store.record import Record
from hpo.store.run_dir import RunDir
from hpo.text_format import format_number
from hpo.views.page.html_report import render_report, write_report
from tests.support.launch import run_hpo
from tests.support.limits import scale
from tests.support.runs import (
    SPACE,
    START_SECONDS,
    add_evaluation,
    add_search,
    claim_evaluation,
    make_manifest,
    make_run,
)

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]

pytestmark = pytest.mark.slow

Show = Callable[[Path], AbstractContextManager[Page]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium: apt install chromium")
    with sync_playwright() as playwright:
        try:
            # Chromium creates sockets in TMPDIR, and their paths must be short.
            browser = playwright.chromium.launch(
                executable_path=CHROMIUM, args=ARGUMENTS, env={**os.environ, "TMPDIR": "/tmp"}
            )
        except Error as error:
            first, *lines = error.message.splitlines()
            reason = next((line.partition("[err]")[2] for line in lines if "[err]" in line), first)
            pytest.skip(f"{CHROMIUM} cannot be started: {reason.strip()}")
        yield browser
        browser.close()


SCROLL_UNTIL_DRAWN = """it => {
    if (it.querySelector("svg.main-svg")) return true;
    it.scrollIntoView({behavior: "instant", block: "center"});
}"""


@pytest.fixture(scope="module")
def show(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Show]:
    """Yield a function that opens the report of a run and draws all figures.

    A console message or a network request is an error. Pages are used again, and all reports have
    the same address: otherwise, Chromium compiles Plotly again, which takes most of the time.
    """
    path = tmp_path_factory.mktemp("page") / "page.html"
    messages: list[str] = []
    closed: list[Page] = []

    def make_page() -> Page:
        page = browser.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("dialog", lambda dialog: messages.append(dialog.message))
        page.on("request", lambda request: messages.append(request.url))
        return page

    @contextmanager
    def open_page(run_dir: Path) -> Iterator[Page]:
        path.write_text(render_report(RunReader(run_dir), 10, START_SECONDS + 100), "utf-8")
        page = closed.pop() if closed else make_page()
        page.set_viewport_size({"width": 1000, "height": 900})
        page.emulate_media(color_scheme="light", media="screen")
        page.goto(path.as_uri())
        messages.remove(path.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached", timeout=scale(180) * 1000)
        for place in page.locator(".plot").all():
            # Figures that are drawn above may move it out of view again, so it scrolls until it is
            # drawn.
            page.wait_for_function(
                SCROLL_UNTIL_DRAWN, arg=place.element_handle(), timeout=scale(180) * 1000
            )
        page.evaluate("scrollTo({top: 0, behavior: 'instant'})")
        yield page
        closed.append(page)

    yield open_page
    assert messages == []


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of 60 evaluations. Some are pruned, failed, interrupted, running or imported."""
    path = tmp_path_factory.mktemp("report") / "run"
    record = make_run(path)
    add_evaluation(
        record,
        curve={1: 0.9, 2: 0.8},
        imported_from="trial 3 of runs/before",
        propagator="--warm-start",
    )
    add_search(record, 60)
    add_evaluation(
        record, TrialState.FAIL, curve={1: 0.7}, failure="interrupted", began=START_SECONDS + 70
    )
    add_evaluation(
        record,
        TrialState.RUNNING,
        curve={1: 0.6, 2: 0.5},
        began=START_SECONDS + 90,
        worker=3,
        island=1,
    )
    return path


@pytest.fixture(scope="module")
def page(show: Show, run_dir: Path) -> Iterator[Page]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        with show(run_dir) as page:
            yield page
    time.tzset()


def count_points(page: Page, figure: str) -> int:
    return page.locator(f"#{figure} .scatterlayer .points path").count()


def test_figures_match_study(page: Page, run_dir: Path) -> None:
    evaluations = RunReader(run_dir).read_evaluations()
    states = [evaluation.state for evaluation in evaluations if not evaluation.imported_from]
    assert {states.count(state) for state in ("complete", "pruned", "failed")} == {49, 6, 5}
    assert count_points(page, "history") == 60
    assert count_points(page, "best") == 2 * 4
    assert count_points(page, "slice-0") == 49 + 6 + 1 + 5, (
        "evaluations with a loss, an imported one, and failures"
    )
    assert count_points(page, "curves") == 63
    spans = page.evaluate(
        "document.querySelector('#timeline').data.map(trace => [trace.name, trace.x.length / 3])"
    )
    assert dict(spans) == {"complete": 49, "pruned": 6, "failed": 5, "interrupted": 1, "running": 1}
    lines = page.evaluate(
        "document.querySelector('#parallel').data.map(trace => [trace.name, trace.x.length / 6])"
    )
    assert dict(lines) == {"the best 5": 5, "the next 20": 20, "others": 25}
    best = min(
        (evaluation for evaluation in evaluations if evaluation.state == "complete"),
        key=lambda evaluation: evaluation.loss,
    )
    assert page.locator(".loss").inner_text().split() == ["loss", f"{best.loss:.4g}"]
    assert json.loads(page.locator(".copy").get_attribute("data-copy") or "") == best.params
    assert "of 64 evaluations" in page.locator("header").inner_text()
    assert "1 imported" in page.locator("header").inner_text()
    assert "1 running when it crashed" in page.locator("header").inner_text()
    start, end, _ = page.evaluate(
        "document.querySelector('#timeline').data.find(it => it.name == 'running').x"
    )
    assert start == end, "the time of the crash is unknown"


def test_table_sorts_by_mouse_and_keyboard(page: Page) -> None:
    table = page.locator("#top table")

    def column(name: str) -> list[Any]:
        names = [text.strip() for text in table.locator("th").all_inner_texts()]
        place = names.index(name) + 1
        cells = table.locator(f"tbody td:nth-child({place})").evaluate_all(
            "cells => cells.map(c => c.dataset.value)"
        )
        return [float(cell) if cell[0].isdigit() else cell for cell in cells]

    assert column("loss") == sorted(column("loss"))
    for name in ("lr", "activation", "trial"):
        head = table.locator("th button", has_text=name)
        head.click()
        ascending = column(name)
        assert ascending == sorted(ascending), name
        head.focus()
        page.keyboard.press("Enter")
        descending = column(name)
        assert descending == sorted(descending, reverse=True), name
        assert table.locator("th[aria-sort=descending]").inner_text() == name


def test_failures_are_grouped_with_traceback(page: Page) -> None:
    groups = page.locator("#failures details")
    reasons = [text.split(maxsplit=1) for text in groups.locator("summary").all_inner_texts()]
    assert sum(int(count) for count, _ in reasons) == 5
    assert {reason for _, reason in reasons} <= {
        f"ValueError: too bad in train.py:{line}" for line in range(3)
    }
    assert not groups.first.locator("pre").is_visible()
    groups.first.locator("summary").press("Enter")
    assert groups.first.locator("pre").inner_text().startswith("Traceback of trial")


def resize(page: Page, width: int) -> None:
    """Set the width of the window, and wait until the figures have the new width."""
    page.set_viewport_size({"width": width, "height": 900})
    fits = "all => all.every(it => it.querySelector('svg').clientWidth === it.clientWidth)"
    page.wait_for_function(
        f"size => innerWidth === size && ({fits})([...document.querySelectorAll('.plot')])",
        arg=width,
    )


def test_page_fits_window_width(page: Page) -> None:
    for width in (360, 768, 1600, 1000):
        resize(page, width)
        assert page.locator("#history svg").first.evaluate("it => it.clientWidth") <= width - 40
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = [figure.bounding_box() for figure in page.locator(".plot").all()]
        assert all(box and box["width"] >= min(280, width - 60) for box in boxes), width


def test_long_names_and_many_categories_do_not_overlap(show: Show, tmp_path: Path) -> None:
    """Names have 66 characters, and there are 60 categories.

    They overlap neither each other nor the edge of the window.
    """
    long = [
        f"encoder_block_{number}_attention_projection_dropout_probability_at_theend"
        for number in range(4)
    ]
    assert len(long[0]) == 66
    space = SearchSpace(
        **{name: Float(0, 1) for name in long},
        kind=Categorical(*(f"kind_{n:02}" for n in range(60))),
    )
    record, chance = make_run(tmp_path / "run", space), random.Random(0)
    for trial in range(70):
        add_evaluation(
            record,
            curve={1: chance.random()},
            params=space.draw(chance),
            space=space,
            began=START_SECONDS + trial,
        )

    def count_overlaps(page: Page, selector: str) -> int:
        boxes = page.evaluate(
            f"[...document.querySelectorAll('{selector}')]"
            ".map(it => it.getBoundingClientRect()).map(it => it.toJSON())"
        )
        assert len(boxes) >= 6, selector
        ordered = sorted(boxes, key=lambda box: float(box["left"]))
        return sum(box["left"] < before["right"] - 2 for before, box in pairwise(ordered))

    with show(tmp_path / "run") as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 1000
        values = page.locator("#answer .plain td").all()
        assert all(box and box["height"] < 60 for box in (value.bounding_box() for value in values))
        tops = page.evaluate(
            "[...document.querySelectorAll('#parallel .annotation-text')]"
            ".filter(it => it.textContent.startsWith('kind_'))"
            ".map(it => it.getBoundingClientRect().top).sort((a, b) => a - b)"
        )
        assert len(tops) == 60
        assert min(after - before for before, after in pairwise(tops)) > 10
        assert count_overlaps(page, "#parallel .xtick text") == 0
        slices = [
            page.locator(f"#slice-{number} .xtick text").all_text_contents() for number in range(5)
        ]
        (number,) = [number for number, texts in enumerate(slices) if "kind_59" in texts]
        assert count_overlaps(page, f"#slice-{number} .xtick text") == 0


def test_colours_follow_theme_and_print_is_light(page: Page) -> None:
    colours = """[
        getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector('#history .xtitle')).fill,
        document.querySelector('#best').data[0].line.color,
    ]"""
    dark = ["rgb(21, 24, 28)", "rgb(230, 232, 235)", "#7db5f7"]
    light = ["rgb(255, 255, 255)", "rgb(28, 31, 36)", "#1a5fb4"]

    def wait_until_drawn(expected: list[str]) -> None:
        is_drawn = f"expected => String({colours}) === String(expected)"
        page.wait_for_function(is_drawn, arg=expected, timeout=scale(180) * 1000)

    try:
        page.emulate_media(color_scheme="dark")
        wait_until_drawn(dark)
        page.emulate_media(color_scheme="light")
        wait_until_drawn(light)
        page.emulate_media(color_scheme="dark", media="print")
        assert page.evaluate(colours) == light
        assert not page.locator("nav").is_visible()
        pdf = page.pdf(format="A4")
        assert pdf.startswith(b"%PDF")
    finally:
        page.emulate_media(color_scheme="light", media="screen")


READ_BOX = """it => {
  const {left, top, right, bottom} = it.getBoundingClientRect();
  return [left, top, right, bottom];
}"""
# Returns each visible line of text, the box of its letters (a third of the font size above and
# below its middle, in any font), and the left and right edge of the block that contains it. Text
# outside scrolled areas is ignored.
READ_TEXT_LINES = """whole => {
  const found = [], texts = document.createTreeWalker(whole, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode, holder = text.parentElement, range = document.createRange();
    if (!text.data.trim() || !holder.checkVisibility()) continue;
    if (holder.closest(".plot, noscript")) continue;
    let block = holder;
    while (getComputedStyle(block).display.startsWith("inline")) block = block.parentElement;
    const place = block.getBoundingClientRect();
    const third = parseFloat(getComputedStyle(holder).fontSize) / 3;
    const scrolled = holder.closest(".wide, pre")?.getBoundingClientRect().right ?? Infinity;
    range.selectNodeContents(text);
    for (const {left, top, right, bottom} of range.getClientRects()) {
      const middle = (top + bottom) / 2;
      if (right - left < 1 || right > scrolled) continue;
      const box = [left, middle - third, right, middle + third];
      found.push([text.data.trim(), box, [place.left, place.right]]);
    }
  }
  return found;
}"""


def read_boxes(page: Page, *selectors: str) -> list[list[float]]:
    """Return the edges (left, top, right, bottom) of the first element that each selector finds."""
    return [page.locator(selector).first.evaluate(READ_BOX) for selector in selectors]


def resize_with_font(page: Page, width: int, font: str) -> None:
    """Show the page and its figures with a font family, in a window of this width."""
    page.evaluate(
        "font => { document.body.style.fontFamily = font;"
        " dispatchEvent(new Event('beforeprint')) }",
        font,
    )
    resize(page, width)
    page.evaluate("scrollTo({top: 0, behavior: 'instant'})")


@pytest.fixture(
    params=[(1000, ""), (1000, "serif"), (1000, "monospace"), (360, ""), (360, "monospace")],
    ids=str,
)
def resized_page(page: Page, request: pytest.FixtureRequest) -> Iterator[tuple[Page, int]]:
    """Yield the page with one combination of window width and font, and the width."""
    width, font = request.param
    resize_with_font(page, width, font)
    yield page, width
    resize_with_font(page, 1000, "")


def test_texts_do_not_overlap_or_overflow(resized_page: tuple[Page, int]) -> None:
    page, width = resized_page
    lines = page.evaluate(f"({READ_TEXT_LINES})(document.body)")
    assert len(lines) > 150
    for text, (left, _, right, _), (begins, ends) in lines:
        assert max(0, begins) - 1 <= left < right <= min(width, ends) + 1, text
    for (text, first, _), (other_text, second, _) in combinations(lines, 2):
        apart = (
            first[2] <= second[0] + 1
            or second[2] <= first[0] + 1
            or first[3] <= second[1] + 1
            or second[3] <= first[1] + 1
        )
        assert apart, f"{text!r} overlaps {other_text!r}"


def test_answer_is_first_and_sections_are_aligned(resized_page: tuple[Page, int]) -> None:
    page, width = resized_page
    links = page.locator("nav a").evaluate_all("all => all.map(it => it.getAttribute('href'))")
    assert (links[:2], links[-1]) == (["#answer", "#top"], "#run")
    top = ["h1", "header p", "nav", "#answer h2", ".answer", "#answer h3", "#answer > p", "#best"]
    for parts in (top, ["header", *links]):
        part_boxes = read_boxes(page, *parts)
        for above, below in pairwise(range(len(parts))):
            assert part_boxes[above][1] < part_boxes[above][3] <= part_boxes[below][1] + 1, (
                f"{parts[above]} above {parts[below]}"
            )
        assert len({round(left) for left, *_ in part_boxes[1:]}) == 1, f"{parts} have one left edge"
    heading, card, figure = read_boxes(page, "#answer h2", ".answer", "#best")
    assert round(card[2]) == round(figure[2]) == round(heading[2]) == round(width - heading[0]), (
        "the parts must have one right edge"
    )
    assert card[3] < 900, "the answer is in the first window"

    loss_part, params_part = page.locator(".answer > div").evaluate_all(
        f"all => all.map({READ_BOX})"
    )
    for left, upper, right, lower in (loss_part, params_part):
        assert card[0] + 10 < left < right < card[2] - 10
        assert card[1] + 10 < upper < lower < card[3] - 10
    is_right_of_it = (
        loss_part[1] == pytest.approx(params_part[1], abs=1) and loss_part[2] + 10 < params_part[0]
    )
    is_below_it = (
        loss_part[0] == pytest.approx(params_part[0], abs=1) and loss_part[3] + 10 < params_part[1]
    )
    assert (is_right_of_it, is_below_it) == (width == 1000, width == 360)
    size = "all => all.map(it => parseFloat(getComputedStyle(document.querySelector(it)).fontSize))"
    sizes = page.evaluate(size, [".loss", "h1", "h2", "h3", "body", ".loss span"])
    assert sizes == sorted(sizes, reverse=True), "more important texts must be larger"
    assert 2 * sizes[4] < sizes[0] < 60
    assert 11 < sizes[-1] < sizes[4] < 20


def test_figures_fill_their_boxes_without_covered_parts(resized_page: tuple[Page, int]) -> None:
    page, _ = resized_page
    legends = 0
    for figure in page.locator(".plot").all():
        place, axes = (
            part.first.evaluate(READ_BOX) for part in (figure, figure.locator(".bglayer"))
        )
        assert axes[2] - axes[0] > (place[2] - place[0]) / 2
        assert axes[3] - axes[1] > (place[3] - place[1]) / 4
        is_visible = "([left, top, right, bottom]) => left < right && top < bottom"
        shown = f"all => all.map({READ_BOX}).filter({is_visible})"
        parts = figure.locator("text, .legend .bg").evaluate_all(shown)
        assert len(parts) > 4
        for left, top, right, bottom in [axes, *parts]:
            assert place[0] - 2 < left < right < place[2] + 2
            assert place[1] - 2 < top < bottom < place[3] + 2
        for _, top, _, bottom in figure.locator(".legend .bg").evaluate_all(shown):
            legends += 1
            assert bottom <= axes[1] + 1 or top >= axes[3] - 1
    assert legends > 0


def test_best_curve_spans_its_figure(page: Page) -> None:
    page.locator("#best").evaluate(
        "it => it.scrollIntoView({behavior: 'instant', block: 'center'})"
    )
    axes, curve = read_boxes(page, "#best .bglayer", "#best .lines path")
    assert axes[0] < curve[0] < curve[2] < axes[2]
    assert axes[1] < curve[1] < curve[3] < axes[3]
    assert curve[2] - curve[0] > (axes[2] - axes[0]) / 2
    left, top, right, bottom = curve
    picture = page.screenshot(
        clip={"x": left, "y": top, "width": right - left, "height": bottom - top}
    )
    seen = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))
    assert (seen == (26, 95, 180)).all(axis=2).any(axis=0).mean() > 0.9


def test_figure_under_pointer_shows_no_button_bar(page: Page) -> None:
    title = page.locator("#parallel .xtick text").last
    assert title.text_content() == "gamma"
    title.scroll_into_view_if_needed()
    page.mouse.move(0, 0)
    before = title.screenshot()
    page.locator("#parallel").hover()
    page.wait_for_timeout(500)  # A bar of buttons would fade in during this time.
    assert title.screenshot() == before
    assert page.locator(".modebar-btn").count() == 0, (
        "one of the buttons sends the figure to a server"
    )


def test_names_and_texts_are_escaped(show: Show, tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    space = SearchSpace(x=Float(0.0, 1.0), accent=Categorical("--text", "<b>&amp;", "'\"`"))
    record = make_run(tmp_path / "run", space, command=evil, settings={evil: evil})
    for count, choice in enumerate(["--text", "<b>&amp;", "'\"`"] * 8):
        params = {"x": count / 24, "accent": choice}
        add_evaluation(
            record,
            params=params,
            curve={1: 2 - count / 24, 2: 1.0 + count},
            space=space,
            metrics={evil: 1.0},
        )
    add_evaluation(
        record,
        TrialState.FAIL,
        params=params,
        space=space,
        failure=f"{evil}: {{{{ 7 * 7 }}}}",
        traceback=evil * 9,
    )
    with show(tmp_path / "run") as page:
        assert page.locator("script").count() == 4, (
            "packed plotly, the figures, page.js, and unpacked plotly"
        )
        assert page.locator("img").count() == 0
        assert page.locator("#answer tbody th").all_inner_texts() == ["x", "accent"]
        assert page.locator("#failures summary span").inner_text() == f"{evil}: {{{{ 7 * 7 }}}}"
        texts = page.locator("#parallel .annotation-text").all_text_contents()
        assert {"--text", "<b>&amp;", "'\"`"} <= set(texts)


HOSTILE_TEXT = (
    "</mark></pre><script>alert(1)</script><img src=x onerror=alert(2)>"
    "\0\x1b[31m\u202e\u2066\r\udcff {{ 7 * 7 }}"
)
TEXTS = {
    "def f(x):\n": "\treturn x\n\n\nprint(f(3))",
    "": "\nafter a prompt of nothing",
    "import os": "x" * 20_000,
    HOSTILE_TEXT: HOSTILE_TEXT,
    "many lines": "\n" * 20_000,
}
# Computes the contrast of text and background as in WCAG 2: the ratio of their luminances.
CONTRAST = """it => {
  const luminance = (colour) => colour.match(/[0-9.]+/g).slice(0, 3).map(Number).map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
  const {color, backgroundColor} = getComputedStyle(it);
  const [dark, light] = [luminance(color), luminance(backgroundColor)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
}"""


def test_generated_texts_are_escaped_and_wrapped(show: Show, tmp_path: Path) -> None:
    add_evaluation(make_run(tmp_path / "run"))
    test = {"trial": 0, "times": 1, "metrics": {"loss": 1.5}, "predictions": []}
    texts = [{"prompt": prompt, "text": text} for prompt, text in TEXTS.items()]
    (tmp_path / "run" / "test.json").write_text(json.dumps({**test, "texts": texts}))
    with show(tmp_path / "run") as page:
        assert page.locator("nav a[href='#texts']").is_visible()
        assert page.locator("script").count() == 4
        assert page.locator("img").count() == 0
        shown = page.locator("#texts pre")
        function, nothing, long, hostile, lines = (
            element.text_content() or "" for element in shown.all()
        )
        assert function == "def f(x):\n\treturn x\n\n\nprint(f(3))"
        assert nothing == "\nafter a prompt of nothing"
        assert long == "import os" + "x" * 10_000 + "..."
        escaped = r"\x00\x1b[31m\u202e\u2066\r\udcff {{ 7 * 7 }}"
        assert hostile == 2 * HOSTILE_TEXT.replace(
            HOSTILE_TEXT[HOSTILE_TEXT.index("\0") :], escaped
        )
        assert lines == "many lines" + "\n" * 10_000 + "..."
        assert shown.locator("mark").first.text_content() == "def f(x):\n"
        for width in (400, 1300):
            resize(page, width)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            for element in shown.all():
                size = element.evaluate("it => [it.scrollWidth, it.clientWidth, it.clientHeight]")
                assert size[0] == size[1], "long lines must wrap"
                assert size[2] < 500, "long texts must scroll"
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert shown.locator("mark").first.evaluate(CONTRAST) > 7
            marked, whole = shown.locator("mark").first, shown.first
            colour = "it => getComputedStyle(it).backgroundColor"
            assert marked.evaluate(colour) != whole.evaluate(colour)


STUDIES: dict[str, list[dict[str, Any]]] = {
    "empty": [],
    "one": [{}],
    "only failures": [{"state": TrialState.FAIL, "failure": "no"}] * 3,
    "only running": [{"state": TrialState.RUNNING, "curve": {}}] * 2,
    "equal losses": [{"curve": {1: 0.5}}] * 30,
    "losses of all sizes": [
        {"curve": {1: loss, 2: loss}} for loss in (-5.0, 0.0, 1e-300, 1e300, 5.0)
    ],
    "losses far apart": [{"curve": {1: loss, 2: loss}} for loss in (1e-5, 1.0, 1e305)],
    "one epoch and two epochs": [{"curve": {1: 0.1}}, {"curve": {1: 0.3, 2: 0.2}}],
    "tiny losses": [{"curve": {1: 1e-12 * 10**count, 2: 2e-12}} for count in range(8)],
}


@pytest.mark.parametrize("name", STUDIES)
def test_report_of_unusual_study_opens(show: Show, tmp_path: Path, name: str) -> None:
    record = make_run(tmp_path / "run")
    for arguments in STUDIES[name]:
        add_evaluation(record, **arguments)
    with show(tmp_path / "run") as page:
        complete = sum(
            arguments.get("state", TrialState.COMPLETE) == TrialState.COMPLETE
            for arguments in STUDIES[name]
        )
        assert page.locator("#top tbody tr").count() == min(10, complete)
        assert ("No evaluation has succeeded" in page.locator("#answer").inner_text()) == (
            complete == 0
        )


def test_large_run_gives_small_report_with_best(show: Show, tmp_path: Path) -> None:
    record = make_run(tmp_path / "run", budget=2500)
    add_search(record, 2500)
    write_report(RunReader(tmp_path / "run"), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 5e6, (
        "a report of 2,500 evaluations must be small"
    )
    with show(tmp_path / "run") as page:
        assert 1500 < count_points(page, "history") < 2400
        best = min(
            evaluation.loss
            for evaluation in RunReader(tmp_path / "run").read_evaluations()
            if evaluation.state == "complete"
        )
        drawn = page.evaluate("Math.min(...document.querySelector('#slice-0').data[0].y)")
        assert drawn == pytest.approx(best, rel=1e-5)


def test_many_hyperparameters_give_small_report(tmp_path: Path) -> None:
    space = SearchSpace(**{f"parameter_{count}": Float(0.0, 1.0) for count in range(60)})
    record = make_run(tmp_path / "run", space)
    for trial in range(400):
        add_evaluation(
            record,
            curve={1: 1 / (trial + 1)},
            params=dict.fromkeys(space.describe(), trial / 400),
            space=space,
        )
    assert len(render_report(RunReader(tmp_path / "run"), 10, START_SECONDS)) < 4e6


def add_losses(run_dir: Path, losses: Sequence[float], first_epoch: float | None = None) -> None:
    """Write an evaluation for each loss. First epochs have higher losses, or `first_epoch`."""
    record, chance = make_run(run_dir, budget=len(losses)), random.Random(0)
    for trial, loss in enumerate(losses):
        params = {
            "layers": chance.randint(1, 5),
            "activation": "relu",
            "lr": 10 ** chance.uniform(-4, 0),
            "gamma": 0.9,
        }
        curve = {1: loss + abs(loss) if first_epoch is None else first_epoch, 2: loss, 3: loss}
        add_evaluation(
            record,
            curve=curve,
            params=params,
            began=START_SECONDS + trial,
            metrics={"parameters": 110300.0},
        )


def make_decreasing_losses(count: int, low: float = 0.1, high: float = 1.0) -> list[float]:
    """Return losses that decrease from `high` to `low`."""
    return [low + (high - low) * (1 - index / (count - 1)) for index in range(count)]


LOSSES_WITH_OUTLIERS: dict[str, list[float]] = {
    "the first": [150300.5, *make_decreasing_losses(40)],
    "a third": [
        *make_decreasing_losses(20),
        *(10.0**power for power in range(3, 13)),
        *make_decreasing_losses(20),
        *[1e12] * 10,
    ],
    "logarithmic": [1e9, *make_decreasing_losses(40, 0.001, 0.9)],
    "below zero, the others close together": [*make_decreasing_losses(40, -2.0, -2.0 + 1e-8), 1e4],
}


READ_FIGURE = """name => {
    const {_fullLayout: {yaxis, shapes}, _fullData: traces} = document.getElementById(name);
    const place = y => yaxis.type === "log" ? Math.log10(y) : y;
    const height = y => (place(y) - yaxis.range[0]) / (yaxis.range[1] - yaxis.range[0]);
    const marked = traces.filter(one => one.mode === "markers" && one.yaxis === "y");
    const points = marked.flatMap(one => one.y.map((y, n) => ({
        y, height: height(y), text: one.text[n],
        symbol: [one.marker.symbol].flat()[n] ?? "all the same"})
    ));
    const lines = traces.filter(one => one.mode.includes("lines"))
        .flatMap(one => one.y.filter(y => y !== null));
    const apart = shapes.map(one => height(one.y0));
    return {points, lines: lines.map(height), type: yaxis.type, apart, ticks: yaxis.tickvals};
}"""


@pytest.mark.parametrize("name", LOSSES_WITH_OUTLIERS)
def test_outliers_are_drawn_at_edge_of_figures(show: Show, tmp_path: Path, name: str) -> None:
    losses = LOSSES_WITH_OUTLIERS[name]
    inside = [loss for loss in losses if loss <= 3]
    far = sorted(set(losses) - set(inside))
    count, highest = len(losses) - len(inside), format_number(max(losses))
    add_losses(tmp_path / "run", losses)
    with show(tmp_path / "run") as page:
        for figure in ("history", "slice-0", "slice-1"):
            drawn = page.evaluate(READ_FIGURE, figure)
            assert drawn["type"] == ("log" if name == "logarithmic" else "linear")
            marks = [point for point in drawn["points"] if point["symbol"] == "triangle-up"]
            others = [point for point in drawn["points"] if point["symbol"] != "triangle-up"]
            assert sorted(point["y"] for point in others) == pytest.approx(sorted(inside), rel=1e-5)
            assert len(marks) == count
            labels = {line.split(": ")[-1] for mark in marks for line in mark["text"].split("<br>")}
            assert {f"loss {format_number(loss)}" for loss in far} <= labels
            heights = [point["height"] for point in others]
            (apart,) = drawn["apart"]
            assert 0 < min(heights) < max(heights) < apart < min(mark["height"] for mark in marks)
            assert max(mark["height"] for mark in marks) < 1
            assert max(heights) - min(heights) > 0.8, "other losses must fill the figure"
            assert max(drawn["ticks"]) <= max(inside)
        curves = page.evaluate(READ_FIGURE, "curves")
        assert max(curves["lines"]) < 1
        diverged = [point for point in curves["points"] if point["symbol"] == "triangle-up"]
        assert len(diverged) == count
        assert all(point["text"].endswith(" after epoch 3") for point in diverged)
        parallel = page.evaluate(READ_FIGURE, "parallel")
        assert len(parallel["points"]) == count
        assert 0.9 < max(parallel["lines"]) < 1
        sentence = f"{count} evaluations go beyond the scale, with losses of up to {highest}"
        if count == 1:
            sentence = f"1 evaluation goes beyond the scale, with a loss of {highest}"
        for selector in (
            "#search figcaption",
            "#hyperparameters figcaption",
            "#hyperparameters p:has(+ .slices)",
        ):
            assert (
                f"{sentence}: \N{BLACK UP-POINTING TRIANGLE} at the upper edge."
                in page.locator(selector).inner_text()
            )


def test_high_first_losses_are_drawn_at_edge_with_values(show: Show, tmp_path: Path) -> None:
    add_losses(tmp_path / "run", make_decreasing_losses(20), first_epoch=110300.0)
    with show(tmp_path / "run") as page:
        assert page.locator("#answer .metric").inner_text().split() == ["parameters", "110300"]
        for figure, count in (("best", 2), ("curves", 20)):
            drawn = page.evaluate(READ_FIGURE, figure)
            marks = [point for point in drawn["points"] if point["symbol"] == "triangle-up"]
            assert len(marks) == count
            assert all(point["text"].endswith("<br>loss 110300 after epoch 1") for point in marks)
            assert drawn["apart"][0] < min(mark["height"] for mark in marks) < 1
            assert min(drawn["lines"]) > 0
            assert sum(height > drawn["apart"][0] for height in drawn["lines"]) == count + (
                figure == "curves"
            )
        answer = "2 points go beyond the scale, with losses of up to 110300"
        curves = "20 evaluations go beyond the scale, with losses of up to 110300"
        assert answer in page.locator("#answer figcaption").inner_text()
        assert curves in page.locator("#learning figcaption").inner_text()
        assert "beyond" not in page.locator("#search").inner_text()
        page.locator("#best").scroll_into_view_if_needed()
        mark = page.locator("#best .trace:nth-child(2) .point").last.bounding_box()
        assert mark is not None
        page.mouse.move(mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2)
        page.wait_for_selector("#best .hovertext", timeout=30_000)
        assert "110300" in (page.locator("#best .hovertext").first.text_content() or "")


def test_figures_without_outliers_do_not_mention_them(page: Page) -> None:
    assert "beyond" not in page.locator("body").inner_text()
    for figure in ("best", "history", "curves", "parallel", "slice-0"):
        drawn = page.evaluate(READ_FIGURE, figure)
        assert drawn["apart"] == []
        assert not any(point["symbol"] == "triangle-up" for point in drawn["points"])


def test_rungs_show_outcomes_of_individuals(show: Show, tmp_path: Path) -> None:
    record = make_run(tmp_path / "run", pruner="asha")
    curve = {epoch: 1 / epoch for epoch in range(1, 10)}
    params = {"layers": 1, "activation": "relu", "gamma": 0.9}

    def add_trial(
        number: int, state: TrialState, epochs: int, factor: float, **attributes: Any
    ) -> None:
        losses = {epoch: factor * loss for epoch, loss in curve.items() if epoch <= epochs}
        add_evaluation(
            record,
            state,
            curve=losses,
            params={**params, "lr": number / 100},
            began=START_SECONDS + number,
            **attributes,
        )

    add_trial(1, TrialState.COMPLETE, 9, 1.0)
    add_trial(2, TrialState.PRUNED, 1, 2.0, paused_after=1)
    add_trial(3, TrialState.PRUNED, 3, 1.5, paused_after=3)
    add_trial(4, TrialState.PRUNED, 1, 4.0)
    add_trial(2, TrialState.COMPLETE, 9, 2.0, retry_of=1, resumed_from_step=1)
    add_trial(5, TrialState.FAIL, 1, 0.5, failure="rank 0: ValueError: no")
    with show(tmp_path / "run") as page:
        drawn = page.evaluate(
            "document.querySelector('#rungs').data.map(it => [it.name, it.x.map(Math.round)])"
        )
        assert dict(drawn) == {
            "continued": [0, 0, 1, 1],
            "promoted later": [0],
            "paused": [1],
            "pruned": [0],
            "failed": [0],
        }
        table = page.locator("#search tbody").last.inner_text().split("\n")
        assert [row.split("\t") for row in table] == [
            ["1", "5", "3", "0", "1", "1", ""],
            ["3", "3", "2", "1", "0", "0.3333", "trial 2, 0.5: after 6 have reached it"],
        ]
        assert "1 paused" in page.locator("header").inner_text()
        assert count_points(page, "curves") == 5, (
            "the curve of a promoted trial is part of a later curve"
        )


def test_lineage_and_schedule_are_drawn(show: Show, tmp_path: Path) -> None:
    record = make_run(tmp_path / "run", pbt=True)
    params = {"layers": 1, "activation": "relu", "gamma": 0.9}
    for trial, (loss, parent) in enumerate(
        [(0.9, None), (0.8, None), (0.5, 0), (0.6, 1), (0.3, 2)]
    ):
        known: dict[str, Any] = {} if parent is None else {"inherits": parent}
        losses = {1: loss + 0.1, 2: loss}
        add_evaluation(
            record,
            curve=losses,
            params={**params, "lr": (trial + 1) / 100},
            checkpoint_step=2,
            began=START_SECONDS + trial,
            **known,
        )
    with show(tmp_path / "run") as page:
        tree = page.evaluate(
            "document.querySelector('#descent').data.map(it => [it.name, it.x, it.y])"
        )
        places = {name: list(zip(x, y, strict=True)) for name, x, y in tree}
        assert places["lineage of the best"] == [(2, 0.9), (4, 0.5), (6, 0.3)]
        assert sorted(places["island 0"]) == [(2, 0.8), (2, 0.9), (4, 0.5), (4, 0.6), (6, 0.3)]
        assert places["inherits"][:6] == [
            (2, 0.9),
            (4, 0.5),
            (None, None),
            (2, 0.8),
            (4, 0.6),
            (None, None),
        ]
        losses, lr = page.evaluate(
            "document.querySelector('#schedule').data.map(it => [it.x, it.y])"
        )
        assert losses == [[1, 2, 3, 4, 5, 6], [1.0, 0.9, 0.6, 0.5, 0.4, 0.3]]
        assert lr == [[0, 2, 2, 4, 4, 6], [0.01, 0.01, 0.03, 0.03, 0.05, 0.05]]
        answer = page.locator("#answer").inner_text()
        assert (
            "It began with the weights of trial 2. These hyperparameters are the last of 3 stages"
            in answer
        )
        assert "--confirm-seeds" not in answer


def test_finished_confirmation_decides_the_answer(show: Show, tmp_path: Path) -> None:
    record = make_run(tmp_path / "run", confirm_seeds=2)
    for loss in (0.1, 0.2):
        add_evaluation(
            record,
            curve={1: 2 * loss, 2: loss},
            params={"layers": 1, "activation": "relu", "lr": loss, "gamma": 0.9},
        )
    plan, best = make_plan(make_manifest(confirm_seeds=2)), record.read_evaluations()
    run_dir = RunDir(tmp_path / "run")
    confirming = Record.create(run_dir.journal, "run-confirm", SPACE.describe(), confirms="run")
    total = plan.enqueue_planned(confirming, best, SPACE)
    losses = iter([0.5, 0.6, 0.2, 0.3])
    for ended in range(total):
        if ended in (0, total - 1):
            with show(tmp_path / "run") as page:
                answer = page.locator("#answer").inner_text()
                assert "Trial 0, by worker 0" in answer
                assert ("are pending" in answer) == (ended > 0)
        assignment = claim_evaluation(confirming, None, {}, total)
        confirming.complete(assignment, next(losses), 1.0, {})
    with show(tmp_path / "run") as page:
        answer = page.locator("#answer").inner_text()
        assert "Trial 1, by worker 0" in answer
        assert "mean loss of 2 other seeds\n0.25" in answer
        assert "Trial 1 has the lowest mean, with a standard deviation of 0.07071" in answer
        names = page.evaluate("document.querySelector('#best').data.map(trace => trace.name)")
        assert names == ["best: trial 1", "runner-up: trial 0"]


def test_report_command_overwrites_only_its_own_report(run_dir: Path, tmp_path: Path) -> None:
    def report(*arguments: object) -> subprocess.CompletedProcess[str]:
        return run_hpo("report", *arguments, cwd=run_dir.parent)

    for _ in range(2):
        made = report("run")
        assert (made.returncode, made.stdout, made.stderr) == (0, "run/report.html\n", "")
    assert "<!DOCTYPE html>" in (run_dir / "report.html").read_text("utf-8")
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    refused = report("run", "--output", mine)
    assert refused.returncode == 2
    assert (
        refused.stderr
        == f"error: -o {mine} exists. Add --overwrite to replace it, or name another file\n"
    )
    assert mine.read_text() == "mine"
    nowhere = report("run", "--output", "no/where.html")
    assert (nowhere.returncode, nowhere.stderr) == (
        2,
        "error: no/where.html cannot be written: No such file or directory\n",
    )
    assert report("nothing").stderr == (
        "error: nothing holds no run: there is no nothing/run.json. These are runs: run\n"
    )


def test_front_is_drawn_and_sorted(show: Show, tmp_path: Path) -> None:
    path = tmp_path / "run"
    record = make_run(
        path, objectives=Objectives(("loss", "parameters", "speed <b>"), ("speed <b>",))
    )
    for trial in range(12):
        metrics = {"parameters": 10.0 ** (6 - trial % 5), "speed <b>": 100.0 + 30 * trial}
        add_evaluation(
            record, curve={1: 3.0, 2: 1.0 + trial % 4}, began=START_SECONDS + trial, metrics=metrics
        )
    add_evaluation(
        record,
        curve={1: 1e9},
        began=START_SECONDS + 20,
        metrics={"parameters": 1.0, "speed <b>": 1.0},
    )
    add_evaluation(record, TrialState.FAIL, curve={}, failure="no", began=START_SECONDS + 21)
    on_front = len(RunReader(path).find_front())
    with show(path) as page:
        assert page.locator("#answer h2").inner_text() == "The front"
        assert [count_points(page, figure) for figure in ("front-1", "front-2")] == [13, 13]
        assert page.locator("#front-2 .ytitle").text_content() == "speed <b> (maximised)"
        assert page.locator("#hypervolume .scatterlayer .lines path").count() == 1
        table = page.locator("#answer table")
        assert table.locator("tbody tr").count() == on_front > 3
        table.locator("th button", has_text="speed").click()
        column = table.locator("tbody td:nth-child(3)").all_inner_texts()
        assert column == sorted(column, key=float)
        for width in (360, 1000):
            resize(page, width)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
