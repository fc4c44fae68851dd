"""What a step launches around the model, and the buffers that live from step to step.

In: options, the vocabulary. Out: input buffers, the fields of the sampled rows, and the launch
groups before and after the model: tokens put in place, tokens sampled, the inputs moved on.
"""

from dataclasses import replace
from typing import Any

from sitsc.core.kernels import KernelInfo, KernelProvider
from sitsc.core.options import CompileOptions
from sitsc.core.plan import STEP_GROUPS, ArenaBuffer, Argument, Launch, LaunchGroup, Tokens
from sitsc.core.serving.sampling_rows import bitmap_words
from sitsc.passes.cuda_collectives import CALLS, planned_buffers, rank_buffers
from sitsc.passes.cuda_schedule import Scheduled
from sitsc.passes.launch_time import Clock
from sitsc.passes.schedule import StepSizes

_PARTS, _BINS, _MANY, _BLOCK = 32, 2048, 2048, 256
_FEW_ROWS, _FEW_PARTS = 16, 8  # more rows fill a GPU with fewer programs each
_SCANNING = 256  # programs of the scan that an H200 holds at once
_SAMPLERS = ("sample_scan", "sample_count", "sample_gather", "sample_draw")
_ENDING = ("sample_scan", "sample_draw")  # where a row has its id: of greedy rows, of the others
_PLACE, _SAMPLE, _DRAW, _NEXT = STEP_GROUPS
_SHORT = {"int64": "i64", "int32": "i32", "float32": "fp32", "float64": "fp64"}
# Kernel arguments that are not named as their buffers.
_RENAMED = {"ids_ptr": "sampled_ids"}
# Of the kernels that take sampled ids from the last stage to the first.
_MAIL, _TO, _SENT = "ids/mail", "ids/to", "ids/sent"
_WORDS = 4  # int32 for an id on its way


def step_buffers(options: CompileOptions, context: int, tokens: Tokens) -> list[ArenaBuffer]:
    """Inputs, fields of the sampled rows and scratch of sampling, at their largest."""
    batch = options.max_batch
    most = min(options.prefill_chunk_tokens, context) + batch
    words = bitmap_words(tokens.vocab_size)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_ids": ("int64", (most,)),
        "position_ids": ("int64", (most,)),
        "logit_rows": ("int64", (batch,)),
        "block_table": ("int32", (batch, -(-context // options.page_size))),
        "query_start": ("int32", (batch + 1,)),
        "context_lens": ("int32", (batch,)),
        "token_sources": ("int32", (batch,)),
        "token_places": ("int32", (batch,)),
        "sampled_ids": ("int64", (batch,)),
        "temperature": ("float32", (batch,)),
        "penalty": ("float32", (batch,)),
        "min_p": ("float32", (batch,)),
        "top_p": ("float64", (batch,)),
        "top_k": ("int32", (batch,)),
        "suppress": ("int32", (batch,)),
        "has_mask": ("int32", (batch,)),
        "slot": ("int32", (batch,)),
        "seed": ("int64", (batch,)),
        "step": ("int64", (batch,)),
        "mask": ("int32", (batch, words)),
        "seen": ("int32", (batch, words)),
        "best": ("float32", (batch, 2, _PARTS)),
        "index": ("int32", (batch, 2, _PARTS)),
        "counter": ("int32", (batch, 2)),
        "state": ("int32", (batch,)),
        "summary": ("float32", (batch, 4)),
        "weight": ("float32", (batch, _PARTS)),
        "plan": ("int32", (batch, 8)),
        "histogram": ("int64", (batch, _BINS)),
        "list": ("int64", (batch, _MANY)),
        "mass": ("int64", (batch, 5)),
        "border": ("int64", (batch,)),
    }
    return planned_buffers(shapes) + rank_buffers(options.tp)


def mail_slots(pp: int) -> int:
    """Steps whose sampled ids the first stage has room for: those in flight and one more."""
    return pp + 2


def mail_buffers(options: CompileOptions, sends: str, last: bool) -> list[ArenaBuffer]:
    """What takes sampled ids from the last of several stages to the first, which `sends`."""
    if options.pp == 1:
        return []
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    if last:
        shapes = {_TO: ("int64", (2,)), _SENT: ("int64", (CALLS,))}
    elif sends:
        shapes = {_MAIL: ("int32", (mail_slots(options.pp), options.max_batch, _WORDS))}
    return planned_buffers(shapes)


class StepLaunches:
    """Makes the launches around the model; new kernel instances go to `keys`."""

    def __init__(
        self,
        tokens: Tokens,
        provider: KernelProvider,
        keys: dict[str, KernelInfo],
        options: CompileOptions,
        clock: Clock,
        sends: str = "",
    ) -> None:
        """`sends`: what the first of several stages sends on."""
        self._clock, self._sends = clock, sends
        self._tokens, self._provider, self._keys = tokens, provider, keys
        self._ranks, self._stages, self._most = options.tp, options.pp, options.max_batch

    def place(self, one: Scheduled, step: StepSizes) -> LaunchGroup:
        """Tokens that an earlier step sampled, from the sampled ids to where they belong."""
        template = "place_sent" if self._sends else "place"
        return self._group(_PLACE, (template,), one, step)

    def sample(self, one: Scheduled, step: StepSizes) -> list[LaunchGroup]:
        """Sampled ids from logits; after a decode step also the inputs of the next.

        The samplers of a single rank move the inputs on themselves. With several stages the ids
        go to the first, and the host gives the next step its inputs: other sequences are in
        between.
        """
        last = ("share_ids",) if self._ranks > 1 else ()
        if self._stages > 1:
            last += ("send_ids",)
        elif self._ranks > 1 and step.kind == "decode":
            last += ("advance",)
        groups = {_SAMPLE: _SAMPLERS[:1], _DRAW: _SAMPLERS[1:], _NEXT: last}
        return [self._group(name, some, one, step) for name, some in groups.items() if some]

    def _group(
        self, name: str, templates: tuple[str, ...], one: Scheduled, step: StepSizes
    ) -> LaunchGroup:
        return LaunchGroup(name, (), tuple(self._launch(t, one, step) for t in templates))

    def _launch(self, template: str, one: Scheduled, step: StepSizes) -> Launch:
        info = self._provider.make(template, **self._shape(template, step))
        self._keys[info.key] = info
        logits = 4 * self._tokens.vocab_size * step.priced().sequences
        nbytes = logits if template == _SAMPLERS[0] else 0
        return Launch(
            kind="kernel",
            kernel=info.key,
            template=info.template,
            tile=info.tile,
            grid=info.grid,
            arguments=tuple(
                _argument(name, kind, one, self._renamed(template)) for name, kind in info.arguments
            ),
            outputs=(),
            stream=0,
            dependent=info.dependent,
            bytes=nbytes,
            flops=0,
            predicted_us=self._clock.moving_us(nbytes),
        )

    def _renamed(self, template: str) -> dict[str, str]:
        """Buffers of arguments that are not named as theirs."""
        if template == "place_sent":
            return {"mail_ptr": _MAIL, "calls_ptr": f"{self._sends}/sent"}
        if template == "send_ids":
            return _RENAMED | {"links_ptr": _TO, "calls_ptr": _SENT}
        return _RENAMED

    def _shape(self, template: str, step: StepSizes) -> dict[str, Any]:
        if template in ("place_sent", "send_ids"):
            shape = {"slots": mail_slots(self._stages), "rows": self._most}
            return shape | {"max_sequences": max(_BLOCK, step.sequences)}
        if template == "share_ids":
            return {"max_sequences": max(_BLOCK, step.sequences), "ranks": self._ranks}
        if template not in _SAMPLERS:
            return {"max_sequences": max(_BLOCK, step.sequences)}
        tokens = self._tokens
        shape = {"vocabulary": tokens.vocab_size, "width": tokens.logits_width, "count": "rows"}
        shape |= {"eos_ids": tokens.eos_token_ids, "bins": _BINS}
        if template != "sample_draw":
            shape["parts"] = _parts(template, step.sequences)
        if template in _ENDING and step.kind == "decode" and self._ranks * self._stages == 1:
            shape["advance"] = 1
        return shape | ({"many": _MANY} if template in _SAMPLERS[2:] else {})


def _parts(template: str, rows: int) -> int:
    """Programs that share a row; of the scan a power of two, so that all work at once."""
    if rows <= _FEW_ROWS:
        return _PARTS
    if template != "sample_scan":
        return _FEW_PARTS
    return 1 << max(_SCANNING // rows, 1).bit_length() - 1


def _argument(name: str, kind: str, one: Scheduled, renamed: dict[str, str]) -> Argument:
    if name == "logits_ptr":
        assert one.logits is not None
        return replace(one.logits, name=name)
    if name == "num_sequences":
        return Argument(name, "size", "sequences", kind, ())
    long = {short: dtype for dtype, short in _SHORT.items()}[kind.removeprefix("*")]
    return Argument(name, "arena", renamed.get(name, name.removesuffix("_ptr")), long, ())
