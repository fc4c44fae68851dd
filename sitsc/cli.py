"""The command line: `sitsc COMMAND`. Registers the commands and turns mistakes into one line.

Exit codes: 0 fine, 1 a check failed, 2 the user's mistake, 130 interrupted. Anything that is not a
`SitscError` is a bug of ours and keeps its traceback. Imports nothing heavy.
"""

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from sitsc import __version__
from sitsc.commands import (
    bench,
    compile,
    demo,
    export,
    golden,
    lint,
    models,
    partition,
    plan,
    report,
    run,
    serve,
    simulate,
    tune,
    verify,
)
from sitsc.core.errors import SitscError
from sitsc.core.stops import ended_by_signals

# Newer typers carry a click of their own; the public BadParameter leads to its base class.
_CLICK_ERROR: type = typer.BadParameter.__mro__[2]
INTERRUPTED, PIPE_CLOSED = 130, 141

app = typer.Typer(
    name="sitsc",
    help="Ahead-of-time compiler and runtime for large language models: the plan is a file.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(compile.compile)
app.command()(lint.lint)
app.command()(run.run)
app.command()(serve.serve)
app.command()(bench.bench)
app.command()(partition.partition)
app.command()(simulate.simulate)
app.command()(golden.golden)
app.add_typer(plan.app, name="plan", no_args_is_help=True)
app.command()(report.report)
app.command()(verify.verify)
app.command()(export.export)
app.command()(demo.demo)
app.add_typer(models.app, name="models", no_args_is_help=True)
app.add_typer(tune.app, name="tune", no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sitsc {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(SitscError.exit_code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: that of the process) and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with ended_by_signals():
            code = app(args=arguments, prog_name="sitsc", standalone_mode=False)
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except SitscError as error:
        return _refused(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return _pipe_closed()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer caught it first
            return _pipe_closed()
        raise
    except Exception as error:
        if isinstance(error, _CLICK_ERROR):
            return _usage(error)
        raise


def _pipe_closed() -> int:
    """Nobody reads any more; what is still buffered must not fail at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # pyright: ignore[reportOptionalMemberAccess]
    return PIPE_CLOSED


def _refused(message: str, code: int) -> int:
    print(f"sitsc: {message}", file=sys.stderr)
    return code


def _usage(error: Exception) -> int:
    """A command line that cannot be read, in one line; help where nothing was asked for."""
    context = getattr(error, "ctx", None)
    text: str = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
    message = " ".join(text.split()).rstrip(".")
    if context is not None and type(error).__name__ == "NoArgsIsHelpError":
        print(context.get_help())
        return SitscError.exit_code
    path = context.command_path if context is not None else "sitsc"
    return _refused(f"{message} — see {path} --help", SitscError.exit_code)


if __name__ == "__main__":
    sys.exit(main())
