"""Measure the size of the HTML report of a run, and the times to write it and to open it.

python -m benchmarks.report [--evaluations 64 1000 10000]

Requires the extra `test` and chromium.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from hpo.results.reader import RunReader
from hpo.views.page.html_report import write_report
from tests.support.runs import add_search, make_run

_REPEATS = 5
_FLAGS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]


def time_page(browser: Browser, path: Path) -> tuple[float, float]:
    """Open a page.

    Return the seconds until its text is readable, and until its visible figures are drawn.
    """
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(path.as_uri(), wait_until="commit")
    page.locator("#best svg.main-svg").first.wait_for(state="attached")
    drawn = page.evaluate("performance.now()")
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    page.close()
    return painted / 1000, drawn / 1000


def main() -> None:
    """Print a line with size and times for each number of evaluations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--evaluations", type=int, nargs="+", default=[64, 1000, 10_000])
    arguments = parser.parse_args()
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        executable = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=executable, args=_FLAGS)
        for count in arguments.evaluations:
            run_dir, path = Path(folder, f"run{count}"), Path(folder, f"{count}.html")
            add_search(make_run(run_dir, budget=count), count)
            run = RunReader(run_dir)
            writing = []
            for _ in range(_REPEATS):
                start = time.monotonic()
                write_report(run, path)
                writing.append(time.monotonic() - start)
            painted, drawn = zip(*(time_page(browser, path) for _ in range(_REPEATS)), strict=True)
            print(
                f"{count:>6} evaluations: {path.stat().st_size / 1e6:.1f} MB, written in "
                f"{statistics.median(writing):.1f} s ({writing[0]:.1f} the first time), "
                f"readable after {statistics.median(painted):.1f} s, "
                f"drawn after {statistics.median(drawn):.1f} s",
                flush=True,
            )
        browser.close()


if __name__ == "__main__":
    main()
