"""`sitsc plan diff`: what a plan does otherwise than another, held against a policy."""

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sitsc.commands.output import Json, print_json
from sitsc.core.errors import OptionError, PolicyError

if TYPE_CHECKING:
    from sitsc.core.diff.change import PlanDiff
    from sitsc.core.diff.read import Opened
    from sitsc.core.diff_policy import Verdict


def diff(
    a: Annotated[Path, typer.Argument(help="An artifact or a plan.json: as it was.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="Another: as it is now.", metavar="B")],
    policy: Annotated[
        Path | None, typer.Option(help="Limits as TOML; without, nothing is outside.")
    ] = None,
    as_json: Json = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Everything as Markdown, for a pull request.")
    ] = False,
    as_html: Annotated[
        bool, typer.Option("--html", help="Everything as one HTML page without scripts.")
    ] = False,
) -> None:
    """Print what B does otherwise than A. Exit code 1 when that is outside of the policy."""
    if as_json + as_markdown + as_html > 1:
        raise OptionError("more than one format", hint="one of --json, --markdown, --html")
    from sitsc.commands import plan_diff_view as view  # noqa: PLC0415  (plans: other commands need none)
    from sitsc.core.diff.compare import compare  # noqa: PLC0415
    from sitsc.core.diff.read import open_plan  # noqa: PLC0415

    opened = open_plan(a), open_plan(b)
    found = compare(*opened)
    verdict = _verdict(policy, found, opened[1])
    if as_json:
        print_json(view.value(found, verdict))
    elif as_markdown:
        print("\n".join(view.markdown_lines(found, verdict)))
    elif as_html:
        from sitsc.commands.plan_diff_html import page  # noqa: PLC0415  (Jinja2)

        print(page(found, verdict), end="")
    else:
        print("\n".join(view.text_lines(found, verdict)))
    if verdict is not None and not verdict.within:
        raise typer.Exit(1)


def _verdict(policy: Path | None, found: "PlanDiff", b: "Opened") -> "Verdict | None":
    """What the policy says, None without one. Raises PolicyError."""
    if policy is None:
        return None
    from sitsc.core.diff_policy import facts_of, judge, read_policy  # noqa: PLC0415

    try:
        text = policy.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"{policy} cannot be read: {error}", hint="name a TOML file") from None
    return judge(read_policy(text, policy.name), found, facts_of(b.plan), date.today())
