from pathlib import Path

import pytest

from sitsc.core.artifact import open_artifact
from sitsc.core.errors import ArtifactError
from sitsc.runtime.cpu_library import CpuLibrary
from sitsc.runtime.package import load_package


def mapped() -> set[str]:
    """Inodes of the libraries from memory that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:step" in line}


def test_every_package_is_a_library_of_its_own(tiny_artifact: Path):
    """The system takes a library of a known path for loaded: two packages need two paths."""
    CpuLibrary.of(open_artifact(tiny_artifact))
    before = mapped()
    for count in range(1, 4):  # none is kept: a library outlives its runner
        load_package(tiny_artifact / "cpu/step.pt2")
        assert len(mapped() - before) == count


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18), b"no archive"])
def test_what_is_no_package(tmp_path: Path, content: bytes):
    (tmp_path / "step.pt2").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"step\.pt2 is not a package"):
        load_package(tmp_path / "step.pt2")
