"""What torch.export says about a module, told in one line: what, where in the module, a hint."""

import re

from sitsc.core.errors import UnsupportedModelError

_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')
_KINDS = (
    (
        ("data-dependent", "GuardOnDataDependent", "unbacked", "Could not guard", "Eq(u0"),
        "control flow or a shape depends on the values of a tensor",
        "write it with torch.where or masks, or fix the value outside of the module",
    ),
    (
        ("Dim.AUTO", "specialized", "onstraints violated", "Suggested fixes"),
        "a size that was declared free is not",
        "give examples with sizes of at least 2, or bound the Dim as the message says",
    ),
    (
        ("register_pytree", "pytree"),
        "inputs or outputs are of a type that cannot be taken apart",
        "use tensors, tuples and dictionaries",
    ),
)


def export_error(error: Exception, name: str) -> UnsupportedModelError:
    """The error for a user; the cause stays attached."""
    text = str(error).strip()
    kind = type(error).__name__
    first = " ".join((text.splitlines() or [kind])[0].split())[:200]
    for words, what, hint in _KINDS:
        if any(word in text or word in kind for word in words):
            detail = first if what.startswith("a size") else ""
            detail = _suggestion(text) or detail
            return UnsupportedModelError(
                f"{name} cannot be traced: {what}{f' ({detail})' if detail else ''}",
                where=_place(error),
                hint=hint,
            )
    return UnsupportedModelError(
        f"{name} cannot be traced: {kind}: {first}",
        where=_place(error),
        hint="does module(*example_inputs) run?",
    )


def _suggestion(text: str) -> str:
    """What torch.export suggests for sizes, in one line."""
    _, found, rest = text.partition("Suggested fixes:")
    return " ".join(rest.split("\n\n")[0].split())[:160] if found else ""


def _place(error: Exception) -> str:
    """The file and line of the user's code that failed: the last frame outside of torch."""
    places = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    places += [(f, int(line), n) for f, line, n in _LINE.findall(str(error))]
    ours = [p for p in places if not any(x in p[0] for x in ("/torch/", "/sitsc/", "<", "codegen"))]
    users = [p for p in ours if p[2] not in ("compile", "export", "<module>")]
    if not users:
        return ""
    file, line, function = users[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line} in {function}"
