"""`sitsc plan explain`: which pass decided, from which numbers, and what would change it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sitsc.commands.output import Json, print_json
from sitsc.core.errors import OptionError

if TYPE_CHECKING:
    from sitsc.core.explain import Fact
    from sitsc.core.reference import Reference


def explain(
    artifact: Annotated[Path, typer.Argument(help="An artifact, or a plan.json.")],
    op: Annotated[str, typer.Option(help="A module, such as model.layers.0.mlp.")] = "",
    why: Annotated[
        str, typer.Option(help="partition (tp, pp, ep), prefill, buckets, memory or numerics.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Say who decided about an operator or a topic, from what, and what would change it."""
    if bool(op) == bool(why):
        raise OptionError("explain wants one of --op and --why", hint="--op model.layers.0.mlp")
    from sitsc.commands.plan import read  # noqa: PLC0415  (it imports this module)
    from sitsc.core import explain as facts  # noqa: PLC0415  (imports torch)

    topic = facts.topic_of(why) if why else ""
    plan = read(artifact)
    found = facts.why(plan, topic) if topic else facts.operator_facts(plan, _graph(artifact), op)
    if as_json:
        print_json([asdict(fact) for fact in found])
    else:
        print("\n".join(lines(found)))


def lines(found: "list[Fact]") -> list[str]:
    """A fact a paragraph: what, then who, from what, and what would change it."""
    shown = []
    for fact in found:
        shown += [fact.what, f"    by {fact.by}: {fact.why}"]
        shown += [f"    changed by: {fact.change}"] if fact.change else []
    return shown


def _graph(artifact: Path) -> "Reference | None":
    """The graph of an artifact; none of a lone plan, and of artifacts for several ranks."""
    from sitsc.core.artifact import open_artifact  # noqa: PLC0415  (imports torch)
    from sitsc.core.reference import FILE, read_reference  # noqa: PLC0415

    if artifact.is_file():
        return None
    opened = open_artifact(artifact)
    return read_reference(opened.json(FILE)) if opened.has(FILE) else None
