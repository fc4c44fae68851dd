"""What a user may choose when compiling; the fingerprint covers every field by reflection."""

from dataclasses import dataclass, fields

from sitsc.core.canonical import digest
from sitsc.core.errors import OptionError
from sitsc.core.hardware import refuse_mixed
from sitsc.core.records import to_value

DTYPES = ("auto", "float32", "bfloat16")
WEIGHTS = ("none", "int8")
KV_DTYPES = ("auto", "float32", "bfloat16")
RESIDUALS = ("auto", "float32", "bfloat16")
_MOST_DEVICES = 1024
_SHORT = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "float": "float32"}


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Options of `sitsc compile`; 0 for a size, None for pack: as the model or the planner says.

    A target such as "h200:2" is the same as `devices` 2. With several devices and neither `tp` nor
    `pp` the cost model chooses them, for the limits of `slo` and the JSON text `workload`.
    """

    target: str = "cpu"
    dtype: str = "auto"
    weights: str = "none"
    kv_dtype: str = "auto"
    residual: str = "auto"
    max_context: int = 0
    max_batch: int = 8
    prefill_chunk_tokens: int = 512
    kv_tokens: int = 0
    page_tokens: int = 0
    pack: bool | None = None
    tp: int = 1
    pp: int = 1
    ep: int = 1
    devices: int = 1
    slo: str = ""
    workload: str = ""
    allow_unknown_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises OptionError for a value outside its range."""
        self._count_devices()
        choices = (("dtype", DTYPES), ("weights", WEIGHTS), ("kv_dtype", KV_DTYPES))
        for name, allowed in (*choices, ("residual", RESIDUALS)):
            value = getattr(self, name)
            value = _SHORT.get(value, value)
            object.__setattr__(self, name, value)
            if value not in allowed:
                raise OptionError(
                    f"--{name.replace('_', '-')} {value!r} is unknown",
                    hint=f"one of {', '.join(allowed)}",
                )
        ranges = (("max_context", 0, 1 << 20), ("max_batch", 1, 1024), ("kv_tokens", 0, 1 << 26))
        ranges += (("prefill_chunk_tokens", 16, 1 << 16),)
        ranges += (("tp", 1, 1024), ("pp", 1, 1024), ("ep", 1, 1024))
        usual = {f.name: f.default for f in fields(self)}
        for name, low, high in ranges:
            value = getattr(self, name)
            if not low <= value <= high:
                raise OptionError(
                    f"--{name.replace('_', '-')} {value} is outside {low}..{high}",
                    hint=f"leave it out for {usual[name] or 'what fits the model'}",
                )

        if self.residual != "auto" and self.is_cpu:
            raise OptionError(
                f"--residual {self.residual} is for GPU targets, not {self.target}",
                hint="--dtype float32 on a CPU",
            )
        pages = (0, 16) if self.is_cpu else (0, 16, 32, 64)
        if self.page_tokens not in pages:
            allowed = ", ".join(str(size) for size in pages[1:])
            raise OptionError(
                f"--page-tokens {self.page_tokens} is not possible on {self.target}",
                hint=f"one of {allowed}; leave it out for {pages[-1]}",
            )

    def _count_devices(self) -> None:
        """Take the number of devices out of the target. Raises OptionError where two disagree.

        TargetError for targets of several kinds.
        """
        refuse_mixed(self.target)
        name, colon, number = self.target.partition(":")
        if colon and not (number.isdecimal() and 1 <= int(number) <= _MOST_DEVICES):
            raise OptionError(
                f"--target {self.target}: {number!r} is no number of devices", hint=f"{name}:2"
            )
        devices = int(number) if colon else self.devices
        if not 1 <= devices <= _MOST_DEVICES:
            raise OptionError(f"{devices} devices", hint=f"1 to {_MOST_DEVICES}")
        if self.num_ranks > 1 and devices not in (1, self.num_ranks):
            raise OptionError(
                f"--tp {self.tp} --pp {self.pp} are {self.num_ranks} ranks, not the {devices} "
                "devices of the target",
                hint=f"--target {name}:{self.num_ranks}, or leave out --tp and --pp",
            )
        if (self.slo or self.workload) and (devices == 1 or self.num_ranks > 1):
            raise OptionError(
                "--slo and --workload choose how several devices share a model",
                hint=f"--target {name}:2, without --tp and --pp",
            )
        object.__setattr__(self, "target", name)
        object.__setattr__(self, "devices", max(devices, self.num_ranks))

    @property
    def num_ranks(self) -> int:
        """Processes that run the artifact together; 1 as long as nobody has chosen."""
        return self.tp * self.pp

    @property
    def is_cut(self) -> bool:
        """Whether the model is cut among ranks."""
        return self.devices > 1 or self.ep > 1

    @property
    def is_cpu(self) -> bool:
        """Whether the target is a CPU."""
        return self.target.startswith("cpu")

    @property
    def page_size(self) -> int:
        """Tokens of a KV page: as asked for, else what the target's kernels like best."""
        return self.page_tokens or (16 if self.is_cpu else 64)

    def fingerprint(self) -> str:
        """SHA-256 over every option by its name."""
        return digest({f.name: to_value(getattr(self, f.name)) for f in fields(self)})
