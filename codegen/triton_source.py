"""Triton kernels as text: templates rendered to modules, one kernel instance as data.

In: a template of codegen/templates and its parameters. Out: checked text, a `KernelSource` whose
key names everything that decides the machine code, and the imported module. Compiles nothing.
"""

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, TemplateError

from sitsc.core import env
from sitsc.core.errors import CacheError, CompileError


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One kernel instance, ready to compile.

    `arguments` are the run-time arguments in order, (name, type) with types like "*bf16", "*i32",
    "i32", "fp32"; `constants` the compile-time ones; `aligned` names the arguments (pointers and
    sizes) divisible by 16. `pdl` launches it while the kernel before it on the stream still runs.
    `registers` is how many a thread may have; 0 leaves that to the assembler; where it
    would spill a few rather than have less threads at once, as many as there are.
    """

    name: str
    template: str
    text: str
    arguments: tuple[tuple[str, str], ...]
    constants: dict[str, int | float | str | bool]
    aligned: tuple[str, ...]
    num_warps: int
    num_stages: int
    pdl: bool
    cooperative: bool = False
    registers: int = 0

    def key(self) -> str:
        """SHA-256 (hex) over every field: one key, one kernel per architecture and compiler."""
        fields = {name: value for name, value in asdict(self).items() if name != "registers"}
        fields |= {"registers": self.registers} if self.registers else {}
        text = json.dumps(fields, sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.key())


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("sitsc.codegen", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(template_file: str, **parameters: Any) -> str:
    """The module text of a template such as "cuda_gemv.py.j2", checked to be valid Python.

    Raises CompileError for a missing template or parameter and for text that is not Python.
    """
    try:
        text = _environment().get_template(template_file).render(**parameters)
        compile(text, template_file, "exec")
    except TemplateError as error:
        raise CompileError(
            f"{type(error).__name__}: {error}", where=template_file, hint="check its parameters"
        ) from error
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise CompileError(
            f"rendered text is not Python: {error.msg} in line {error.lineno}: {line}",
            where=template_file,
            hint="check the template",
        ) from error
    return text.strip("\n") + "\n"


def import_text(text: str) -> ModuleType:
    """The module with this text, imported once a process from a file named by its content.

    Triton reads the source of a kernel from its file. Raises CacheError when none can be written.
    """
    name = "sitsc_kernel_" + hashlib.sha256(text.encode()).hexdigest()[:24]
    if name in sys.modules:
        return sys.modules[name]
    path = _module_file(name, text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module_file(name: str, text: str) -> Path:
    """Write the text to the cache folder, whole or not at all; a file already there is checked."""
    folder = env.cache_dir() / "rendered"
    path = folder / f"{name}.py"
    try:
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return path
        folder.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=folder, suffix=".partial")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CacheError(
            f"cannot write rendered kernels to {folder}: {reason}",
            hint="set SITSC_CACHE to a folder with room",
        ) from error
    return path
