"""What a kernel's PTX touches before its dependency wait: memory accesses by kernel argument.

A kernel launched early may read only what no earlier kernel of the step writes. Triton's pipeliner
moves loads, so the order is read from the machine text and not believed from the template.
"""

import re
from collections import Counter
from dataclasses import dataclass

_LABEL = re.compile(r"(\$L__BB\w+):")
_BRANCH = re.compile(r"(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$L__BB\w+);")
_PARAMETER = re.compile(r"ld\.param\S*\s+(%\w+),\s*\[\w+_param_(\d+)\]")
_SYMBOL = re.compile(r"mov\.b64\s+(%\w+), (\w+);")
_REGISTER = re.compile(r"%\w+")
_ACCESS = re.compile(
    r"(ld\.global|cp\.async\.c[ag]|cp\.async\.bulk\.prefetch|st\.global|atom\.|(?<![a-z.])red\.)"
)
_WAIT = "griddepcontrol.wait"


@dataclass(frozen=True)
class Order:
    """Accesses (kind, argument) before and after the wait, with how often each stands there."""

    waits: int
    before: Counter[tuple[str, str]]
    after: Counter[tuple[str, str]]


def read_order(ptx: str, arguments: list[str]) -> Order:
    """Before: all that can run ahead of the wait when a loop takes it in its first round."""
    blocks, successors = _blocks(ptx)
    waiting = [name for name, lines in blocks.items() if any(_WAIT in line for line in lines)]
    early: list[str] = []
    if waiting:
        ahead = _ancestors(waiting[0], successors)
        lines = blocks[waiting[0]]
        first = next(i for i, line in enumerate(lines) if _WAIT in line)
        early = [line for name in blocks if name in ahead for line in blocks[name]] + lines[:first]
    everything = [line for lines in blocks.values() for line in lines]
    origins = _origins(everything, arguments)
    before = _accesses(early, origins)
    return Order(len(waiting), before, _accesses(everything, origins) - before)


def _blocks(ptx: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Basic blocks in the order of the text, and which may follow which."""
    body = ptx[ptx.index(".entry") :]
    name, blocks, successors = "entry", {"entry": []}, {"entry": []}
    falls = True

    def begin(new: str) -> None:
        nonlocal name
        if falls:
            successors[name].append(new)
        name = new
        blocks.setdefault(new, [])
        successors.setdefault(new, [])

    for line in (line.strip() for line in body[body.index("{") + 1 :].splitlines()):
        label, branch = _LABEL.match(line), _BRANCH.match(line)
        if label:
            begin(label[1])
            falls = True
        elif branch:
            blocks[name].append(line)
            successors[name].append(branch[2])
            falls = bool(branch[1])
            begin(f"{name}+")
            falls = True
        elif line and not line.startswith((".", "//")):
            blocks[name].append(line)
            falls = not line.startswith(("ret", "exit"))
    return blocks, successors


def _ancestors(target: str, successors: dict[str, list[str]]) -> set[str]:
    """Blocks on some way from the entry to `target` that takes no back edge."""
    state: dict[str, int] = {}
    before: dict[str, list[str]] = {}
    stack = [("entry", iter(successors["entry"]))]
    state["entry"] = 1
    while stack:
        name, rest = stack[-1]
        following = next(rest, None)
        if following is None:
            state[name] = 2
            stack.pop()
        elif state.get(following) != 1:
            before.setdefault(following, []).append(name)
            if following not in state:
                state[following] = 1
                stack.append((following, iter(successors[following])))
    found: set[str] = set()
    todo = [target]
    while todo:
        for name in before.get(todo.pop(), []):
            if name not in found:
                found.add(name)
                todo.append(name)
    return found


def _origins(lines: list[str], arguments: list[str]) -> dict[str, set[str]]:
    """For each register, the pointer arguments that its value is computed from.

    Pointers that pass through shared memory may be any of those that were stored there.
    """
    origins: dict[str, set[str]] = {}
    before = -1
    while before != sum(map(len, origins.values())):
        before = sum(map(len, origins.values()))
        for line in lines:
            parameter, symbol = _PARAMETER.match(line), _SYMBOL.match(line)
            if symbol:  # a table of constants in the kernel's own module
                origins.setdefault(symbol[1], set()).add(symbol[2])
            if parameter:
                index = int(parameter[2])
                if index < len(arguments) and arguments[index].endswith("_ptr"):
                    origins.setdefault(parameter[1], set()).add(arguments[index])
                continue
            targets, sources = _flow(re.sub(r"^@!?%\w+\s+", "", line))
            found = set().union(*(origins.get(name, set()) for name in sources))
            for target in targets:
                origins.setdefault(target, set()).update(found)
    return origins


def _flow(line: str) -> tuple[list[str], list[str]]:
    """Registers that a line writes and those whose values go into them; "shared" is memory."""
    registers = _REGISTER.findall(line)
    if line.startswith("st.shared"):
        return ["shared"], _REGISTER.findall(line.split("]")[-1])
    if line.startswith("ld.shared"):
        return _REGISTER.findall(line.split("[")[0]), ["shared"]
    if _ACCESS.search(line) or line.startswith(("ld.", "st.", "bra", "ret")):
        return [], []
    first = re.match(r"\S+\s+\{([^}]*)\}", line)
    targets = _REGISTER.findall(first[1]) if first else registers[:1]
    return targets, registers[len(targets) :]


def _accesses(lines: list[str], origins: dict[str, set[str]]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for line in lines:
        kind, places = _ACCESS.search(line), re.findall(r"\[\s*(%\w+)", line)
        if not kind or not places or "shared" in line.split("[")[0].replace("shared.global", ""):
            continue
        address = places[-1] if kind[0].startswith("cp.async.c") else places[0]
        names = origins.get(address, set())
        assert names, f"no argument is known for: {line}"
        found.update((kind[0], name) for name in names)
    return found
