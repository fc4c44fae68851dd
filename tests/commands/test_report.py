"""`sitsc report`: what it takes and refuses, the same bytes each time; axes and labels."""

import json
import shutil
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sitsc.commands.report_axes import WIDTHS, Linear, Log, labels, share_text, si, time_text
from sitsc.commands.report_labels import Canvas, Place, place_labels
from sitsc.core import plan_file
from sitsc.core.actual import actual_place
from sitsc.core.diff.read import open_plan
from tests.commands.command_line import call, spawn
from tests.commands.measured_plans import measured

ROOT = Path(__file__).parents[2]
PLANS = ROOT / "plans"
GPU, STAGES = PLANS / "llama32-1b.h200.json.xz", PLANS / "smollm2-135m.a100x4.json.xz"
TINY = ROOT / "tests" / "golden" / "plan_tiny-llama_float32.json"


def test_a_plan_becomes_a_page_of_the_same_bytes(tmp_path: Path, capfd):
    done = call(capfd, "report", GPU, "-o", tmp_path / "a.html")
    assert (done.code, done.err) == (0, "") and done.out.startswith(f"{tmp_path}/a.html: ")
    again = spawn("report", GPU, "-o", tmp_path / "b.html", "--json", env={"PYTHONHASHSEED": "7"})
    assert again.code == 0, again.err
    text = (tmp_path / "a.html").read_text()
    assert (tmp_path / "b.html").read_text() == text
    assert json.loads(again.out) == {"files": {f"{tmp_path}/b.html": len(text.encode())}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]
    assert str(ROOT) not in text and "://" not in text
    assert "Nothing was measured: this is a plan alone" in text and 'id="diff"' not in text


def test_an_artifact_with_what_was_measured_of_it(tiny_artifact: Path, tmp_path: Path, capfd):
    artifact, out = Path(shutil.copytree(tiny_artifact, tmp_path / "m.sitsc")), tmp_path / "r.html"
    assert call(capfd, "report", artifact, "-o", out).code == 0
    assert "there is no m.sitsc.actual.json beside the artifact" in out.read_text()
    made = measured(open_plan(artifact).plan, tmp_path)
    made.rename(actual_place(artifact))
    assert call(capfd, "report", artifact, "-o", out).code == 0
    assert "further off" in out.read_text().lower() and "a machine" in out.read_text()
    other = measured(open_plan(GPU).plan, tmp_path)
    call(capfd, "report", artifact, "-o", out, "--actual-from", other).refused(2, "measured of")
    other.rename(actual_place(artifact))
    assert call(capfd, "report", artifact, "-o", out).code == 0
    assert "m.sitsc.actual.json is not shown: measured of plan" in out.read_text()
    assert call(capfd, "verify", artifact).code == 0


def test_two_plans_are_compared_in_one_direction(tmp_path: Path, capfd):
    older, one, two = PLANS / "llama32-1b.h100.json.xz", tmp_path / "1.html", tmp_path / "2.html"
    assert call(capfd, "report", older, GPU, "-o", one).code == 0
    assert call(capfd, "report", GPU, "--against", older, "-o", two).code == 0
    text = one.read_text()
    assert text == two.read_text() and "for h200</h1>" in text
    first = call(capfd, "plan", "diff", older, GPU).out.splitlines()[0]
    assert f'<p class="verdict">{first}</p>' in text
    call(capfd, "report", older, GPU, "--against", older, "-o", one).refused(2, "--against")


@pytest.mark.parametrize("place", [STAGES, TINY], ids=["stages", "tiny"])
def test_every_kind_of_plan(place: Path, tmp_path: Path, capfd):
    assert call(capfd, "report", place, "-o", tmp_path / "r.html").code == 0
    text = (tmp_path / "r.html").read_text()
    assert text.count("<section") == 6 and text.endswith("</html>\n")


def test_regimes_that_are_named(tmp_path: Path, capfd):
    out = tmp_path / "r.html"
    assert call(capfd, "report", GPU, "-o", out, "--regime", "decode_4").code == 0
    assert "roofline of decode_4" in out.read_text() and "of decode_1" not in out.read_text()
    refused = call(capfd, "report", GPU, "-o", tmp_path / "no.html", "--regime", "decode_3")
    refused.refused(2, "no regime 'decode_3'", "one of decode_1")
    assert not (tmp_path / "no.html").exists()


def test_what_is_refused(tiny_artifact: Path, tmp_path: Path, capfd):
    damaged, plan, inside = tmp_path / "cut.json", tmp_path / "plan.json", tiny_artifact / "r.html"
    damaged.write_text(TINY.read_text()[:1000])
    plan.write_text(TINY.read_text())
    newer = tmp_path / "newer.json"
    value = json.loads(plan.read_text())
    newer.write_text(json.dumps(value | {"schema": 99, "memory": 1}))
    odd = tmp_path / "a.json.xz"
    plan_file.write_text(odd, json.dumps([1]))
    for place, out, *parts in (
        (damaged, "r.html", "not JSON", "cut off"),
        (newer, "r.html", "plan schema 99: memory cannot be read"),
        (odd, "r.html", "no plan in this file"),
        (tmp_path / "nowhere", "r.html", "does not exist"),
        (plan, ".", "is a folder", "report.html"),
        (plan, "plan.json", "is the plan itself"),
        (tiny_artifact, inside, "lies in the artifact"),
        (plan, "plan.json/r.html", "cannot write"),
    ):
        call(capfd, "report", place, "-o", tmp_path / out).refused(2, *parts)
    assert plan.read_text() == TINY.read_text() and not inside.exists()


def test_names_are_escaped(tmp_path: Path, capfd):
    odd = tmp_path / "<b>&.json"
    odd.write_text(TINY.read_text())
    assert call(capfd, "report", odd, odd, "-o", tmp_path / "r.html").code == 0
    text = (tmp_path / "r.html").read_text()
    assert "&lt;b&gt;&amp;.json" in text and "<b>" not in text


# --- axes and labels ------------------------------------------------------------------------------


@given(st.floats(1e-9, 1e18), st.floats(1.001, 1e12))
def test_ticks_lie_on_their_axis(low: float, times: float):
    axis = Log(low, low * times, 100.0)
    places = [tick.place for tick in axis.ticks("{:g}".format)]
    assert len(places) <= 9 and all(-1e-6 <= place <= 100 + 1e-6 for place in places)
    assert places == sorted(places)
    linear = [tick.place for tick in Linear(low, 100.0).ticks("{:g}".format)]
    assert 2 <= len(linear) <= 6 and linear[0] == 0 and linear[-1] <= 100 + 1e-6


@given(
    st.lists(st.tuples(st.floats(5, 95), st.floats(20, 360), st.floats(4, 12)), max_size=9),
    st.sampled_from(sorted(WIDTHS.values())),
)
def test_every_dot_has_one_label(dots: list[tuple[float, float, float]], width: int):
    places = [Place(*dot, number) for number, dot in enumerate(dots, 1)]
    numbers = []
    for label in place_labels(places, Canvas(width, 380)):
        for part in label["text"].split(", "):
            low, _, high = part.partition("-")
            numbers += range(int(low), int(high or low) + 1)
    assert sorted(numbers) == [place.number for place in places]


def test_texts_only_where_they_fit():
    assert labels(("a long name", "name"), 0.5) == []
    found = labels(("a long name", "name"), 20)
    assert {(label.text, label.on) for label in found} == {
        ("name", "n"),
        ("a long name", "m w"),
    }
    for one, other in combinations(found, 2):
        assert not set(one.on.split()) & set(other.on.split())


def test_units():
    assert [si(v, "B/s") for v in (0, 999, 999.9, 4.54e12)] == [
        *("0 B/s", "999 B/s", "1 kB/s", "4.54 TB/s"),
    ]
    assert [time_text(us) for us in (0.657, 110, 999.9, 3765.55, 4.2e6)] == [
        *("0.657 µs", "110 µs", "0.9999 ms", "3.766 ms", "4.2 s"),
    ]
    assert [share_text(v) for v in (0, 0.00044, 0.5)] == ["0.0 %", "0.044 %", "50.0 %"]
