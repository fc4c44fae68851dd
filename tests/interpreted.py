"""Kernel checks in Triton's interpreter: every launch, then every check."""

from sitsc.codegen.interpreter import Interpreter
from tests.kernel_checks import KernelCheck


def verify(interpreter: Interpreter, check: KernelCheck) -> None:
    """Launch what a check has prepared; it passes, and counters are zero again."""
    prepared = check.prepare("cpu", pdl=False)
    for step in prepared.steps:
        interpreter.launch(step.source, step.grid, *step.arguments)
    for each in prepared.checks:
        assert each.passes(), f"{each.name}: relative error {each.error():.1e}"
    for counter in prepared.zero:
        assert not counter.any()
