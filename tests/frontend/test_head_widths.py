"""Latent attention is refused for targets without kernels for it, before anything is traced."""

from pathlib import Path
from typing import Any

import pytest

from sitsc.core.errors import UnsupportedModelError
from sitsc.frontend.head_widths import check_head_widths
from sitsc.models.presets import preset
from tests.commands.command_line import call

LATENT = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
SAID = "keys of 192 elements a head.*values of 128.*h200 has no kernels"


def test_values_narrower_than_keys_are_for_cpus():
    config = preset("deepseek-v3")
    check_head_widths(config, "cpu")
    with pytest.raises(UnsupportedModelError, match=SAID) as error:
        check_head_widths(config, "h200")
    assert error.value.hint == "--target cpu"


@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_others(target: str):
    check_head_widths(LATENT | {"v_head_dim": 24}, target)
    check_head_widths(preset("llama3-8b"), target)
    check_head_widths(LATENT | {"v_head_dim": "wide"}, target)  # the lint says what that is
    with pytest.raises(UnsupportedModelError, match="of 32") as error:
        check_head_widths(LATENT | {"v_head_dim": 32}, target)
    assert "no target" in error.value.hint


def test_commands_refuse_without_tracing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """`partition`, `simulate`, `compile` say it in one line; `plan make` gives it as the reason."""
    from sitsc import lowering  # noqa: PLC0415  (seconds)

    def never(*arguments: Any) -> None:
        raise AssertionError(f"traced {arguments}")

    monkeypatch.setattr(lowering, "trace", never)
    monkeypatch.setenv("SITSC_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    made = ("models", "random", "deepseek-v3", "--headers-only", "-o", model)
    assert call(capfd, *made).code == 0
    parts = ("keys of 192", "values of 128", "h200 has no kernels", "config.json", "--target cpu")
    for command in (("partition", model), ("simulate", model, "--rate", 1)):
        call(capfd, *command, "--target", "h200").refused(2, *parts)
    out = tmp_path / "out"
    call(capfd, "compile", model, "--target", "h200", "-o", out).refused(2, *parts)
    done = call(capfd, "plan", "make", model, "--target", "h200", "-o", out)
    text = "".join(path.read_text() for path in out.glob("*.txt"))
    assert "values of 128" in text + done.err and "h200 has no kernels" in text + done.err
