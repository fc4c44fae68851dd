"""The pages of `sitsc report` and `sitsc plan diff --html` in headless Chromium."""

import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from sitsc.commands import plan_diff_html
from sitsc.commands.report_page import page
from sitsc.core.diff.compare import compare
from sitsc.core.diff.read import open_plan
from sitsc.core.diff_policy import facts_of, judge, read_policy
from tests.commands.browser import check, chromium, look
from tests.commands.measured_plans import measured

PLANS = Path(__file__).parents[2] / "plans"
LOOKS = [
    *(("gpu", 3, "light", 1600), ("gpu", 3, "dark", 380), ("stages", 6, "dark", 1600)),
    *(("experts", 3, "light", 900), ("cpu", 3, "light", 380)),
    *(("diff", 1, "light", 1600), ("diff", 1, "dark", 380)),
]
LARGE, STAGES, EXPERTS = "llama3-8b.h200", "smollm2-135m.h200x2", "qwen3-30b-a3b.h200x2"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of plans: one GPU measured and compared, stages, experts on two GPUs, a CPU; a diff."""
    folder = tmp_path_factory.mktemp("pages")
    names = (LARGE, STAGES, EXPERTS, "smollm2-135m.cpu", "llama3-8b.h100")
    opened = {name: open_plan(PLANS / f"{name}.json.xz") for name in names}
    actual, before = measured(opened[LARGE].plan, folder), opened["llama3-8b.h100"]
    texts = {
        "gpu": page(opened[LARGE], actual=actual, before=before),
        "stages": page(opened[STAGES]),
        "experts": page(opened[EXPERTS]),
        "cpu": page(opened["smollm2-135m.cpu"]),
    }
    difference = compare(before, opened[LARGE])
    policy = read_policy('[limits]\nmemory = "1 %"\n[decisions]\ntarget = "refuse"\n', "policy")
    verdict = judge(policy, difference, facts_of(opened[LARGE].plan), date(2026, 1, 1))
    texts["diff"] = plan_diff_html.page(difference, verdict)
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in texts}


@pytest.mark.parametrize(("name", "tabs", "scheme", "width"), LOOKS)
def test_a_page_is_clear(browser, pages, name: str, tabs: int, scheme: str, width: int):
    with look(browser, pages[name], width=width, color_scheme=scheme) as seen:
        check(seen, pages[name], tabs)
        paper = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


def of_one_token() -> list[str]:
    """What the golden plan's text says of a step of one token: "3.766 ms", "± 7.59 %"."""
    found = re.search(
        r"^tpot_decode_1 (\S+ ms) (± \S+ %)$", (PLANS / f"{LARGE}.txt").read_text(), re.M
    )
    assert found is not None
    return list(found.groups())


def test_it_says_all_without_scripts(browser, pages):
    with look(browser, pages["gpu"], java_script_enabled=False) as seen:
        text = seen.page.locator("body").inner_text()
        parts = (*of_one_token(), "mlp.gate_proj+up_proj", "4.54 TB/s", "lm_head 23")
        parts += ("read through pinned memory into one allocation", "layers 0-30", "a machine")
        parts += ("Further off than the plan said: bs4", "A is llama3-8b.h100.json.xz")
        for part in parts:
            assert part in text, part
        roof = seen.page.locator("#roofline")
        assert roof.get_by_text("prefill_520: up to").is_hidden()
        roof.get_by_text("prefill_520", exact=True).click()
        assert roof.get_by_text("prefill_520: up to").is_visible()
        first = roof.locator("g.mark title").first.text_content()
        assert first is not None and first.startswith("1  mlp.gate_proj+up_proj\n")


def test_tabs_and_marks_are_reached_by_keyboard(browser, pages):
    with look(browser, pages["gpu"]) as seen:
        keys, tip = seen.page.keyboard, seen.page.locator("#tip")
        seen.page.locator("#roofline .tabs > input").first.focus()
        keys.press("ArrowRight")
        assert seen.page.locator("#roofline").get_by_text("decode_8: up to").is_visible()
        seen.page.locator("#timeline .panel svg.chart").nth(3).focus()
        assert tip.is_hidden()
        keys.press("ArrowRight")
        keys.press("ArrowRight")
        said = r"attention_decode\n\d\.\d\d µs, \d\.\d % of this part\n"
        assert re.match(said, tip.inner_text())
        box = tip.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 1600
        keys.press("Escape")
        assert tip.is_hidden()
        seen.page.locator("#memory svg.chart rect").first.hover()
        assert tip.inner_text().startswith("weights\n16.1 GB, 10.7 %")


def test_on_paper_every_tab_is_seen(browser, pages):
    a4 = 718  # pixels between usual margins
    with look(browser, pages["gpu"], width=a4, color_scheme="dark") as seen:
        seen.page.emulate_media(media="print", color_scheme="light")
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= a4
        panels = seen.page.locator(".panel")
        assert panels.count() == 9 and all(panel.is_visible() for panel in panels.all())
        assert seen.page.locator("nav").is_hidden()
        assert seen.page.locator("#memory details table").first.is_visible()


def test_stages_are_lanes_one_after_the_other(browser, pages):
    with look(browser, pages["stages"]) as seen:
        heads = seen.page.locator("#timeline .panel").first.locator(".track .head").all()
        assert [head.inner_text().split("\n")[0] for head in heads[:2]] == [
            "stage 0: layers 0-14, rank 0",
            "stage 1: layers 15-29, rank 1",
        ]
        lanes = seen.page.locator("#timeline .panel").first.locator("svg.chart").all()
        last = lanes[0].locator("rect").last.bounding_box()
        first = lanes[1].locator("rect").first.bounding_box()
        assert last and first and abs(last["x"] + last["width"] - first["x"]) < 2


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ('<p style="color: #999">faint</p>', "faint"),
        ('<p style="width: 2000px">wide</p>', "wider than the page"),
        ('<svg class="chart"><text y="20">one</text><text x="5" y="22">two</text></svg>', "two"),
        ("<p>a</p><script>console.error('an error')</script>", "an error"),
        ('<p>a</p><img src="http://127.0.0.1:9/x.png">', "x.png"),
    ],
    ids=["contrast", "width", "overlap", "console", "network"],
)
def test_the_check_finds(body: str, what: str, browser, tmp_path: Path):
    place = tmp_path / "page.html"
    place.write_text(f"<!doctype html><body>{body}")
    with look(browser, place) as seen, pytest.raises(AssertionError, match=what):
        check(seen, place)
