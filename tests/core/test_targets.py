"""Names of targets: one kind of device each; what else is asked for is refused with a way out."""

from pathlib import Path

import pytest

from sitsc.core.errors import TargetError
from sitsc.core.hardware import load_target, target_names
from sitsc.core.options import CompileOptions
from tests.commands.command_line import call

MIXED = ["h200,h100", "h200:2,h100:2", "h200 + h100", "h200, cpu", "h200;h100"]


@pytest.mark.parametrize("name", MIXED)
def test_devices_of_mixed_types(name: str):
    for read in (load_target, lambda text: CompileOptions(target=text)):
        with pytest.raises(TargetError, match="mixed types are not supported in one artifact") as e:
            read(name)
        assert "--target h200 and --target" in e.value.hint


def test_one_kind_several_times():
    with pytest.raises(TargetError, match="one kind of device several times") as error:
        CompileOptions(target="h200:2,h200")
    assert "--target h200:3" in error.value.hint


def test_unknown_ones():
    with pytest.raises(TargetError, match="unknown target 'h20'") as error:
        load_target("h20")
    assert all(name in error.value.hint for name in target_names())
    with pytest.raises(TargetError, match="unknown target 'h200:2'") as error:
        load_target("h200:2")
    assert error.value.hint == "--target h200 --devices 2"


def test_commands_say_so(tmp_path: Path, tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]):
    said = ("--target h200,h100", "mixed types", "--target h200 and --target h100")
    out = ("-o", tmp_path / "out")
    for command in (
        ("partition", "tiny-llama"),
        ("simulate", "tiny-llama", "--rate", 1),
        ("compile", tiny_checkpoint, *out),
        ("plan", "make", "tiny-llama", *out),
    ):
        call(capfd, *command, "--target", "h200,h100").refused(2, *said)
