"""Using golden configurations: reading files, holding them against today, compiling with them."""

import sys
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any

import typer

from sitsc.core.errors import GoldenError, OptionError, StaleGoldenError
from sitsc.core.golden import NOT_STORED, Golden, Now, read_golden, stale_reasons
from sitsc.core.options import CompileOptions

_AGAIN = "sitsc golden makes it again"
_CHOSEN = ("slo", "workload")  # what a golden configuration has taken into account


def read_file(path: Path) -> Golden:
    """The record of a file. Raises GoldenError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        hint = "name a file that sitsc golden wrote"
        raise GoldenError(f"no golden configuration: {error}", where=path.name, hint=hint) from None
    return read_golden(text, path.name)


def given_on_command_line(context: typer.Context) -> set[str]:
    """Names of the parameters that stand on the command line."""
    found = set()
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            found.add(name)
    return found


def warn(text: str) -> None:
    """A line on stderr, whoever reads it."""
    print(f"sitsc: warning: {text}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Used:
    """A golden configuration as a compile takes it, with what the command line says otherwise."""

    file: Path
    golden: Golden
    options: CompileOptions
    overrides: tuple[str, ...]
    strict: bool

    def before(self, model: Path) -> Now:
        """What is true before anything is compiled; says why the file is stale.

        With `strict` the plan is made and compared as well. Raises StaleGoldenError then.
        """
        from sitsc.golden_pipeline import now  # noqa: PLC0415  (imports torch: a second)

        today, devices = date.today(), self.golden.devices
        held = now(model, self.options, devices, today, plan=False)
        stale = stale_reasons(self.golden, held)
        if self.strict and not stale and not self.overrides:
            held = now(model, self.options, devices, today, plan=True)
            stale = stale_reasons(self.golden, held)
        if self.strict and (stale or self.overrides):
            why = "; ".join((*stale, *self.overrides))
            raise StaleGoldenError(f"stale: {why}", where=self.file.name, hint=_AGAIN)
        for text in self.overrides:
            warn(f"{self.file.name}: {text}; its figures are of other options")
        for text in stale:
            warn(f"{self.file.name} is stale: {text}")
        return held

    def after(self, made: dict[str, Any], held: Now) -> dict[str, Any]:
        """What came of the compile, with what it says about the golden configuration.

        The plan of other options says nothing.
        """
        stale = stale_reasons(self.golden, held)
        if not self.overrides:
            planned = replace(held, plan=made["plan"], runs=made["runs"])
            found = stale_reasons(self.golden, planned)
            for text in found[len(stale) :]:
                warn(f"{self.file.name} is stale: {text}")
            stale = found
        golden: dict[str, Any] = {
            "file": str(self.file),
            "name": self.golden.best.name,
            "status": self.golden.status,
            "expires": self.golden.expires.isoformat(),
            "replicas": self.golden.best.replicas,
            "overrides": list(self.overrides),
            "stale": list(stale),
        }
        return made | {"golden": golden}

    @property
    def place(self) -> str:
        """The target as artifacts are named by it: h200:2."""
        count = self.options.num_ranks
        return self.options.target + (f":{count}" if count > 1 else "")


def summary(golden: dict[str, Any]) -> list[str]:
    """What `after` adds, for people."""
    state = "stale" if golden["stale"] else f"fresh until {golden['expires']}"
    found = [f"golden     {golden['name']} ({golden['status']}; {state})"]
    if golden["replicas"] > 1:
        found.append(f"replicas   {golden['replicas']} of this artifact make up the configuration")
    return found


def use(path: Path, given: dict[str, Any], strict: bool) -> Used:
    """The golden configuration of a file under the options `given` on the command line.

    An option given wins over the file's. Raises GoldenError, OptionError.
    """
    golden = read_file(path)
    for name in _CHOSEN:
        if name in given:
            what = f"--{name} beside --golden"
            raise OptionError(what, hint="the file has taken it into account: leave one out")
    given = dict(given)
    if "target" in given:
        given["target"] = _target(golden, given["target"])
    stored: dict[str, Any] = dict(golden.options)
    alone: dict[str, Any] = {"target": golden.target} | given
    asked = CompileOptions(**alone)  # names and values as they count
    options = CompileOptions(**(stored | given))
    known = {f.name for f in fields(CompileOptions)} - set(NOT_STORED)
    differ = [n for n in given if n in known and getattr(asked, n) != stored.get(n)]
    told = tuple(
        f"--{n.replace('_', '-')} {getattr(asked, n)} in place of its {stored.get(n)}"
        for n in sorted(differ)
    )
    return Used(path, golden, options, told, strict)


def _target(golden: Golden, target: str) -> str:
    """The target without its devices. Raises OptionError where the file is for others."""
    name, colon, number = target.partition(":")
    if colon and number != str(golden.devices):
        what = f"--target {target}: the golden configuration is for {golden.devices} devices"
        raise OptionError(what, hint=f"sitsc golden MODEL --target {target} makes another")
    return name


def check_files(files: Collection[Path], model: str) -> list[dict[str, Any]]:
    """What each file is today: "stale" holds the reasons, `compared` whether its plan was made.

    Where it was not, `not_compared` says why.
    `model` is a preset or a path ("": that of the file where it is a preset). Raises SitscError.
    """
    found = []
    for path in files:
        golden = read_file(path)
        held, missing = _held(golden, model)
        found.append(
            {
                "file": str(path),
                "stale": list(stale_reasons(golden, held)),
                "compared": not missing,
                "not_compared": missing,
                "status": golden.status,
                "expires": golden.expires.isoformat(),
            }
        )
    return found


def _held(golden: Golden, model: str) -> tuple[Now, str]:
    """What is true today, and why model and plan are not part of it ("" where they are).

    A machine that only runs artifacts lacks what planning needs. Raises SitscError.
    """
    from sitsc.golden_data import data_digests  # noqa: PLC0415

    today, devices = date.today(), golden.devices
    missing = "--model names it"
    if name := model or (golden.model.name if golden.model.preset else ""):
        try:
            return _planned(golden, name, today), ""
        except ModuleNotFoundError as error:
            if (error.name or "sitsc").partition(".")[0] == "sitsc":
                raise
            missing = f"the package {error.name} is not installed"
        if model:
            hint = "check it where models are compiled, or leave out --model"
            raise OptionError(f"--model {model}: {missing}", hint=hint)
    return Now(today, data=data_digests(golden.target, devices)), missing


def _planned(golden: Golden, model: str, today: date) -> Now:
    """With the plan that is made of a model today."""
    from sitsc.commands.tune import model_folder  # noqa: PLC0415
    from sitsc.golden_pipeline import now  # noqa: PLC0415  (imports torch: a second)

    with model_folder(model) as folder:
        return now(folder, golden.compile_options(), golden.devices, today, plan=True)
