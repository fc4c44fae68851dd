"""Looking at pages in headless Chromium: errors, requests, texts that overlap or hardly show."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")  # as in the Makefile

# Every text that is seen, with its box, its colour and the colour behind it.
_TEXTS = """() => {
  const numbers = (colour) => {
    const found = colour.match(/[\\d.]+/g).map(Number);
    const scale = colour.startsWith("color(") ? 255 : 1;
    return [...found.slice(0, 3).map((n) => n * scale), found[3] ?? 1];
  };
  const behind = (element) => {
    if (element.namespaceURI.endsWith("svg")) {
      const shape = element.parentElement.querySelector(":scope > rect.shape");
      if (shape && getComputedStyle(shape).fill !== "none") return getComputedStyle(shape).fill;
    }
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (numbers(colour)[3] > 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const seen = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, element = node.parentElement;
    if (!node.textContent.trim() || element.closest("script, title, #tip")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (!box.width || !element.checkVisibility()) continue;
    const svg = element.namespaceURI.endsWith("svg"), style = getComputedStyle(element);
    const chart = svg ? [...document.querySelectorAll("svg.chart, svg.scale")].findIndex(
      (one) => one.contains(element)) : -1;
    seen.push({
      text: node.textContent.trim(), chart, svg,
      box: [box.left, box.top, box.right, box.bottom].map((n, i) => n + (i % 2 ? scrollY : 0)),
      colour: numbers(svg ? style.fill : style.color), behind: numbers(behind(element)),
    });
  }
  return seen;
}"""


@dataclass(frozen=True, slots=True)
class Seen:
    """A page that is open, what its console said, and the addresses that it asked for."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def texts(self) -> list[dict[str, Any]]:
        """The texts that are seen."""
        return self.page.evaluate(_TEXTS)

    def choose(self, tab: int) -> None:
        """The tab of this number in all rows that have one, counted from 0."""
        script = "n => document.querySelectorAll(`.tabs > input:nth-of-type(${n + 1})`)"
        self.page.evaluate(f"n => ({script})(n).forEach((one) => one.checked = true)", tab)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser. Fails where there is none, so that no test is left out unseen."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail("tests of pages need Chromium: make browser")
    arguments = ["--disable-dev-shm-usage"]  # in containers it is small
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def look(browser: Browser, place: Path, **settings: Any) -> Iterator[Seen]:
    """A page, with `width` and what a context of playwright takes."""
    width = settings.pop("width", 1600)
    context = browser.new_context(viewport={"width": width, "height": 900}, **settings)
    try:
        context.set_default_timeout(5000)
        seen = Seen(context.new_page())
        seen.page.on("console", lambda message: seen.errors.append(message.text))
        seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
        seen.page.on("request", lambda request: seen.requests.append(request.url))
        seen.page.goto(place.as_uri())
        yield seen
    finally:
        context.close()


def check(seen: Seen, place: Path, tabs: int = 1) -> None:
    """No error, no request, nothing wider than the page; texts apart and clear on every tab."""
    for tab in range(tabs):
        seen.choose(tab)
        texts = seen.texts()
        assert texts
        _inside(seen.page, texts)
        _apart(texts)
        _clear(texts)
    assert seen.requests == [place.as_uri()], seen.requests
    assert seen.errors == [], seen.errors


def _inside(page: Page, texts: list[dict[str, Any]]) -> None:
    width = page.evaluate("innerWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "wider than the page"
    for text in texts:
        if text["svg"] and text["chart"] >= 0:
            assert text["box"][0] >= 0 and text["box"][2] <= width, text


def _apart(texts: list[dict[str, Any]]) -> None:
    """Texts of a chart do not lie on each other."""
    charts: dict[int, list[dict[str, Any]]] = {}
    for text in texts:
        if text["svg"] and text["chart"] >= 0:
            charts.setdefault(text["chart"], []).append(text)
    for found in charts.values():
        for index, one in enumerate(found):
            for other in found[:index]:
                (a, b, c, d), (e, f, g, h) = one["box"], other["box"]
                wide, high = min(c, g) - max(a, e), min(d, h) - max(b, f)
                assert wide <= 1 or high <= 3, (one, other)


def _clear(texts: list[dict[str, Any]]) -> None:
    """Contrast of at least 4.5, as WCAG 2.2 (AA) asks for small texts."""
    for text in texts:
        bright = sorted((_luminance(text["colour"]), _luminance(text["behind"])))
        assert (bright[1] + 0.05) / (bright[0] + 0.05) >= 4.5, text


def _luminance(colour: list[float]) -> float:
    """Relative luminance by WCAG 2.2."""
    parts = [c / 255 for c in colour[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
