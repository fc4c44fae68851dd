"""Whether a plan fits the memory that may be used, and the smallest changes where it does not.

In: a plan and the room for it. Out: nothing, or MemoryPlanError with what is needed by component,
there and short, and at most three changes, each of which is enough by itself. Asks no device.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sitsc.core.errors import MemoryPlanError
from sitsc.core.hardware import load_target, target_names
from sitsc.core.memory_budget import Room, components, needed_bytes, size_text
from sitsc.core.memory_ranks import MoreRanks, more_ranks
from sitsc.core.plan import Plan

AGAIN, NOW = "compile with ", "with "  # before options: of an artifact, of a plan being made
_NOTHING = "no option, GPU or number of ranks that we know is enough: a smaller model"
_MOST_CHANGES = 3
_ALIGNMENT = 64
_LEAST_CONTEXT, _LEAST_CHUNK = 256, 16
_INT8_TARGETS = ("cpu",)


@dataclass(frozen=True, slots=True)
class Change:
    """Something to do, the bytes needed then, and the share of what it gives up that is kept."""

    what: str
    needed_bytes: int
    kept: float


def check_memory(plan: Plan, room: Room, place: str, where: str = "") -> None:
    """Raises MemoryPlanError when the plan needs more than `room`; `place` names the device."""
    limited = room.limit_bytes and room.limit_bytes <= room.free_bytes
    there = "allowed by --memory-limit" if limited else f"free on {place}"
    _check(plan, room, there, where, AGAIN)


def check_planned(plan: Plan) -> None:
    """The same for a plan being made, on its target with nothing else there; one without a size
    holds any. Raises MemoryPlanError.
    """
    size, ranks = plan.target.memory_bytes, plan.parallel.tp * plan.parallel.pp
    if size:
        there = f"on {plan.target.name}" if ranks == 1 else f"on each of {ranks} {plan.target.name}"
        _check(plan, Room(size, size), there, "", NOW)


def _check(plan: Plan, room: Room, there: str, where: str, again: str) -> None:
    need, have = needed_bytes(plan), room.usable_bytes
    if need <= have:
        return
    parts = ", ".join(f"{name} {size_text(count)}" for name, count in components(plan).items())
    first = "; or ".join(change.what for change in changes(plan, room, again))
    raise MemoryPlanError(
        f"not enough memory: {size_text(need)} needed ({parts}), {size_text(have)} {there},"
        f" {size_text(need - have)} short",
        where=where,
        hint=first or _NOTHING,
    )


def changes(plan: Plan, room: Room, again: str = AGAIN) -> list[Change]:
    """The smallest changes with which the plan fits, at most three; each is enough by itself.

    `again` comes before options to compile with.
    """
    shape, have = _Shape(plan, again), room.usable_bytes
    found = list(_outside(plan, room))
    inside = list(_inside(shape, have))
    rest = [change for change in (shape.quantised(have),) if change]
    if not inside:
        rest += [change for change in (shape.shorter(have),) if change]
    found += sorted([*inside, *rest], key=lambda change: -change.kept)
    if not inside:
        found += _more_ranks(shape, have)
    if len(found) < _MOST_CHANGES:
        found += _bigger_device(plan, room, again)
    return found[:_MOST_CHANGES]


def _outside(plan: Plan, room: Room) -> Iterator[Change]:
    """Changes that need no other artifact."""
    need = needed_bytes(plan)
    if room.limit_bytes and need <= room.free_bytes:
        mib = -(-need // (1 << 20))
        yield Change(f"run with --memory-limit {mib}MiB", mib << 20, 1.0)
    held = room.total_bytes - room.free_bytes
    if need <= room.total_bytes and room.free_bytes < need:
        if not room.limit_bytes or need <= room.limit_bytes:
            what = f"end other processes: they hold {size_text(held)} of the GPU"
            yield Change(what, need, 1.0)


def _bigger_device(plan: Plan, room: Room, again: str) -> list[Change]:
    """The smallest GPU we know that holds the plan, where this one never can."""
    need = needed_bytes(plan)
    if need <= room.total_bytes or (room.limit_bytes and room.limit_bytes < need):
        return []
    known = [load_target(name).target for name in target_names()]
    fit = [target for target in known if target.memory_bytes >= need]
    if not fit:
        return []
    best = min(fit, key=lambda target: (target.isa != plan.target.isa, target.memory_bytes))
    if again == NOW:
        what = f"{again}--target {best.name} ({size_text(best.memory_bytes)})"
        return [Change(what, need, 0.0)]
    what = f"a GPU with {size_text(best.memory_bytes)} ({best.name})"
    if best.isa != plan.target.isa:
        what += f", compiled with --target {best.name}"
    return [Change(what, need, 0.0)]


def _more_ranks(shape: "_Shape", have: int) -> Iterator[Change]:
    """The smallest TP and the smallest PP with which a rank holds its part.

    With all KV pages that are planned if any degree has them, else with the most that one has.
    """
    for degrees in more_ranks(shape.plan):
        found = [(one, shape.fit(have - one.fixed_bytes, one.page_bytes)) for one in degrees]
        one, pages = max(found, key=lambda pair: pair[1], default=(None, 0))
        if one is not None and pages:
            yield shape.ranks(one, pages)


def _inside(shape: "_Shape", have: int) -> Iterator[Change]:
    """What to compile again with; none needs more than `have` bytes, all keep the context.

    A smaller chunk or batch drops the buckets above it: the arena then ends where the last of the
    buckets left does, or before. Either is named only where it leaves room for more KV.
    """
    most = shape.pages(shape.chunk, shape.batch, have)
    if most:
        yield shape.change(shape.chunk, shape.batch, most)
    for chunks, batches in (
        (shape.chunks, (shape.batch,)),
        ((shape.chunk,), shape.batches),
        (shape.chunks, shape.batches),
    ):
        found = [(shape.pages(c, b, have), c, b) for c in chunks for b in batches]
        better = [shape.change(c, b, pages) for pages, c, b in found if pages > 1.01 * most]
        if better:
            yield max(better, key=lambda change: change.kept)
            most = max(most, *(pages for pages, _, _ in found))


class _Shape:
    """The sizes that a user chose, and what a plan of other sizes would need."""

    def __init__(self, plan: Plan, again: str) -> None:
        self.plan, self._again, schedule = plan, again, plan.schedule
        self.chunk, self.batch = schedule.prefill_chunk_tokens, schedule.max_batch
        steps = [tokens - self.batch for tokens in schedule.prefill_buckets]
        self.chunks = (*(c for c in steps if _LEAST_CHUNK <= c < self.chunk), self.chunk)
        self.batches = schedule.decode_buckets or (self.batch,)
        self._page_bytes = sum(group.page_bytes for group in plan.kv)
        self._page_tokens = plan.kv[0].page_tokens
        self._tokens = {regime.name: (regime.kind, regime.sizes) for regime in plan.regimes}

    def fixed(self, chunk: int, batch: int) -> int:
        """Bytes of everything but the KV pool."""
        memory = self.plan.memory
        return (
            needed_bytes(self.plan)
            - memory.kv_bytes
            - memory.arena_bytes
            + self.arena(chunk, batch)
        )

    def arena(self, chunk: int, batch: int) -> int:
        """Where the arena ends at most when only buckets up to these sizes are left.

        The largest step is a chunk beside a whole batch.
        """
        if (chunk, batch) == (self.chunk, self.batch):
            return self.plan.memory.arena_bytes
        buckets = self.plan.schedule.prefill_buckets
        step = min((t for t in buckets if t >= chunk + batch), default=chunk + batch)
        end = 0
        for buffer in self.plan.memory.arena:
            name, inside, _ = buffer.name.partition("/")
            if inside and name in self._tokens:
                kind, sizes = self._tokens[name]
                if sizes["tokens"] > (step if kind == "prefill" else batch):
                    continue
            end = max(end, buffer.offset + -(-buffer.bytes // _ALIGNMENT) * _ALIGNMENT)
        return end

    def pages(self, chunk: int, batch: int, have: int) -> int:
        """KV pages that fit with these sizes, at most those planned; 0 below one full context."""
        return self.fit(have - self.fixed(chunk, batch), self._page_bytes)

    def fit(self, have: int, page_bytes: int) -> int:
        """The same where `have` bytes are left for KV."""
        fit = have // page_bytes
        least = -(-self.plan.tokens.max_context // self._page_tokens)
        return min(self.plan.memory.kv_pages, fit) if fit >= least else 0

    def change(self, chunk: int, batch: int, pages: int) -> Change:
        """What to compile with for these sizes and so many KV pages."""
        planned = self.plan.memory.kv_pages
        kept = chunk / self.chunk * batch / self.batch * pages / planned
        need = self.fixed(chunk, batch) + pages * self._page_bytes
        return Change(self._named(chunk, batch, pages if pages < planned else None), need, kept)

    def _named(self, chunk: int, batch: int, pages: int | None) -> str:
        options = [f"--kv-tokens {pages * self._page_tokens}"] if pages is not None else []
        options += [f"--prefill-chunk-tokens {chunk}"] if chunk != self.chunk else []
        options += [f"--max-batch {batch}"] if batch != self.batch else []
        return self._again + " ".join(options)

    def ranks(self, more: MoreRanks, pages: int) -> Change:
        """What to compile with for more ranks and so many KV pages."""
        planned, what = self.plan.memory.kv_pages, f"{self._again}{more.option}"
        if pages < planned:
            what += f" --kv-tokens {pages * self._page_tokens}"
        return Change(what, more.fixed_bytes + pages * more.page_bytes, pages / planned)

    def shorter(self, have: int) -> Change | None:
        """A smaller context with KV for one full sequence, and no smaller chunk than it takes."""
        planned, context = self.plan.memory.kv_pages, self.plan.tokens.max_context
        found = []
        for chunk in self.chunks:
            fixed = self.fixed(chunk, self.batch)
            pages = (have - fixed) // self._page_bytes
            tokens = pages * self._page_tokens
            if _LEAST_CONTEXT <= tokens < context:
                what = f"{self._again}--max-context {tokens} --kv-tokens {tokens}"
                if chunk < min(tokens, self.chunk):
                    what += f" --prefill-chunk-tokens {chunk}"
                kept = chunk / self.chunk * tokens / context * pages / planned
                found.append(Change(what, fixed + pages * self._page_bytes, kept))
        return max(found, key=lambda change: change.kept, default=None)

    def quantised(self, have: int) -> Change | None:
        """Matrices as int8 with a float32 scale a row, where the target has kernels for it."""
        if self.plan.target.name not in _INT8_TARGETS or self.plan.numerics.weights != "none":
            return None
        saved = sum(
            spec.nbytes - spec.nbytes // (2 if spec.dtype == "bfloat16" else 4) - 4 * spec.shape[0]
            for spec in self.plan.model.parameters
            if spec.format != "plain"
        )
        need = needed_bytes(self.plan) - saved
        return Change(f"{self._again}--weights int8", need, 0.5) if need <= have else None
