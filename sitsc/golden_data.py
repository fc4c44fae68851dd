"""The data files behind a golden configuration, by their digests.

In: a target and its devices. Out: SHA-256 of each file that its predictions and kernels come from.
Opens no model: it runs where nothing that reads checkpoints is installed.
"""

from importlib import resources

from sitsc.build_info import bytes_digest
from sitsc.core.calibration import calibration_for
from sitsc.core.hardware import load_target


def data_digests(target: str, devices: int) -> dict[str, str]:
    """SHA-256 of each data file that predictions and kernels of a target come from."""
    data = load_target(target)
    names, calibration = [f"targets/{target}", f"tiles/{target}"], calibration_for(data)
    if calibration is not None:
        names.append(f"calibration/{calibration.target}")
    if devices > 1:
        names.append(f"links/{data.host.link}")
    files = {n: resources.files("sitsc").joinpath(f"data/{n}.json") for n in sorted(names)}
    return {n: bytes_digest(file.read_bytes()) for n, file in files.items() if file.is_file()}
