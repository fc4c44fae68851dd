"""What no matcher knew: norms, rotations and activations that run as operators of aten.

In: a node of the final graph. Out: its kind, for the plan to tell. Such a layer is computed
rightly, but slower than by a kernel.
"""

from sitsc.passes.fxutil import Node, is_op, layer_of, tensor

_NORMS = ("layer_norm", "native_layer_norm", "rms_norm", "group_norm")
_OF_NORMS = ("rsqrt", "var", "var_mean", "linalg_vector_norm")  # in a layer; elsewhere anything
_ACTIVATIONS = ("silu", "gelu", "relu", "erf", "sigmoid", "tanh", "mish", "softplus", "elu")
_ACTIVATIONS += ("hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "celu", "selu")


def unmatched_kind(node: Node) -> str | None:
    """ "norm", "rope", "activation" or "linear" where a call of aten stands for one, else None."""
    if not _is_aten(node):
        return None
    if is_op(node, *_NORMS):
        return "norm"
    if layer_of(node) is None:
        return None
    if is_op(node, *_OF_NORMS):
        return "norm"
    if is_op(node, *_ACTIVATIONS):
        return "activation"
    if is_op(node, "linear", "addmm", "mm", "matmul", "bmm"):
        return "linear"
    return "rope" if is_op(node, "neg", "sub", "stack") and _over_heads(node) else None


def _is_aten(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == "aten"


def _over_heads(node: Node) -> bool:
    """Whether a call works on [1, heads, tokens, dim] and reads what depends on positions."""
    value = node.meta.get("val")
    four = getattr(value, "dim", lambda: 0)() == 4
    return four and tensor(node).shape[-1] != 1
