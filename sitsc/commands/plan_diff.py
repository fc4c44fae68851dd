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
    a: Annotated[
        Path, typer.Argument(help="An artifact, a plan or a folder of plans: before.", metavar="A")
    ],
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
    if _are_folders(a, b):
        _folders(a, b, policy, as_json=as_json, as_markdown=as_markdown, as_html=as_html)
        return
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


def _are_folders(a: Path, b: Path) -> bool:
    from sitsc.core.diff.folders import is_folder  # noqa: PLC0415

    return is_folder(a) or is_folder(b)


def _folders(
    a: Path, b: Path, policy: Path | None, *, as_json: bool, as_markdown: bool, as_html: bool
) -> None:
    """All pairs of two folders; exit code 1 when one is outside of the policy."""
    from sitsc.commands import plan_diff_folders as many  # noqa: PLC0415

    if as_html:
        raise OptionError("--html shows two plans", hint="--markdown or --json for folders")
    found, same = many.compare_folders(
        a, b, lambda diff, plan: _verdict(policy, diff, plan), judged=policy is not None
    )
    if as_json:
        print_json(many.value(found, same))
    else:
        lines = (many.markdown_lines if as_markdown else many.text_lines)(found, same)
        print("\n".join(lines))
    if any(item.outside for item in found):
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
