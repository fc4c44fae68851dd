"""Golden configurations as files: texts, round trips, damage; what makes them stale; choosing."""

import tomllib
from dataclasses import replace
from datetime import date

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.core.canonical import sha256_hex
from sitsc.core.errors import GoldenError
from sitsc.core.golden import (
    Golden,
    GoldenMeasured,
    Now,
    digest_of,
    finished,
    read_golden,
    stale_reasons,
    without_measuring,
)
from sitsc.core.golden_choice import changes, choose, measured_figures
from sitsc.core.options import CompileOptions
from sitsc.core.toml_text import toml_text
from tests.golden_records import FIGURES, any_golden, candidate, sample

FRESH = Now(date(2026, 12, 24))
TEXT = sample().text()
SCALARS = st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.dates()
SCALARS |= st.text(st.characters(exclude_categories=("Cs",)), max_size=9)
TABLES = st.recursive(
    st.dictionaries(st.text(max_size=4), SCALARS | st.lists(SCALARS, max_size=3), max_size=4),
    lambda inner: st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=4),
        inner | SCALARS | st.lists(inner, min_size=1, max_size=2),
        max_size=3,
    ),
    max_leaves=6,
)

# --- texts --------------------------------------------------------------------------------------


def test_text(golden):
    golden("golden_config.toml", TEXT)


def test_a_text_reads_back():
    assert read_golden(TEXT) == sample() and read_golden(TEXT).text() == TEXT
    assert sample().status == "measured in part" and sample().best.name.endswith("batch 8")
    assert sample().compile_options() == CompileOptions("h200", max_batch=8, kv_tokens=9000)


@given(any_golden())
@settings(max_examples=40)
def test_any_record_reads_back(record: Golden):
    text = record.text()
    assert read_golden(text) == record
    assert read_golden(text).text() == text


@given(TABLES)
@settings(max_examples=60)
def test_toml_is_what_tomllib_reads(table):
    try:
        text = toml_text(table)
    except UnicodeEncodeError:  # a lone surrogate in a key
        return
    assert tomllib.loads(text) == table


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1 << 63, b"x", [None]])
def test_toml_holds_no_such_value(value):
    with pytest.raises(ValueError):
        toml_text({"x": value})


def test_comments_are_free():
    assert (
        read_golden("# mine\n" + TEXT.replace("[options]", "[options] # all of them")) == sample()
    )


# --- files that are none ------------------------------------------------------------------------


def signed(text: str) -> str:
    """A changed text with the digest that it should have, comments apart."""
    body = text[text.index("schema") :]
    lines = ['digest = ""' if line.startswith("digest") else line for line in body.splitlines()]
    digest = sha256_hex(("\n".join(lines) + "\n").encode())
    return "\n".join(lines).replace('digest = ""', f'digest = "{digest}"') + "\n"


def test_the_digest_is_that_of_the_text():
    assert signed(TEXT) == TEXT[TEXT.index("schema") :] and digest_of(sample()) in TEXT


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("devices = 2", "devices = 3", ("it was edited", "sitsc golden")),
        ("max_batch = 8", "max_batch = 16", ("it was edited",)),
        ("expires = 2027-02-28", "expires = 2028-02-28", ("it was edited",)),
        ("devices = 2", "devices = 2\nnodes = 1", ("unknown key 'nodes'",)),
        ("devices = 2\n", "", ("missing key 'devices'",)),
        ("devices = 2", "devices = true", ("expected int, found True", "golden.devices")),
        ("schema = 1", "schema = 2", ("schema 2, this version reads 1",)),
        ("schema = 1", "", ("schema None",)),
        ("made = 2026-11-30", "made = 2026-11-30T10:00:00", ("expected date",)),
        ("chosen = 1", "chosen = 3", ("chosen is 3 of 3",)),
        ("rate = 0.0", "rate = nan", ("nan has no canonical form",)),
        ("concurrency = 8", f"concurrency = {1 << 64}", ("64 bits",)),
        ("[options]", "[options", ("not TOML",)),
    ],
)
def test_bad_files(old: str, new: str, words: tuple[str, ...]):
    assert TEXT.count(old) >= 1
    with pytest.raises(GoldenError) as caught:
        read_golden(TEXT.replace(old, new, 1), "x.toml")
    line = str(caught.value)
    assert "x.toml" in line and " — " in line and all(word in line for word in words), line


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('dtype = "auto"', 'dtype = "auto"\nspeed = 3', "unknown option 'speed'"),
        ('dtype = "auto"', 'dtype = "int3"', "--dtype 'int3'"),
        ("page_tokens = 0", "page_tokens = false", "option page_tokens is False"),
    ],
)
def test_options_that_no_compiler_has(old: str, new: str, words: str):
    with pytest.raises(GoldenError, match=words):
        read_golden(signed(TEXT.replace(old, new, 1)))


def test_every_cut_is_an_error():
    for size in range(0, len(TEXT) - 1, 97):
        with pytest.raises(GoldenError):
            read_golden(TEXT[:size])


@given(st.data())
@settings(max_examples=150)
def test_damage_is_an_error_or_harmless(data):
    """Any mutation: GoldenError, or the same record where only comments and blanks changed."""
    text = list(TEXT)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 6))] = data.draw(st.text(max_size=6))
    try:
        assert read_golden("".join(text)) == sample()
    except GoldenError as error:
        assert len(str(error).splitlines()) == 1


@given(st.text(max_size=60))
@settings(max_examples=60)
def test_any_text(text: str):
    with pytest.raises(GoldenError):
        read_golden(text)


# --- staleness ----------------------------------------------------------------------------------


def test_fresh():
    best, data = sample().best, dict(sample().data)
    now = Now(date(2027, 2, 27), "f" * 64, "h200", data, best.plan, best.runs)
    assert stale_reasons(sample(), FRESH) == () == stale_reasons(sample(), now)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (replace(FRESH, today=date(2027, 2, 28)), "it expired on 2027-02-28"),
        (replace(FRESH, fingerprint="e" * 64), "another model, llama (config fingerprint fff"),
        (replace(FRESH, target="h100"), "it is for another target, h200 and not h100"),
        (
            replace(FRESH, data={"targets/h200": "1" * 64, "calibration/h200": "3" * 64}),
            "calibration/h200 is no more what it was",
        ),
        (replace(FRESH, data={"targets/h200": "1" * 64}), "calibration/h200 is no more"),
        (
            replace(FRESH, data=dict(sample().data) | {"tiles/h200": "3"}),
            "tiles/h200 is no more what it was",
        ),
        (
            replace(FRESH, plan="a" * 64, runs="b"),
            "plan (000000000000 → aaaaaaaaaaaa): it runs",
        ),
        (replace(FRESH, plan="a", runs=sample().best.runs), "it only predicts otherwise"),
    ],
)
def test_stale(now: Now, words: str):
    (reason,) = stale_reasons(sample(), now)
    assert words in reason


# --- choosing -----------------------------------------------------------------------------------


def measured(ttft: float, tpot: float) -> GoldenMeasured:
    figures = measured_figures(FIGURES, 256, ttft, tpot)
    return GoldenMeasured(figures, 8, 2176.0, "random", "x", {}, "", "2026-11-30")


def test_what_is_as_predicted_stays_so():
    again = measured_figures(FIGURES, 256, FIGURES.ttft_ms, FIGURES.tpot_ms)
    assert again == FIGURES
    slower = measured_figures(FIGURES, 256, 2 * FIGURES.ttft_ms, FIGURES.tpot_ms)
    assert slower.loaded_tpot_ms == FIGURES.tpot_ms + 2 * (4.0 - 2.0)
    assert slower.tokens_per_s < FIGURES.tokens_per_s


def test_measured_figures_decide():
    first, second = candidate("first", 8, 4000.0), candidate("second", 4, 3900.0)
    assert choose(sample(), [first, second]).best.name == "first"
    slow = replace(first, measured=measured(8.0, 4.0))  # misses the 5 ms under load
    made = choose(sample(), [slow, second])
    assert made.best.name == "second" and made.options["max_batch"] == 4
    assert read_golden(made.text()) == made
    with pytest.raises(GoldenError, match="no candidate keeps TTFT 50 ms and TPOT 5 ms"):
        choose(sample(), [slow, replace(second, measured=measured(51.0, 1.0))])


def test_a_rate_is_all_that_counts():
    asked = replace(sample().asked, rate=10.0)  # 2560 tokens a second
    fast = candidate("fast", 8, 9000.0)
    quick = candidate("quick", 4, 3000.0, predicted=replace(FIGURES, tpot_ms=1.0))
    assert choose(replace(sample(), asked=asked), [fast, quick]).best.name == "quick"


def test_why_nothing_was_measured():
    made = without_measuring(finished(replace(sample(), chosen=0)), "no GPU")
    assert made.status == "predicted, not measured"
    assert made.candidates[0].not_measured == "no GPU"


def test_changes():
    assert changes(sample(), sample()) == []
    other = replace(sample().asked, tpot_ms=9.0)
    new = choose(replace(sample(), asked=other, data={}, devices=3), sample().candidates[:1])
    told = "\n".join(changes(sample(), new))
    for words in ("option max_batch: 8 → 9", "target: h200:2 → h200:3", "limits are others"):
        assert words in told
    for words in (
        "calibration/h200 is another",
        "plan: 0000",
        "tokens_per_s: 4000 → 4100 (+2.5 %)",
    ):
        assert words in told
    assert "measured in part → predicted, not measured" in told
