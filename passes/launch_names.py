"""What computes each operator of a bucket on a GPU, in words: its launches, or another operator.

In: the final graph, launches with what each is for. Out: for every kind of call the templates and
library functions that are launched for it ("skinny_ahead + attention_reduce"), or inside of which
other operator's launches it is computed.
"""

from collections import deque
from collections.abc import Container, Sequence

from torch import fx

from sitsc.core.plan import Launch, LaunchGroup, LayerClass
from sitsc.passes.cuda_elementwise import constant
from sitsc.passes.cuda_values import is_selection
from sitsc.passes.fxutil import is_op
from sitsc.passes.launch_time import Work
from sitsc.passes.schedule import RowKey, row_key

NOTHING = "no launch"  # all rows of a decode step need logits; a value that nothing reads


def computed_by(
    graph: fx.Graph,
    groups: Sequence[LaunchGroup],
    works: Sequence[Work],
    classes: tuple[LayerClass, ...],
) -> dict[RowKey, str]:
    """The words for each row of calls; `works` are those of all launches, in order.

    Layers that repeat have the launches of their first one: rows are asked, and not nodes.
    """
    launched: dict[RowKey, dict[str, None]] = {}
    launches = (launch for group in groups for launch in group.launches)
    for launch, work in zip(launches, works, strict=True):
        launched.setdefault(row_key(work.node, classes), {})[_name(launch)] = None
    found = {key: " + ".join(names) for key, names in launched.items()}
    for node in graph.nodes:
        if node.op == "call_function" and (key := row_key(node, classes)) not in found:
            carrier = _carrier(node, launched, classes)
            found[key] = NOTHING if carrier is None else _inside(key, row_key(carrier, classes))
    return found


def _name(launch: Launch) -> str:
    return f"library {launch.kernel}" if launch.kind == "library" else launch.template


def _inside(key: RowKey, carrier: RowKey) -> str:
    return f"inside of {carrier.op if carrier.name == key.name else carrier.name}"


def _carrier(
    node: fx.Node, launched: Container[RowKey], classes: tuple[LayerClass, ...]
) -> fx.Node | None:
    """The call in whose launches another is computed."""
    if is_selection(node):
        return None
    return _scaled(node) or _reader(node, launched, classes)


def _scaled(node: fx.Node) -> fx.Node | None:
    """The embedding whose kernel multiplies by the constant of this call."""
    if not is_op(node, "mul") or all(constant(arg) is None for arg in node.args):
        return None
    return next((arg for arg in node.all_input_nodes if is_op(arg, "packed_embedding")), None)


def _reader(
    node: fx.Node, launched: Container[RowKey], classes: tuple[LayerClass, ...]
) -> fx.Node | None:
    """The nearest reader of a value, directly or through others, that something is launched for."""
    seen, waiting = {node}, deque(node.users)
    while waiting:
        user = waiting.popleft()
        if row_key(user, classes) in launched:
            return user
        if user not in seen:
            seen.add(user)
            waiting.extend(user.users)
    return None
