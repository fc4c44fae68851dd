"""The C shims by which AOTInductor packages call the CPU kernels without passing the dispatcher.

In: the schemas of our operators. Out: their C declarations, the rendered source, and the library,
compiled against torch's stable C interface. The library needs the kernels loaded before it.
"""

from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

import sitsc.core.ops  # noqa: F401  (registers the operators)
from sitsc.codegen import cpu_kernels, cxx

SHIMMED = ("fused_linear", "packed_embedding", "rms_norm", "layer_norm", "paged_attention")
SHIMMED += ("keep", "moe")
_TYPES = {
    "Tensor": "AtenTensorHandle",
    "Optional[Tensor]": "AtenTensorHandle*",
    "int": "int64_t",
    "float": "double",
    "str": "const char*",
}


def overload(name: str) -> Any:
    """The operator sitsc::name."""
    return getattr(torch.ops.sitsc, name).default


def declaration(name: str) -> str:
    """The C declaration of an operator's shim, derived from its schema."""
    schema = overload(name)._schema
    arguments = [f"{_TYPES[str(a.type)]} {a.name}" for a in schema.arguments]
    return f"AOTITorchError aoti_torch_cpu_{name}({', '.join(arguments)}, AtenTensorHandle* ret0)"


def declarations() -> dict[Any, list[str]]:
    """What AOTInductor needs to know: operator to C declaration."""
    return {overload(name): [declaration(name)] for name in SHIMMED}


def render() -> dict[str, str]:
    """The source of the shims, and the header of the kernels that it includes."""
    environment = Environment(
        loader=PackageLoader("sitsc.codegen", "templates"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    template = environment.get_template("cpu_shims.cpp.j2")
    text = template.render(declarations={name: declaration(name) for name in SHIMMED})
    header = cpu_kernels.render(cpu_kernels.KernelSpec())["cpu_abi.h"]
    return {"cpu_shims.cpp": text, "cpu_abi.h": header}


def torch_paths() -> tuple[Path, Path]:
    """Folders of torch's headers and of its libraries."""
    root = Path(torch.__file__).parent
    return root / "include", root / "lib"


def compile_shims(out_path: Path) -> None:
    """Compile the shims to the shared library `out_path`. Raises CompileError."""
    include, libraries = torch_paths()
    flags = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-shared", f"-I{include}"]
    link = [f"-L{libraries}", "-ltorch_cpu", "-lc10", "-Wl,--build-id=none", "-Wl,-s"]
    cxx.compile_cpp(render(), [[*flags, "cpu_shims.cpp", "-o", cxx.OUTPUT, *link]], out_path)
