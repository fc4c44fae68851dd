"""`sitsc run`: text as it comes, the same as JSON, and requests that cannot be served."""

import json
from pathlib import Path

import pytest

from tests.commands.artifact_edits import copy, edit_manifest
from tests.commands.command_line import Result, call, spawn

PROMPT = "The river is wide"


def answer(result: Result) -> dict:
    assert (result.code, result.err) == (0, ""), result
    return json.loads(result.out)


@pytest.fixture(scope="module")
def greedy(tiny_artifact: Path) -> dict:
    return answer(spawn("run", tiny_artifact, PROMPT, "--max-tokens", 12, "--json"))


def test_json(greedy: dict):
    assert set(greedy) == {"text", "token_ids", "finish_reason", "timings"}
    assert len(greedy["token_ids"]) == 12 and greedy["finish_reason"] == "length"
    times = greedy["timings"]
    assert {"python", "import", "open", "weights", "tokenizer", "verify", "executor"} == set(
        times["startup"]
    )
    assert times["startup_s"] == pytest.approx(sum(times["startup"].values()), abs=1e-3)
    assert times["ttft_ms"] > 0 and times["tokens_per_s"] > 0


def test_text_from_stdin_is_the_same_and_nothing_else_is_printed(tiny_artifact: Path, greedy: dict):
    result = spawn("run", tiny_artifact, "-", "--max-tokens", 12, stdin=PROMPT)
    assert result == Result(0, greedy["text"] + "\n", "")


@pytest.mark.parametrize("how", [(), ("--json",)])
def test_an_answer_cut_by_the_context_is_told(
    tiny_artifact: Path, tmp_path: Path, how: tuple[str, ...]
):
    """One line on stderr, and only when fewer tokens came than were asked for."""
    arguments = ("run", tiny_artifact, "-", *how)
    prompt = "water " * 50
    result = spawn(*arguments, "--max-tokens", 100_000, stdin=prompt)
    assert "cut after " in result.err, result
    count = int(result.err.split("cut after ")[1].split()[0])
    assert result.code == 0 and len(result.err.splitlines()) == 1
    assert "a context of 512" in result.err and "--max-context" in result.err
    if how:
        made = json.loads(result.out)
        assert made["finish_reason"] == "length" and len(made["token_ids"]) == count
    whole = spawn(*arguments, "--max-tokens", count, stdin=prompt)
    assert (whole.code, whole.err) == (0, "")


def test_stop_ends_before_the_text(tiny_artifact: Path, greedy: dict):
    stop = greedy["text"][3:5]
    made = answer(spawn("run", tiny_artifact, PROMPT, "--max-tokens", 12, "--stop", stop, "--json"))
    assert made["finish_reason"] == "stop"
    assert made["text"] == greedy["text"][: greedy["text"].index(stop)]


def test_a_seed_repeats_and_chat_changes_the_prompt(tiny_artifact: Path, greedy: dict):
    settings = ("--temperature", 1, "--top-k", 40, "--top-p", 0.9, "--min-p", 0.01, "--chat")
    arguments = ("run", tiny_artifact, PROMPT, "--seed", 7, "--max-tokens", 12, "--json", *settings)
    first = answer(spawn(*arguments, "--repetition-penalty", 1.2, "--no-verify"))
    again = answer(spawn(*arguments, "--repetition-penalty", 1.2))
    assert first["token_ids"] == again["token_ids"] != greedy["token_ids"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-tokens", "0"),
        ("--max-tokens", "-3"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--temperature", "0.00001"),
        ("--top-k", "-1"),
        ("--top-p", "0"),
        ("--top-p", "1.01"),
        ("--top-p", "nan"),
        ("--min-p", "-0.1"),
        ("--min-p", "1.5"),
        ("--repetition-penalty", "0"),
        ("--repetition-penalty", "-2"),
        ("--seed", "-1"),
        ("--stop", ""),
    ],
)
def test_nonsense_sampling(tiny_artifact: Path, option: str, value: str, capfd):
    name = option.removeprefix("--").replace("-", "_")
    call(capfd, "run", tiny_artifact, "hello", option, value).refused(2, name, "must be")


def test_empty_prompts(tiny_artifact: Path, capfd):
    call(capfd, "run", tiny_artifact, "").refused(2, "the prompt is empty")
    spawn("run", tiny_artifact, "-").refused(2, "the prompt is empty")


def test_a_prompt_that_is_not_text(tiny_artifact: Path, capfd):
    call(capfd, "run", tiny_artifact, b"\xff\xfe".decode(errors="surrogateescape")).refused(
        2, "not UTF-8"
    )


def test_a_prompt_longer_than_the_context(tiny_artifact: Path):
    result = spawn("run", tiny_artifact, "-", stdin="water " * 2000)
    result.refused(2, "the context holds 512", "shorten the prompt")


def test_an_artifact_with_its_weights_takes_no_others(tiny_artifact: Path, tmp_path: Path, capfd):
    call(capfd, "run", tiny_artifact, "hi", "--weights", tmp_path).refused(2, "holds its weights")
    call(capfd, "run", tiny_artifact, "hi", "--weights", tmp_path / "no").refused(
        2, "is not a folder"
    )
    call(capfd, "run", tmp_path / "no", "hi").refused(2, "does not exist")


def test_a_model_without_a_chat_template(tiny_artifact: Path, tmp_path: Path):
    artifact = copy(tiny_artifact, tmp_path)
    (artifact / "chat_template.jinja").unlink()
    files = json.loads((artifact / "manifest.json").read_text())["files"]
    del files["chat_template.jinja"]
    edit_manifest(artifact, files=files)
    spawn("run", artifact, "hi", "--chat").refused(2, "no chat template", "without --chat")
