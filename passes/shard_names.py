"""Names of operators by what they do to a cut value, and sizes with 1 for each free one."""

import torch

from sitsc.passes.fxutil import Node

LINEAR = ("linear", "addmm")
VIEWS = ("reshape", "view", "transpose", "permute", "select", "slice", "unsqueeze", "squeeze")
VIEWS += ("expand", "index", "flatten", "t", "clone", "contiguous", "alias")
COMPLEX = ("view_as_complex", "view_as_real")
SPLITS = ("split", "split_with_sizes", "chunk")
UNARY = ("silu", "gelu", "relu", "tanh", "sigmoid", "neg", "pow", "square", "exp", "log", "sqrt")
UNARY += ("rsqrt", "reciprocal", "abs", "erf", "floor", "cos", "sin", "_to_copy", "to", "clamp")
UNARY += ("softplus", "hardtanh", "leaky_relu", "elu", "bitwise_not", "logical_not", "clamp_min")
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "where", "masked_fill", "eq", "ne")
BINARY += ("lt", "le", "gt", "ge")
ELEMENTWISE = (*UNARY, *BINARY)


def sizes_of(node: Node) -> tuple[int, ...]:
    """The shape of a value with 1 for each free size."""
    value = node.meta["val"]
    return tuple(1 if isinstance(size, torch.SymInt) else int(size) for size in value.shape)
