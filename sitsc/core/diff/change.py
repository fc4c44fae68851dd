"""The records of a comparison: changed decisions, figures of both plans, and the whole.

`Change` is something that was decided otherwise; `Figure` a number that people watch. Both know
what they are called in a policy.
"""

from dataclasses import dataclass

# In the order in which one follows from another, which is the order of telling.
SECTIONS = ("comparison", "target", "parallel", "numerics", "model", "schedule", "kv")
SECTIONS += ("fusions", "kernels", "cost", "memory")
LOWER, HIGHER = "lower", "higher"
_SHORT = 60  # letters of a place that may stand in front


@dataclass(frozen=True, slots=True)
class Change:
    """One decision that differs: what (`title`) of what (`where`), and its two forms, if any.

    `share` is the part of the time of a step that it concerns, 0 to 1, where one is known.
    """

    section: str
    title: str
    where: str
    before: str
    after: str
    share: float = 0.0

    @property
    def text(self) -> str:
        """The change in one line; a long place stands behind what became of it."""
        moved = " → ".join(form for form in (self.before, self.after) if form)
        if len(self.where) > _SHORT and moved:
            return f"{self.title}: {moved}, {self.where}"
        return ": ".join(part for part in (self.title, self.where, moved) if part)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of both plans; `better` says which way is good, `error` is a relative error bar.

    `name` is "tpot_decode_4" or "memory.weights"; `group` what people call it, "TPOT".
    """

    name: str
    group: str
    unit: str
    better: str
    before: float
    after: float
    error: float = 0.0

    @property
    def changed(self) -> bool:
        """Whether the two differ."""
        return self.before != self.after

    @property
    def relative(self) -> float:
        """(after - before) / before; 1 where there was nothing before."""
        if self.before == self.after:
            return 0.0
        return (self.after - self.before) / abs(self.before) if self.before else 1.0

    @property
    def worse(self) -> float:
        """How much worse, relative; negative where it is better."""
        return self.relative if self.better == LOWER else -self.relative

    @property
    def within_error(self) -> bool:
        """Whether it is a changed prediction that differs by less than its error bar."""
        return self.changed and abs(self.relative) < self.error


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two plans in a few words."""

    name: str
    plan: str
    runs: str
    model: str
    target: str


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """What differs between plan `a` and plan `b`.

    `changes` by section, then by share; `figures` those that both have. `skipped` are the sections
    that could not be compared, each with the reason.
    """

    a: Side
    b: Side
    changes: tuple[Change, ...]
    figures: tuple[Figure, ...]
    skipped: dict[str, str]
    warnings: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """Whether nothing that matters differs."""
        return not self.changes and not any(figure.changed for figure in self.figures)

    def of(self, section: str) -> list[Change]:
        """The changes of a section."""
        return [change for change in self.changes if change.section == section]
