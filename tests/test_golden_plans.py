"""Golden plans: all there, readable, as their texts say; the cheapest are made anew."""

from pathlib import Path

import pytest

from sitsc.cli import main
from sitsc.commands.plan_summary import summary_lines
from sitsc.core import plan_file
from sitsc.core.diff.read import open_plan
from sitsc.core.diff_policy import read_policy
from sitsc.core.plan import SCHEMA
from sitsc.plan_pipeline import read_list

PLANS = Path(__file__).parents[1] / "plans"
WANTED = {w.name: w for w in read_list((PLANS / "plans.toml").read_text(), "plans.toml")}
MOST_BYTES = 1_500_000


def test_everything_that_is_listed_is_there_and_nothing_else():
    texts = {path.name.removesuffix(plan_file.SUMMARY) for path in PLANS.glob("*.txt")}
    plans = {path.name.removesuffix(plan_file.COMPRESSED) for path in PLANS.glob("*.json.xz")}
    assert texts == set(WANTED) and plans <= texts
    for name in texts - plans:
        text = (PLANS / f"{name}{plan_file.SUMMARY}").read_text()
        assert text.startswith(plan_file.NO_PLAN), name
    others = {path.name for path in PLANS.iterdir()} - {f"{n}.txt" for n in texts}
    assert others == {f"{n}.json.xz" for n in plans} | {"plans.toml", "policy.toml"}
    assert sum(path.stat().st_size for path in PLANS.iterdir()) < MOST_BYTES


def test_the_policy_reads():
    read_policy((PLANS / "policy.toml").read_text())


@pytest.mark.parametrize("name", WANTED)
def test_a_plan_reads_and_its_text_is_what_it_says(name: str):
    path = PLANS / f"{name}{plan_file.COMPRESSED}"
    if not path.exists():
        return
    opened = open_plan(path)  # refuses what is not canonical or contradicts itself
    plan, options = opened.plan, WANTED[name].options
    assert opened.schema == SCHEMA and not opened.unread
    assert (plan.target.name, plan.target.device_count) == (options.target, options.devices)
    assert len(plan.ranks) == options.devices
    text = (PLANS / f"{name}{plan_file.SUMMARY}").read_text()
    assert text == "\n".join(summary_lines(name, plan)) + "\n"
    assert str(PLANS.parent) not in plan_file.read_text(path)


@pytest.mark.slow  # .ci/run makes all of them anew
def test_the_smallest_made_anew_are_within_the_policy(tmp_path: Path, capfd):
    names = [f"smollm2-135m.{target}{plan_file.COMPRESSED}" for target in ("cpu", "h200")]
    new = ["plan", "make", "smollm2-135m", "--target", "cpu", "--target", "h200"]
    assert main([*new, "-o", str(tmp_path)]) == 0
    for name in names:
        compared = ["plan", "diff", str(PLANS / name), str(tmp_path / name), "--policy"]
        code = main([*compared, str(PLANS / "policy.toml")])
        assert code == 0, capfd.readouterr().out
