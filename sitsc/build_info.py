"""What builds an artifact: versions of the tools, and a digest of our own source."""

import platform
from functools import cache
from importlib import metadata, resources

from sitsc import __version__
from sitsc.codegen import cxx
from sitsc.core.canonical import sha256_hex

_TOOLS = ("torch", "transformers", "jinja2", "gguf")
_SOURCES = (".py", ".j2", ".json", ".toml")


@cache
def versions() -> dict[str, str]:
    """Versions of everything that decides what code is generated."""
    return tools() | {"machine": platform.machine(), "c++": cxx.compiler_version()}


@cache
def tools() -> dict[str, str]:
    """Versions of everything that decides what a graph is."""
    found = {"sitsc": __version__}
    for name in _TOOLS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def bytes_digest(data: bytes) -> str:
    """SHA-256 of bytes."""
    return sha256_hex(data)


@cache
def source_digest() -> str:
    """SHA-256 over every source and data file of the compiler: a change of it compiles anew."""
    parts: list[str] = []
    stack = [("", resources.files("sitsc"))]
    while stack:
        prefix, folder = stack.pop()
        for item in folder.iterdir():
            if item.is_dir() and not item.name.startswith(("_", ".")):
                stack.append((f"{prefix}{item.name}/", item))
            elif item.name.endswith(_SOURCES):
                parts.append(f"{prefix}{item.name} {sha256_hex(item.read_bytes())}")
    return sha256_hex("\n".join(sorted(parts)).encode())
