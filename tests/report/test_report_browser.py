"""The page in a real browser: it fits a phone, no label covers another, and pointing at a policy shows its lines."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, sync_playwright
from report_files import bench_document, page_of, simulation_document

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]

# Texts of the same drawing whose boxes overlap by more than a hair.
OVERLAPS = """() => [...document.querySelectorAll("svg")].flatMap((svg) => {
  const texts = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
  return texts.flatMap(([name, box], at) => texts.slice(at + 1)
    .filter(([, other]) => Math.min(box.right, other.right) - Math.max(box.left, other.left) > 0.5
      && Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top) > 0.5)
    .map(([other]) => `${name} / ${other}`));
})"""

# What is wider than the screen and cannot be scrolled by itself.
OVERFLOWS = """() => [...document.querySelectorAll("main *")]
  .filter((element) => !element.closest(".scroll") && element.getBoundingClientRect().right > innerWidth + 1)
  .map((element) => element.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page of both kinds of file, with rates of five digits, on a phone."""
    chromium = shutil.which("chromium")
    assert chromium, "chromium is not on PATH: bash tests/dashboard/setup.sh"
    folder = tmp_path_factory.mktemp("page")
    simulation = simulation_document()
    for cell in simulation["cells"]:
        cell["tokens_per_s"] *= 250
    (folder / "page.html").write_text(page_of(folder, bench_document(), simulation), encoding="utf-8")
    requested: list[str] = []
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        opened = browser.new_page(viewport={"width": 375, "height": 800})
        opened.on("request", lambda request: requested.append(request.url))
        opened.on("console", lambda message: complaints.append(message.text))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.goto((folder / "page.html").as_uri())
        yield opened
        browser.close()
    assert requested == [(folder / "page.html").as_uri()]
    assert complaints == []


@pytest.mark.parametrize("width", [375, 1280])
def test_nothing_overlaps_and_nothing_is_cut_off(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    overlapping = page.evaluate(OVERLAPS)
    assert not overlapping, overlapping
    assert page.evaluate(OVERFLOWS) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_pointing_at_a_policy_fades_the_others(page):
    page.set_viewport_size({"width": 1280, "height": 800})
    faded = "() => [...new Set([...document.querySelectorAll('.faded')].map((series) => series.dataset.policy))].sort()"
    assert page.evaluate(faded) == []
    page.locator(".scenario .legend li[data-policy='dcut']").first.hover()
    assert page.evaluate(faded) == ["auto", "dflash", "plain", "ratio:0.25", "ratio:0.5"]
    page.locator("h1").hover()
    assert page.evaluate(faded) == []


def test_both_themes_and_paper_are_readable(page):
    ink = "() => [getComputedStyle(document.documentElement).backgroundColor, getComputedStyle(document.body).color]"
    seen = {}
    for name, media in {"light": {}, "dark": {"color_scheme": "dark"}, "paper": {"media": "print"}}.items():
        page.emulate_media(**{"media": "screen", "color_scheme": "light", **media})
        back, front = (sum(int(part) for part in text[4:-1].split(",")) for text in page.evaluate(ink))
        seen[name] = back > front
        assert abs(back - front) > 450
    assert seen == {"light": True, "dark": False, "paper": True}
