"""`sitsc compile` on a full disk, killed or stopped: no artifact, or a whole one."""

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sitsc.core import build_cache
from sitsc.core.artifact_problems import find_problems
from sitsc.core.errors import ArtifactError
from tests.commands.command_line import call, start


@contextlib.contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    """No file may grow beyond `nbytes` in here, which stands for a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", ["plan.json", "cpu/kernels.so", "weights.bin"])
def test_a_disk_that_takes_no_more(
    tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path, name: str, capfd
):
    """It is full one byte before the end of a file."""
    out = tmp_path / "folder" / "out"
    with file_limit((tiny_artifact / name).stat().st_size - 1):
        result = call(capfd, "compile", tiny_checkpoint, "-o", out)
    result.refused(2, f"cannot write {out}", "nothing was left behind")
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(tiny_checkpoint: Path, tiny_artifact: Path, small_disk: Path, capfd):
    out = small_disk / "out"
    call(capfd, "compile", tiny_checkpoint, "-o", out).refused(2, "the disk is full")
    call(capfd, "models", "random", "llama32-1b", "-o", out).refused(2, "the disk is full")
    assert list(small_disk.iterdir()) == []


def test_a_cache_that_cannot_be_written(tiny_checkpoint: Path, tmp_path: Path, monkeypatch, capfd):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SITSC_CACHE", str(tmp_path / "file"))
    result = call(capfd, "compile", tiny_checkpoint, "-o", tmp_path / "out")
    result.refused(2, "compile cache", "set SITSC_CACHE")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def partial_folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if ".partial-" in path.name]


def wait_for_partial(folder: Path, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and not partial_folders(folder):
        time.sleep(0.001)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_while_generating_code(
    tiny_checkpoint: Path, tmp_path: Path, number: signal.Signals
):
    """A stop that can be handled removes everything that was half written."""
    places = tmp_path / "places"
    places.mkdir()
    env = os.environ | {"SITSC_CACHE": str(tmp_path / "cache")}
    process = start("compile", tiny_checkpoint, "-o", places / "out", env=env)
    wait_for_partial(places, process)
    time.sleep(2)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in err
    assert list(places.iterdir()) == []


@pytest.mark.parametrize("seconds", [0, 0.005, 0.02, 0.05, 0.1, 2])
def test_killed_at_any_moment(
    tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path, seconds: float, capfd
):
    """The output is absent or whole, and what is left of a partial one is no artifact."""
    out = tmp_path / "out"
    process = start("compile", tiny_checkpoint, "-o", out)
    wait_for_partial(tmp_path, process)
    time.sleep(seconds)
    process.kill()
    process.communicate(timeout=60)
    assert not out.exists() or find_problems(out) == []
    for left in partial_folders(tmp_path):
        with pytest.raises(ArtifactError, match="interrupted compile"):
            find_problems(left)
        call(capfd, "verify", left).refused(2, "interrupted compile")


def leave(folder: Path, name: str, hours: float) -> Path:
    """A folder with a file in it, last written to so many hours ago."""
    (folder / name / "inner").mkdir(parents=True)
    (folder / name / "inner" / "file").write_text("x")
    then = time.time() - 3600 * hours
    os.utime(folder / name, (then, then))
    return folder / name


def test_what_killed_compiles_left_is_removed_after_a_day(
    tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path, capfd
):
    """Only folders of this output that nobody has written to for a day."""
    old = leave(tmp_path, ".out.partial-old", 25)
    kept = {
        leave(tmp_path, ".out.partial-young", 23),
        leave(tmp_path, ".other.partial-old", 25),
        leave(tmp_path, "out.partial-old", 25),
    }
    link = tmp_path / ".out.partial-link"
    link.symlink_to(tmp_path / ".other.partial-old")
    assert call(capfd, "compile", tiny_checkpoint, "-o", tmp_path / "out").code == 0
    assert not old.exists()
    assert set(tmp_path.iterdir()) == kept | {link, tmp_path / "out"}
    assert all((path / "inner" / "file").exists() for path in kept)


def test_what_killed_compiles_left_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SITSC_CACHE", str(tmp_path))
    old, young = leave(tmp_path, ".partial-old", 25), leave(tmp_path, ".partial-young", 23)
    other = leave(tmp_path, "partial-of-somebody", 25)
    entry = build_cache.add("key", lambda folder: (folder / "code").touch())
    assert not old.exists() and set(tmp_path.iterdir()) == {young, other, entry}
