"""`sitsc plan diff`: formats, exit codes, what cannot be compared, the same bytes each time."""

import json
import os
import re
import resource
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sitsc.core.options import CompileOptions
from sitsc.core.plan import read_plan
from sitsc.models.random_checkpoint import write_random
from sitsc.pipeline import inspect, plan_checkpoint
from tests.commands.command_line import call, spawn

DIFF = ("plan", "diff")


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two plans of a small model: with batches of two, and of four in int8."""
    folder = tmp_path_factory.mktemp("plans")
    model = write_random("tiny-llama", folder / "model", headers_only=True)
    usual = CompileOptions(max_batch=2, prefill_chunk_tokens=64, max_context=128)
    other = CompileOptions(
        max_batch=4, prefill_chunk_tokens=64, max_context=128, weights="int8", kv_dtype="float32"
    )
    for name, options in (("a.json", usual), ("b.json", other)):
        plan = plan_checkpoint(inspect(model, options), options).plan
        (folder / name).write_text(plan.text())
    return folder / "a.json", folder / "b.json"


def test_the_text_fits_a_screen(plans, capfd):
    result = call(capfd, *DIFF, *plans)
    lines = result.out.splitlines()
    assert (result.code, result.err) == (0, "") and len(lines) <= 30
    assert lines[0].startswith("worse: ") and "better: memory" in lines[0]
    text = "\n".join(lines[:8])
    assert "weights: none → int8" in text and "kv dtype: bfloat16 → float32" in text
    assert "max batch: 2 → 4" in result.out and "decode buckets added 4: 1 2 → 1 2 4" in result.out
    assert all(line == line.rstrip() and len(line) <= 160 for line in lines)
    assert "changed predictions are smaller than the error bar (± " in result.out
    assert lines[-2].startswith("A  a.json: LlamaForCausalLM (2 layers, 64 wide) for cpu")


def test_the_same_plan_is_no_difference(plans, capfd):
    result = call(capfd, *DIFF, plans[0], plans[0])
    assert result.code == 0 and result.out.startswith("no difference\n\nA  a.json")


def test_artifacts_and_plans_of_artifacts(tiny_artifact: Path, tmp_path: Path, plans, capfd):
    copied = tmp_path / "elsewhere.sitsc"
    shutil.copytree(tiny_artifact, copied)
    assert call(capfd, *DIFF, tiny_artifact, copied).out.startswith("no difference\n")
    found = call(capfd, *DIFF, copied, tiny_artifact / "plan.json")
    assert found.out.startswith("no difference\n") and "elsewhere.sitsc" in found.out
    assert "dtype: float32 → bfloat16" in call(capfd, *DIFF, copied, plans[0]).out
    (copied / "plan.json").write_text((copied / "plan.json").read_text().replace("cpu", "gpu", 1))
    call(capfd, *DIFF, tiny_artifact, copied).refused(2, "plan.json was altered")


def test_json_says_everything(plans, capfd):
    value = json.loads(call(capfd, *DIFF, *plans, "--json").out)
    assert value["policy"] is None and not value["empty"] and value["skipped"] == {}
    titles = {change["title"] for change in value["changes"]}
    assert {"weights", "kv dtype", "max batch"} <= titles
    (tpot,) = (f for f in value["figures"] if f["name"] == "tpot_decode_1")
    assert tpot["change"] == pytest.approx(tpot["after"] / tpot["before"] - 1, rel=1e-4)
    assert value["a"]["plan"] == read_plan(plans[0].read_text()).sha256()


def test_markdown_has_tables(plans, capfd):
    lines = call(capfd, *DIFF, *plans, "--markdown").out.splitlines()
    assert lines[0].startswith("### worse: ")
    tables = [line for line in lines if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) in (5, 6) for line in tables)
    assert "| max batch |  | 2 | 4 |" in tables
    assert any(line.startswith("| tpot\\_decode\\_1 |") for line in tables)


class _Page(HTMLParser):
    """Tags that are open, and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_the_page_is_whole_and_asks_for_nothing(plans, tmp_path: Path, capfd):
    text = call(capfd, *DIFF, *plans, "--html").out
    page = _Page(text)
    assert text.startswith("<!doctype html>") and page.open == []
    assert "max batch" in page.texts and "tpot_decode_1" in page.texts
    assert "script" not in page.tags and "://" not in text and "prefers-color-scheme" in text
    odd = tmp_path / "<b>&.json"
    odd.write_text(plans[0].read_text())
    assert "&lt;b&gt;&amp;.json" in call(capfd, *DIFF, odd, plans[0], "--html").out


def test_the_policy_decides_the_exit_code(plans, tmp_path: Path, capfd):
    policy = tmp_path / "policy.toml"
    policy.write_text('[limits]\nkv_tokens = "5 %"\n')
    within = call(capfd, *DIFF, *plans, "--policy", policy)
    assert within.code == 0 and "\nwithin the policy\n" in within.out
    policy.write_text('[limits]\ntpot = "0 %"\n[decisions]\nnumerics = "refuse"\n')
    for option in ((), ("--json",), ("--markdown",), ("--html",)):
        assert call(capfd, *DIFF, *plans, "--policy", policy, *option).code == 1
    text = call(capfd, *DIFF, *plans, "--policy", policy).out
    assert "outside of the policy: numerics: weights: none → int8" in text
    value = json.loads(call(capfd, *DIFF, *plans, "--policy", policy, "--json").out)["policy"]
    assert not value["within"] and len(value["outside"]) >= 2
    allow = "".join(
        f'[[allow]]\nwhat = "{what}"\nreason = "wanted"\nexpires = 2999-01-01\n'
        for what in ("tpot", "numerics")
    )
    policy.write_text(policy.read_text() + allow)
    allowed = call(capfd, *DIFF, *plans, "--policy", policy)
    assert allowed.code == 0 and "wanted (until 2999-01-01)" in allowed.out
    policy.write_text(policy.read_text().replace("2999", "2020"))
    assert call(capfd, *DIFF, *plans, "--policy", policy).code == 1


def test_misuse(plans, tmp_path: Path, capfd):
    a, b = plans
    call(capfd, *DIFF, a).refused(2, "Missing argument 'B'")
    call(capfd, *DIFF, a, b, "--json", "--html").refused(2, "more than one format")
    call(capfd, *DIFF, a, tmp_path / "no.json").refused(2, "does not exist")
    call(capfd, *DIFF, a, tmp_path).refused(2, "is not an artifact")
    call(capfd, *DIFF, a, b, "--policy", tmp_path / "no.toml").refused(2, "cannot be read")
    (tmp_path / "policy.toml").write_text("[limit]\n")
    call(capfd, *DIFF, a, b, "--policy", tmp_path / "policy.toml").refused(
        2, "unknown key 'limit'", "policy.toml", "docs/plan-diff.md"
    )
    (tmp_path / "cut.json").write_text(a.read_text()[:999])
    call(capfd, *DIFF, tmp_path / "cut.json", b).refused(2, "not JSON", "cut.json", "cut off")
    (tmp_path / "edited.json").write_text(a.read_text().replace('"max_batch": 2', '"max_batch":2'))
    call(capfd, *DIFF, a, tmp_path / "edited.json").refused(2, "edited by hand?", "edited.json")


def test_the_same_bytes_in_other_processes(plans, capfd):
    for option, seed in (("--json", "1"), ("--markdown", "77")):
        here = call(capfd, *DIFF, *plans, option).out
        assert spawn(*DIFF, *plans, option, env={"PYTHONHASHSEED": seed}).out == here


def test_large_plans_take_less_than_a_second(tmp_path: Path):
    """With twelve buckets and more the plan of a small model is as large as one of 8B usually."""
    model = write_random("tiny-llama", tmp_path / "model", headers_only=True)
    for name, batch in (("a.json", 32), ("b.json", 16)):
        options = CompileOptions(target="h200", max_batch=batch)
        plan = plan_checkpoint(inspect(model, options), options).plan
        (tmp_path / name).write_text(plan.text())
    assert os.path.getsize(tmp_path / "a.json") > 520_000
    plans = tmp_path / "a.json", tmp_path / "b.json"
    assert min(_processor_seconds(plans) for _ in range(3)) < 1.0


def _processor_seconds(plans: tuple[Path, Path]) -> float:
    """Of a fresh process, its start included: this one's heap is large, and collected often."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert spawn(*DIFF, *plans).code == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
