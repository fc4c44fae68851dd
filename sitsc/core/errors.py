"""Errors for people: one class a mistake, each told in one line with a hint.

Every error a user can cause derives from `SitscError`; the CLI prints `str(error)` and exits with
`exit_code` (2: the user's mistake, 1: a check failed). Anything else is a bug and keeps its
traceback.
"""


class SitscError(Exception):
    """A mistake told in one line: what happened, where, and what to try."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(what)

    def __str__(self) -> str:
        place = f" [{self.where}]" if self.where else ""
        hint = f" — {self.hint}" if self.hint else ""
        return " ".join(f"{self.what}{place}{hint}".split())


class OptionError(SitscError):
    """An option has a value outside its range."""


class EnvironmentValueError(SitscError):
    """An environment variable of ours has a value that cannot be read."""


# --- checkpoints and configs -------------------------------------------------------------------


class CheckpointError(SitscError):
    """A checkpoint is missing, truncated, inconsistent or hostile."""


class ConfigError(SitscError):
    """config.json holds a key or a value that the compiler does not understand."""


class UnsupportedModelError(SitscError):
    """The architecture, or a part of it, cannot be compiled."""


class TokenizerError(SitscError):
    """The tokenizer or the chat template is missing or cannot be used."""


# --- graph, passes, plan ----------------------------------------------------------------------


class GraphError(SitscError):
    """A graph is not valid; the message shows the node with its surroundings."""

    exit_code = 1


class NumericsError(SitscError):
    """A pass that must not change numerics did."""

    exit_code = 1


class PlanError(SitscError):
    """A plan is malformed, was altered, or has a schema this version does not know."""


class PolicyError(SitscError):
    """A policy for comparing plans cannot be read, or says what no comparison knows."""


class GoldenError(SitscError):
    """A golden configuration cannot be read or made, or nothing measured keeps its limits."""


class StaleGoldenError(SitscError):
    """A golden configuration is stale, and only a fresh one was asked for."""

    exit_code = 1


class MemoryPlanError(SitscError):
    """The plan does not fit the memory of the target."""


class RankError(SitscError):
    """A process among several is lost, or is not one of those that belong together."""

    exit_code = 1


class PartitionError(SitscError):
    """A model cannot be cut among ranks as asked."""


class TargetError(SitscError):
    """The target is unknown, or not the one this machine has."""


class CompileError(SitscError):
    """A compiler that we call (g++, Triton, AOTInductor) failed."""

    exit_code = 1


class CacheError(SitscError):
    """The compile cache cannot be read or written."""


# --- artifact and runtime -----------------------------------------------------------------------


class ArtifactError(SitscError):
    """An artifact is missing a file, was altered, or is of another version."""


class ArtifactExistsError(ArtifactError):
    """The output folder exists already."""


class VerifyError(ArtifactError):
    """A check of an artifact failed."""

    exit_code = 1


class DeviceError(SitscError):
    """The GPU, its driver, or a call to it cannot be used as asked."""


class RequestError(SitscError):
    """One request cannot be served as asked; the engine goes on."""


class CapacityError(RequestError):
    """A request needs more KV pages or context than the artifact was planned for."""


class OutOfPagesError(CapacityError):
    """The KV page pool has fewer free pages than asked for; nothing was changed."""


class PageAccountingError(SitscError):
    """The bookkeeping of KV pages is inconsistent: a bug of ours, never the user's mistake."""

    exit_code = 1


class SamplingError(RequestError):
    """No token can be drawn for one request: its logits are not finite, or nothing is allowed."""


class ExecutionError(RequestError):
    """A step failed while this request was in it; the cause is attached."""

    exit_code = 1
