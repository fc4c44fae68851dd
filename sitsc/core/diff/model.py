"""What is compiled: dimensions, tokens, how weights are stored.

In: two plans. Out: changes of the section "model"; and whether two plans are of one model at all.
"""

from collections.abc import Iterator

from sitsc.core.diff.change import Change
from sitsc.core.diff.view import listed, plain_name, programs
from sitsc.core.plan import PLAIN, Plan

_TOKENS = ("vocab_size", "logits_width", "bos_token_id", "add_bos", "eos_token_ids")
# Of two models that differ in one of these, layers cannot be held against each other.
SHAPE = ("num_hidden_layers", "hidden_size", "intermediate_size", "moe_intermediate_size")
SHAPE += ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
SHAPE += ("num_experts", "num_local_experts", "num_experts_per_tok")


def other_model(a: Plan, b: Plan) -> str:
    """Why these are plans of different models, or nothing."""
    if a.kind != b.kind:
        return f"A is a {a.kind} plan, B a {b.kind} plan"
    if a.model.architecture != b.model.architecture:
        return f"A is {a.model.architecture}, B {b.model.architecture}"
    mine, theirs = a.model.dimensions, b.model.dimensions
    names = [name for name in SHAPE if mine.get(name) != theirs.get(name)]
    what = (f"{n} {mine.get(n, 'none')} and {theirs.get(n, 'none')}" for n in names)
    return f"A and B have {listed(what)}" if names else ""


def model(a: Plan, b: Plan) -> Iterator[Change]:
    """Dimensions, tokens, storage of weights."""
    if a.model.model_type != b.model.model_type:
        yield Change("model", "model type", "", a.model.model_type, b.model.model_type)
    mine, theirs = a.model.dimensions, b.model.dimensions
    for name in sorted(set(mine) | set(theirs)):
        before, after = (str(of.get(name, "none")) for of in (mine, theirs))
        if before != after:
            yield Change("model", name, "", before, after)
    for name in _TOKENS:
        before, after = getattr(a.tokens, name), getattr(b.tokens, name)
        if before != after:
            yield Change("model", name.replace("_", " "), "", str(before), str(after))
    yield from _weights(a, b)


def _weights(a: Plan, b: Plan) -> Iterator[Change]:
    """How each tensor of the checkpoint is stored, whatever buffer it is part of."""
    mine, theirs = _stored(a), _stored(b)
    found: dict[tuple[str, str, str], list[str]] = {}
    for name in sorted(set(mine) | set(theirs)):
        before, after = mine.get(name, ""), theirs.get(name, "")
        if before == after:
            continue
        constant = " =" in before and " =" in after
        title = "values of constant" if constant else "weights"
        before, after = (text.partition(" =")[0] or "none" for text in (before, after))
        found.setdefault((title, before, after), []).append(name)
    for (title, before, after), names in found.items():
        yield Change("model", title, listed(names), before, after if before != after else "others")


def _stored(plan: Plan) -> dict[str, str]:
    """Storage by tensor; of layers that are alike once, of a plain plan with the shape."""
    plain = plan.kind == PLAIN
    found: dict[str, set[str]] = {}
    for spec in (spec for program in programs(plan) for spec in program.parameters):
        shape = " " + "×".join(map(str, spec.shape)) if plain else ""
        how = f"{spec.dtype} {spec.format}{shape}"
        names = [source.tensor for source in spec.sources if not source.zeros]
        if spec.role == "constant":
            names, how = [spec.name], f"{how} ={spec.data}"
        how += " and scales" if spec.role == "scale" else ""
        for name in names:
            found.setdefault(name if plain else plain_name(name), set()).add(how)
    return {name: ", ".join(sorted(ways)) for name, ways in found.items()}
