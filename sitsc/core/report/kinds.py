"""Kinds of work, by which a report colours operators and launches.

In: an operator's name, or a launch. Out: one of `KINDS`. Knows names of operators and templates,
no model and no target.
"""

from sitsc.core.plan import Launch

LINEAR, ATTENTION, EXPERTS = "linear", "attention", "experts"
RANKS, NORM, GATHER, SAMPLE = "between ranks", "elementwise", "gather", "sampling"
PACKAGE = "package"
KINDS: tuple[str, ...] = (LINEAR, ATTENTION, EXPERTS, RANKS, NORM, GATHER, SAMPLE, PACKAGE)

# By how names begin, the first that fits; elementwise is what no other kind takes.
_TEMPLATES = {
    **{"gemv": LINEAR, "skinny": LINEAR, "wide": LINEAR},
    **{"attention": ATTENTION, "kv_write": ATTENTION, "moe_": EXPERTS},
    **{"all_": RANKS, "send": RANKS, "receive": RANKS, "share_ids": RANKS},
    **{"gather": GATHER, "sample_": SAMPLE, "advance": SAMPLE, "place": SAMPLE},
}
_OPERATORS = {
    **{"fused_linear": LINEAR, "linear": LINEAR, "addmm": LINEAR, "mm": LINEAR, "bmm": LINEAR},
    **{"convolution": LINEAR, "paged_attention": ATTENTION, "attention": ATTENTION},
    **{"scaled_dot_product": ATTENTION, "_scaled_dot_product": ATTENTION},
    **{"moe": EXPERTS, "experts": EXPERTS, "all_reduce": RANKS, "all_gather": RANKS},
    **{"send": RANKS, "receive": RANKS, "packed_embedding": GATHER, "embedding": GATHER},
}
_FROM_LIBRARIES = "library"


def kind_of_launch(launch: Launch) -> str:
    """The kind of what is launched; library calls are products of matrices."""
    if launch.kind == PACKAGE:
        return PACKAGE
    return kind_of_class(launch.template or launch.kind)


def kind_of_class(name: str) -> str:
    """The kind of a kernel class: a template, "library" or a package."""
    if name == _FROM_LIBRARIES:
        return LINEAR
    if name == "aotinductor":
        return PACKAGE
    return next((kind for begin, kind in _TEMPLATES.items() if name.startswith(begin)), NORM)


def kind_of_operator(op: str) -> str:
    """The kind of an operator: "sitsc.fused_linear", "aten.cat"."""
    name = op.split(".")[1] if "." in op else op
    return next((kind for begin, kind in _OPERATORS.items() if name.startswith(begin)), NORM)
