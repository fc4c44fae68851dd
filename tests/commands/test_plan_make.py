"""`sitsc plan make`: plans alone, in files and folders; comparing folders; what CI runs."""

import json
import os
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from sitsc.core import plan_file
from sitsc.core.errors import OptionError
from sitsc.core.options import CompileOptions
from sitsc.core.plan import read_plan
from sitsc.models.random_checkpoint import write_random
from sitsc.pipeline import inspect, plan_checkpoint
from sitsc.plan_pipeline import read_list
from tests.commands.command_line import call, spawn

ROOT = Path(__file__).parents[2]
MAKE, DIFF = ("plan", "make"), ("plan", "diff")
TARGETS = ("cpu", "h200", "h200:2", "a100:4", "h100:3")
LIST = """
[[plans]]
models = ["tiny-llama"]
targets = ["cpu"]
options = {max_batch = 2, prefill_chunk_tokens = 64}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans of a small model; three ranks cannot share it."""
    out = tmp_path_factory.mktemp("made") / "plans"
    options = [text for target in TARGETS for text in ("--target", target)]
    done = spawn(*MAKE, "tiny-llama", *options, "-o", out, "--json")
    assert done.code == 0, done
    rows = json.loads(done.out)["plans"]
    assert [row["name"] for row in rows][:2] == ["tiny-llama.cpu", "tiny-llama.h200"]
    assert all(row["changed"] for row in rows) and bool(rows[-1]["reason"])
    assert rows[0]["trace_seconds"] > 10 * max(row["trace_seconds"] for row in rows[1:])
    return out


@pytest.fixture
def changed(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "changed"))


def test_the_files(made: Path):
    names = {path.name for path in made.iterdir()}
    plans = {f"tiny-llama.{t}" for t in ("cpu", "h200", "h200x2", "a100x4")}
    assert names == {f"{p}{s}" for p in plans for s in (".json.xz", ".txt")} | {
        "tiny-llama.h100x3.txt"
    }
    why = (made / "tiny-llama.h100x3.txt").read_text()
    assert why.startswith("no plan: the model cannot be cut among 3 h100 —")
    text = (made / "tiny-llama.h200.txt").read_text()
    assert text.startswith("tiny-llama.h200\n\nmodel LlamaForCausalLM\n") and len(text) < 6000
    assert "TP 1 PP 1" in text and "\ntpot_decode_8 " in text and "\nmemory.kv " in text


@pytest.mark.parametrize("target", TARGETS[:4])
def test_one_trace_gives_the_plans_that_each_would_have_alone(made: Path, tmp_path, target: str):
    options = CompileOptions(target=target)
    model = write_random("tiny-llama", tmp_path / "elsewhere", headers_only=True)
    alone = plan_checkpoint(inspect(model, options), options).plan.text()
    name = f"tiny-llama.{target.replace(':', 'x')}.json.xz"
    assert plan_file.read_text(made / name) == alone


def test_the_same_bytes_anywhere(made: Path, tmp_path: Path):
    spawned = spawn(
        *MAKE, "tiny-llama", "--target", "h200:2", "--target", "cpu", "-o", tmp_path / "x",
        env={"PYTHONHASHSEED": "5", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert spawned.code == 0
    for path in (tmp_path / "x").iterdir():
        assert path.read_bytes() == (made / path.name).read_bytes(), path.name


def test_what_is_as_before_is_not_written(made: Path, capfd):
    before = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    result = call(capfd, *MAKE, "tiny-llama", "--target", "cpu", "-o", made)
    assert "as before" in result.out and "1 plans in" in result.out
    assert before == {path: path.stat().st_mtime_ns for path in made.iterdir()}


def test_a_file_of_its_own(made: Path, tmp_path: Path, capfd):
    for name in ("one.json", "one.json.xz"):
        assert call(capfd, *MAKE, "tiny-llama", "-o", tmp_path / name).code == 0
        assert call(capfd, *DIFF, tmp_path / name, made / "tiny-llama.cpu.json.xz").code == 0
        assert call(capfd, "plan", "show", tmp_path / name).out.startswith("model ")
    assert (tmp_path / "one.json").read_text() == plan_file.read_text(tmp_path / "one.json.xz")
    assert read_plan((tmp_path / "one.json").read_text()).target.name == "cpu"
    none = ("tiny-llama", "--target", "h100:3", "-o", tmp_path / "none.json")
    call(capfd, *MAKE, *none).refused(2, "no plan: the model cannot be cut among 3 h100")
    assert not (tmp_path / "none.json").exists()


def test_two_processes_and_a_list(made: Path, tmp_path: Path):
    listed = tmp_path / "list.toml"
    listed.write_text(
        '[[plans]]\nmodels = ["tiny-llama", "tiny-qwen2"]\ntargets = ["cpu"]\n'
        '[[plans]]\nmodels = ["tiny-llama"]\ntargets = ["cpu"]\nlabel = "int8"\n'
        'options = {weights = "int8", max_batch = 2}\n'
    )
    done = spawn(*MAKE, "--list", listed, "--jobs", "2", "-o", tmp_path / "out")
    assert done.code == 0 and "3 plans in" in done.out
    plain, int8 = (tmp_path / "out" / f"tiny-llama.cpu{x}.json.xz" for x in ("", ".int8"))
    assert plain.read_bytes() == (made / "tiny-llama.cpu.json.xz").read_bytes()
    plan = read_plan(plan_file.read_text(int8))
    assert (plan.numerics.weights, plan.schedule.max_batch) == ("int8", 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plans = 3", "plans"),
        ("[[plans]]\nmodels = []\n", "targets"),
        ("[[plans]]\nmodels = ['a']\ntargets = ['cpu']\nmodel = 'a'", "unknown key 'model'"),
        ("[[plans]]\nmodels = ['a']\ntargets = ['cpu']\noptions = {batch = 1}", "'batch'"),
        ("[[plans]]\nmodels = ['a']\ntargets = ['cpu']\noptions = {max_batch = 0}", "max-batch 0"),
        ("[[plans]]\nmodels = ['a']\ntargets = ['cpu']\noptions = {target = 'cpu'}", "target"),
        ("[[plans]]\nmodels = ['a']\ntargets = ['h9000']", "h9000"),
        ("[[plans]]\nmodels = ['a', 'x/a']\ntargets = ['cpu']", "a.cpu is asked for twice"),
        ("[[plans]]\nmodels = []\ntargets = ['cpu']", "plans without models"),
        ("[[plans]]\nmodels = ['a']\ntargets = []", "plans without targets"),
        ("plans = []", "nothing to plan"),
        ("[[plans]]\nmodels = ['a']\ntargets = ['cpu']\nlabel = '../x'", "label"),
        ("[[plans", "is not TOML"),
    ],
)
def test_lists_that_are_refused(text: str, words: str):
    with pytest.raises(Exception, match=words) as caught:
        read_list(text, "list.toml")
    assert isinstance(caught.value, OptionError) or "h9000" in words


def test_a_list_takes_every_option():
    for field in fields(CompileOptions):
        if field.name != "target":
            value = "true" if field.default is None else json.dumps(field.default)
            entry = f"models = ['a']\ntargets = ['cpu']\noptions = {{{field.name} = {value}}}"
            assert len(read_list(f"[[plans]]\n{entry}", "list.toml")) == 1


def test_misuse(tmp_path: Path, capfd):
    call(capfd, *MAKE).refused(2, "nothing to plan")
    call(capfd, *MAKE, "tiny-llama", "--list", "x.toml").refused(2, "--list beside models")
    call(capfd, *MAKE, "--list", tmp_path / "x.toml").refused(2, "--list: ", "name a TOML file")
    two = ("--target", "cpu", "--target", "h200")
    call(capfd, *MAKE, "tiny-llama", *two, "-o", "x.json").refused(2, "2 plans for one file")
    call(capfd, *MAKE, "tiny-llama", "--jobs", "0").refused(2, "--jobs 0")
    call(capfd, *MAKE, "no-such", "-o", tmp_path / "p").refused(2, "no-such")
    (tmp_path / "list.toml").write_text(LIST)
    call(capfd, *MAKE, "--list", tmp_path / "list.toml", "--target", "cpu").refused(2, "--target")
    assert not (tmp_path / "p").exists()


# --- folders --------------------------------------------------------------------------------------


def test_folders_that_are_alike(made: Path, changed: Path, capfd):
    assert call(capfd, *DIFF, made, changed).out == "no plan changed; 5 as before\n"
    markdown = call(capfd, *DIFF, made, changed, "--markdown").out
    assert markdown == "## Plans: no plan changed; 5 as before\n\n"


def test_folders_that_differ(made: Path, changed: Path, tmp_path: Path, capfd):
    other = ("tiny-llama", "-o", changed / "tiny-llama.cpu.json.xz")
    model = write_random("tiny-llama", tmp_path / "tiny-llama", headers_only=True, dtype="float32")
    assert call(capfd, *MAKE, model, "-o", other[2]).code == 0
    result = call(capfd, *DIFF, made, changed)
    assert result.code == 0 and result.out.startswith("tiny-llama.cpu: ")
    assert "dtype: bfloat16 → float32" in result.out
    assert result.out.endswith("\n1 plan changed; 4 as before\n")
    policy = tmp_path / "policy.toml"
    policy.write_text('[decisions]\nnumerics = "refuse"\n')
    judged = call(capfd, *DIFF, made, changed, "--policy", policy, "--markdown")
    assert judged.code == 1
    assert "1 plan changed, 1 of them outside of the policy; 4 as before" in judged.out
    assert "- `tiny-llama.cpu`: **outside of the policy**: " in judged.out
    assert judged.out.count("<details>") == judged.out.count("</details>") == 1
    value = json.loads(call(capfd, *DIFF, made, changed, "--policy", policy, "--json").out)
    assert value["same"] == 4 and value["changed"][0]["outside"]
    call(capfd, *DIFF, made, changed, "--html").refused(2, "--html shows two plans")


def test_plans_that_come_and_go(made: Path, changed: Path, tmp_path: Path, capfd):
    policy = tmp_path / "policy.toml"
    policy.write_text("")
    (changed / "tiny-llama.h200.json.xz").unlink()
    (changed / "tiny-llama.h200x2.json.xz").unlink()
    (changed / "tiny-llama.h200x2.txt").write_text("no plan: it is too large\n")
    shutil.copy(made / "tiny-llama.cpu.json.xz", changed / "tiny-llama.h100x3.json.xz")
    (changed / "tiny-llama.h100x3.txt").unlink()
    (changed / "more.cpu.txt").write_text("no plan: too new\n")
    text = call(capfd, *DIFF, made, changed).out
    for line in (
        "more.cpu: new: no plan, too new",
        "tiny-llama.h200: gone",
        "tiny-llama.h200x2: can no longer be made: it is too large",
        "tiny-llama.h100x3: can be made now, and could not before: the model cannot be cut",
        "4 plans changed; 2 as before",
    ):
        assert line in text
    assert call(capfd, *DIFF, made, changed).code == 0
    judged = call(capfd, *DIFF, made, changed, "--policy", policy)
    assert judged.code == 1 and "2 of them outside of the policy" in judged.out
    (changed / "tiny-llama.h100x3.json.xz").unlink()
    (changed / "tiny-llama.h100x3.txt").write_text("no plan: another reason\n")
    assert "cannot be made for another reason: " in call(capfd, *DIFF, made, changed).out


def test_an_allowance_that_another_plan_needs(made: Path, changed: Path, tmp_path: Path, capfd):
    listed = tmp_path / "list.toml"
    listed.write_text(LIST.replace('["cpu"]', '["cpu", "h200"]'))
    assert call(capfd, *MAKE, "--list", listed, "-o", changed).code == 0
    policy = tmp_path / "policy.toml"
    policy.write_text(
        "[limits]\nmemory = '0 %'\nkv_tokens = '0 %'\n[decisions]\nschedule = 'refuse'\n"
        "[[allow]]\nwhat = 'schedule'\nwhere = '64'\nreason = 'small'\nexpires = 2999-01-01\n"
        "[[allow]]\nwhat = 'numerics'\nreason = 'odd'\nexpires = 2999-01-01\n"
    )
    text = call(capfd, *DIFF, made, changed, "--policy", policy).out
    assert "small (until 2999-01-01)" in text and "(small) is not needed" not in text
    assert "the allowance for numerics (odd) is not needed" in text


def test_folders_that_cannot_be_compared(made: Path, changed: Path, tmp_path: Path, capfd):
    one = made / "tiny-llama.cpu.json.xz"
    call(capfd, *DIFF, made, one).refused(
        2, "is a folder of plans or other", "is none", "plan make"
    )
    call(capfd, *DIFF, tmp_path / "no", made).refused(2, "no is none")
    (changed / "tiny-llama.cpu.json").write_text("{}")
    call(capfd, *DIFF, made, changed).refused(2, "tiny-llama.cpu is there twice")
    (changed / "tiny-llama.cpu.json").rename(changed / "config.json")
    call(capfd, *DIFF, made, changed).refused(2, "no plan in this file", "config.json")
    (changed / "config.json").unlink()
    cut = changed / one.name
    cut.write_bytes(one.read_bytes()[:-20])
    call(capfd, *DIFF, made, changed).refused(2, "it ends too early", one.name, "cut off")
    cut.write_bytes(b"no xz")
    call(capfd, *DIFF, one, cut).refused(2, "not compressed by xz", one.name)
    text = plan_file.read_text(one).replace('"max_batch": 8', '"max_batch":8')
    assert plan_file.write_text(cut, text)
    call(capfd, *DIFF, made, changed).refused(2, "edited by hand?", one.name)


# --- continuous integration -----------------------------------------------------------------------


def check(folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the script over the golden plans of `folder`."""
    env = {"LIST": "list.toml", "PLANS": "plans", "POLICY": "policy.toml", "OUT": "new"}
    sitsc = shutil.which("sitsc", path=os.environ["PATH"]) or str(ROOT / ".venv/bin/sitsc")
    return subprocess.run(
        [ROOT / "docs/ci/check-plans.sh"],
        cwd=folder,
        env=os.environ | {"SITSC": sitsc, "JOBS": "1"} | env | more,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script(tmp_path: Path, capfd):
    listed, policy = tmp_path / "list.toml", tmp_path / "policy.toml"
    listed.write_text(LIST)
    shutil.copy(ROOT / "plans/policy.toml", policy)
    assert call(capfd, *MAKE, "--list", listed, "-o", tmp_path / "plans").code == 0
    within = check(tmp_path)
    assert (within.returncode, within.stdout) == (
        0,
        "## Plans: no plan changed; 1 as before\n\n",
    ), within.stderr
    listed.write_text(LIST.replace("options = {", 'options = {weights = "int8", '))
    outside = check(tmp_path)
    assert outside.returncode == 1 and "| weights |  | none | int8 |" in outside.stdout
    assert (tmp_path / "new/report.md").read_text() == outside.stdout
    (tmp_path / "list.toml").write_text("[[plan]]")
    wrong = check(tmp_path)
    assert wrong.returncode == 2 and "unknown key 'plan'" in wrong.stderr
    assert not (tmp_path / "new/report.md").exists()  # none of an earlier run


def test_the_workflow_runs_the_script():
    workflow = yaml.safe_load((ROOT / "docs/ci/github-plans.yml").read_text())
    assert "pull_request" in workflow[True]  # YAML reads `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    steps = workflow["jobs"]["plans"]["steps"]
    install, compare, show = [step["run"] for step in steps if "run" in step]
    assert install.removeprefix("make ") == ".venv/.installed"
    assert compare == "docs/ci/check-plans.sh" and os.access(ROOT / compare, os.X_OK)
    script = (ROOT / compare).read_text()
    report = show.split()[3]
    assert 'OUT:=build/plans}"' in script and report == "build/plans/report.md"
    assert compare in (ROOT / ".ci/run").read_text()
