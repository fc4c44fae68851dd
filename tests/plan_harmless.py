"""Changes that change nothing: names, order, comments, evidence, files written otherwise, another
machine. Made in source, data and checkpoints; the plans are then made anew."""

import os
import platform
from dataclasses import replace
from typing import Any

import jinja2
import pytest

import sitsc.codegen.triton_source as triton_source
import sitsc.passes.cuda_planner as cuda_planner
from sitsc.passes.fuse_glu import FuseGlu
from tests.plan_faults import CPU, Fault, Subject, ceiling, passes, wrapped


def _classes_renamed(found: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(replace(c, name=c.name.replace("layer", "block")) for c in found)


def _other_machine(patch: pytest.MonkeyPatch) -> None:
    """More processors, another system, host and clock."""
    patch.setattr(os, "cpu_count", lambda: 96)
    patch.setattr(platform, "machine", lambda: "aarch64")
    patch.setattr(platform, "node", lambda: "elsewhere")
    patch.setenv("TZ", "Asia/Tokyo")
    patch.setenv("HOME", "/nowhere")
    patch.setenv("OMP_NUM_THREADS", "1")


class _Commented(jinja2.PackageLoader):
    """Templates with a comment of the template language more."""

    def get_source(self, environment: jinja2.Environment, template: str) -> Any:
        text, *rest = super().get_source(environment, template)
        return ("{# what this kernel does #}\n" + text, *rest)


def _comments(patch: pytest.MonkeyPatch) -> None:
    known = triton_source._environment()
    other = known.overlay(loader=_Commented("sitsc.codegen", "templates"))
    patch.setattr(triton_source, "_environment", lambda: other)


def _swapped(whole: tuple[Any, ...]) -> tuple[Any, ...]:
    """Two matchers that do not meet, the other way round."""
    names = [type(p).__name__ for p in whole]
    one, other = names.index("MatchRmsNorm"), names.index("MatchRope")
    found = list(whole)
    found[one], found[other] = found[other], found[one]
    return tuple(found)


class CombineGate(FuseGlu):
    """A pass by another name."""

    name = "combine_gate"  # pyright: ignore[reportIncompatibleVariableOverride,reportAssignmentType]


def _renamed(whole: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(CombineGate(p.biased) if isinstance(p, FuseGlu) else p for p in whole)


def _kernels_reversed(patch: pytest.MonkeyPatch) -> None:
    wrapped(cuda_planner, "kernel_rows", lambda rows: rows[::-1])(patch)


_WEIGHTS_REVERSED = wrapped(cuda_planner, "weights_of", lambda specs: specs[::-1])
_BUFFERS_REVERSED = wrapped(cuda_planner, "step_buffers", lambda buffers: buffers[::-1])
_REPEATED = passes(lambda whole: (whole[0], *whole))

HARMLESS = (
    Fault("layer classes renamed", change=wrapped(cuda_planner, "layer_classes", _classes_renamed)),
    Fault("kernel rows in another order", change=_kernels_reversed),
    Fault("weights in another order", change=_WEIGHTS_REVERSED),
    Fault("buffers in another order", change=_BUFFERS_REVERSED),
    Fault("comments in templates", change=_comments),
    Fault(
        "where a ceiling comes from", change=ceiling("read_bytes_per_s", source="measured again")
    ),
    Fault("passes in another order", change=passes(_swapped)),
    Fault("a pass renamed", change=passes(_renamed)),
    Fault("a pass that runs twice", change=_REPEATED),
    Fault("another machine", change=_other_machine),
    Fault("another machine, for the CPU", change=_other_machine, base=Subject(CPU)),
    Fault("other weights of the same shapes", after=Subject(checkpoint={"seed": 7})),
    Fault("weights in several files", after=Subject(checkpoint={"shard_bytes": 1 << 14})),
)
