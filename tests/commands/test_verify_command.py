"""`sitsc verify`, and what `sitsc run` says of artifacts that are not what was compiled."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sitsc.core.artifact import open_artifact, sign
from sitsc.core.artifact_problems import find_problems
from tests.commands.artifact_edits import copy, edit_manifest, edit_plan, flip_byte
from tests.commands.command_line import call, spawn


def test_a_whole_artifact_is_fine(tiny_artifact: Path, capfd):
    result = call(capfd, "verify", tiny_artifact)
    assert (result.code, result.err) == (0, "")
    assert "every file" in result.out
    value = json.loads(call(capfd, "verify", tiny_artifact, "--json").out)
    assert value == {"artifact": str(tiny_artifact), "ok": True, "problems": []}


def test_a_renamed_copy_verifies_and_runs(tiny_artifact: Path, tmp_path: Path, capfd):
    moved = copy(tiny_artifact, tmp_path)
    assert call(capfd, "verify", moved).code == 0
    original = spawn("run", tiny_artifact, "hello", "--max-tokens", 5, "--json")
    there = spawn("run", moved, "hello", "--max-tokens", 5, "--json")
    assert json.loads(there.out)["token_ids"] == json.loads(original.out)["token_ids"]


def test_a_moved_artifact_verifies(tiny_artifact: Path, tmp_path: Path, capfd):
    before = copy(tiny_artifact, tmp_path)
    moved = before.rename(tmp_path / "other name")
    assert call(capfd, "verify", moved).code == 0 and not before.exists()
    assert call(capfd, "plan", "diff", tiny_artifact, moved).out.startswith("no difference\n")


def all_files(artifact: Path) -> list[str]:
    return sorted(str(p.relative_to(artifact)) for p in artifact.rglob("*") if p.is_file())


def test_an_altered_byte_is_found_in_every_file(tiny_artifact: Path, tmp_path: Path, capfd):
    names = all_files(tiny_artifact)
    assert {"manifest.json", "plan.json", "weights.bin", "cpu/step.pt2"} <= set(names)
    artifact = copy(tiny_artifact, tmp_path)
    for name in names:
        whole = (artifact / name).read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 1):
            flip_byte(artifact / name, at)
            problems = find_problems(artifact)
            assert [problem.file for problem in problems] == [name], (name, at, problems)
            (artifact / name).write_bytes(whole)
    flip_byte(artifact / "tokenizer.json", 100)
    flip_byte(artifact / "cpu/kernels.so", 100)
    result = call(capfd, "verify", artifact)
    assert result.code == 1 and result.err == ""
    assert "tokenizer.json has other bytes" in result.out
    assert "cpu/kernels.so has other bytes" in result.out


@pytest.fixture(scope="module")
def altered(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy(tiny_artifact, tmp_path_factory.mktemp("altered"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_byte_of_the_texts(tiny_artifact: Path, altered: Path, data: st.DataObject):
    """Manifest and plan decide everything: no change of any byte of theirs passes."""
    name = data.draw(st.sampled_from(["manifest.json", "plan.json", "weights.json"]))
    whole = (tiny_artifact / name).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != whole[at]))
    (altered / name).write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
    assert [problem.file for problem in find_problems(altered)] == [name]
    (altered / name).write_bytes(whole)


def test_run_refuses_an_altered_byte_in_every_file(tiny_artifact: Path, tmp_path: Path, capfd):
    """The checksum is what is told, whatever else fails because of the byte."""
    artifact = copy(tiny_artifact, tmp_path)
    for name in all_files(tiny_artifact):
        whole = (artifact / name).read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 1):
            flip_byte(artifact / name, at)
            result = call(capfd, "run", artifact, "hello", "--chat")
            result.refused(1, name, "copy or compile it again")
            (artifact / name).write_bytes(whole)


@pytest.mark.parametrize("name", ["special_tokens.json", "weights.json", "tokenizer.json"])
@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[" * 100_000])
def test_what_cannot_be_read_is_one_line_without_checksums(
    tiny_artifact: Path, tmp_path: Path, name: str, text: bytes, capfd
):
    artifact = copy(tiny_artifact, tmp_path)
    (artifact / name).write_bytes(text)
    sign(artifact)
    call(capfd, "run", artifact, "hello", "--no-verify").refused(2, "cannot be read")


def test_missing_truncated_and_absent(tiny_artifact: Path, tmp_path: Path, capfd):
    artifact = copy(tiny_artifact, tmp_path)
    (artifact / "weights.bin").write_bytes((artifact / "weights.bin").read_bytes()[:-1])
    (artifact / "cpu/shims.so").unlink()
    result = call(capfd, "verify", artifact, "--json")
    found = {p["file"]: p["what"] for p in json.loads(result.out)["problems"]}
    assert result.code == 1
    assert found["cpu/shims.so"] == "is missing"
    assert "bytes, expected" in found["weights.bin"]
    call(capfd, "run", artifact, "hello").refused(1, "cpu/shims.so is missing")
    call(capfd, "verify", tmp_path / "nothing").refused(2, "does not exist")
    call(capfd, "verify", tmp_path).refused(2, "is not an artifact")
    call(capfd, "verify", artifact / "plan.json").refused(2, "is not an artifact")


def test_a_newer_schema_is_named(tiny_artifact: Path, tmp_path: Path, capfd):
    artifact = copy(tiny_artifact, tmp_path)
    edit_manifest(artifact, schema=2)
    assert "schema 2, this version reads 1" in call(capfd, "verify", artifact).out
    call(capfd, "run", artifact, "hello").refused(2, "artifact schema 2", "compile again")


@pytest.mark.parametrize("text", ["[]", "null", "3", '"text"', "{}", '{"schema":"1"}'])
def test_a_manifest_without_a_schema_is_damaged(
    tiny_artifact: Path, tmp_path: Path, text: str, capfd
):
    artifact = copy(tiny_artifact, tmp_path)
    (artifact / "manifest.json").write_text(text)
    call(capfd, "run", artifact, "hello").refused(1, "manifest.json is damaged")
    assert "manifest.json is damaged" in call(capfd, "verify", artifact).out


def test_a_plan_of_a_newer_schema_is_named(tiny_artifact: Path, tmp_path: Path, capfd):
    artifact = copy(tiny_artifact, tmp_path)
    edit_plan(artifact, lambda plan: plan.update(schema=2))
    result = call(capfd, "verify", artifact)
    assert result.code == 1 and "plan schema 2, this version reads 1" in result.out
    call(capfd, "run", artifact, "hello").refused(2, "plan schema 2", "compile again")
    call(capfd, "plan", "show", artifact).refused(2, "plan schema 2")


def test_another_target_is_refused(tiny_artifact: Path, tmp_path: Path, capfd):
    artifact = copy(tiny_artifact, tmp_path)
    edit_plan(artifact, lambda plan: plan["target"].update(name="h200"))
    edit_manifest(artifact, target="h200")
    call(capfd, "run", artifact, "hello").refused(2, "is for h200", "--target cpu")


def test_a_file_of_another_artifact_is_found(tiny_artifact: Path, tmp_path: Path, capfd):
    """A manifest that is correct in itself, but names another plan than the one beside it."""
    artifact = copy(tiny_artifact, tmp_path)
    edit_manifest(artifact, plan="0" * 64)
    result = call(capfd, "verify", artifact)
    assert result.code == 1 and "plan.json is not the plan" in result.out
    call(capfd, "run", artifact, "hello").refused(1, "names another plan")


def test_signing_accepts_an_edited_plan(tiny_artifact: Path, tmp_path: Path):
    artifact = copy(tiny_artifact, tmp_path)
    text = (artifact / "plan.json").read_text()
    (artifact / "plan.json").write_text(text.replace('"max_batch": 8', '"max_batch": 4'))
    assert find_problems(artifact)
    sign(artifact)
    assert find_problems(artifact) == []
    assert open_artifact(artifact).plan.schedule.max_batch == 4
    assert open_artifact(artifact).manifest.plan != open_artifact(tiny_artifact).manifest.plan
