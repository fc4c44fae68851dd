"""`sitsc golden` on a GPU; SITSC_GPU_GOLDEN names a folder that `sitsc golden --candidates` wrote.

Its artifacts have no weights inside (`--random-weights`).
"""

import os
from pathlib import Path

import pytest
import torch

from sitsc.cli import main
from sitsc.core.golden import read_golden

pytestmark = pytest.mark.gpu
PLACE = os.environ.get("SITSC_GPU_GOLDEN", "")
NEAR = 1.5  # a prediction that is further off is of something else


def test_candidates_are_measured(tmp_path: Path):
    if not PLACE or not torch.cuda.is_available():
        pytest.skip("needs a GPU, and SITSC_GPU_GOLDEN")
    out = tmp_path / "golden.toml"
    assert main(["golden", "--measure-from", PLACE, "--random-weights", "-o", str(out)]) == 0
    golden = read_golden(out.read_text())
    measured = [one for one in golden.candidates if one.measured is not None]
    assert golden.best.measured is not None and golden.best.figures.misses(golden.asked) <= 1
    for one in measured:
        own = one.measured
        assert own is not None and own.hardware == torch.cuda.get_device_name()
        assert own.weights == "random" and "driver" in own.versions
        for name in ("ttft_ms", "tpot_ms"):
            ratio = getattr(own.figures, name) / getattr(one.predicted, name)
            assert 1 / NEAR < ratio < NEAR, (one.name, name, ratio)
    assert main(["golden", "check", str(out)]) == 0
