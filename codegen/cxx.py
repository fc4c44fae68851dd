"""Calling the C++ compiler: sources as text in, one shared library out, complete or not at all."""

import os
import subprocess
import tempfile
from pathlib import Path

from sitsc.core.errors import CompileError

OUTPUT = "library.so"


def compiler() -> str:
    """The compiler command: `CXX`, else g++."""
    return os.environ.get("CXX") or "g++"


def run_compiler(arguments: list[str], folder: str) -> str:
    """Run the compiler in `folder`; its output. Raises CompileError with the first error line."""
    name = compiler()
    try:
        done = subprocess.run(
            [*name.split(), *arguments], cwd=folder, capture_output=True, text=True, check=False
        )
    except OSError as error:
        hint = "install g++ or set CXX"
        raise CompileError(f"cannot run the C++ compiler {name}: {error}", hint=hint) from None
    if done.returncode == 0:
        return done.stdout
    lines = (done.stderr or done.stdout).splitlines() or ["no message"]
    first = next((line for line in lines if "error" in line), lines[-1])
    raise CompileError(f"{name} failed: {first}", hint="g++ 11 or newer is needed")


def compile_cpp(sources: dict[str, str], commands: list[list[str]], out_path: Path) -> None:
    """Write `sources` to a folder of their own, run `commands` there, move OUTPUT to `out_path`."""
    out_path = Path(out_path).absolute()
    with tempfile.TemporaryDirectory(dir=out_path.parent, prefix=".cxx_") as folder:
        for name, text in sources.items():
            Path(folder, name).write_text(text)
        for command in commands:
            run_compiler(command, folder)
        os.replace(Path(folder, OUTPUT), out_path)


def compiler_version() -> str:
    """One line that names the compiler and its version."""
    return run_compiler(["--version"], os.getcwd()).splitlines()[0]
