"""Cases of the prefill attention for sm_90, which only a GPU can run: see kernel_cases.py."""

from sitsc.codegen.cuda_attention import Heads
from sitsc.codegen.cuda_attention_hopper import tile
from tests.attention_checks import RaggedCheck

# (old, new) tokens: whole and broken tiles, blocks and pages, single tokens, nothing at all.
RAGGED = ((0, 1), (63, 1), (0, 700), (64, 1), (127, 2), (128, 128), (5, 33), (8191, 1), (1000, 300))
EDGES = ((0, 127), (0, 128), (0, 129), (0, 0), (1, 63), (31, 32), (32, 64), (0, 64), (0, 65))
HEADS = {
    "8b": Heads(32, 8, 128, 64, 128**-0.5),
    "1b": Heads(32, 8, 64, 64, 64**-0.5),
    "pages of 16": Heads(32, 8, 128, 16, 128**-0.5),
    "pages of 32": Heads(8, 8, 128, 32, 128**-0.5),
    "groups of 7": Heads(28, 4, 128, 64, 128**-0.5),
    "groups of 12": Heads(24, 2, 64, 64, 0.1, rope="none"),
    "one head": Heads(1, 1, 128, 64, 0.1),
    "window": Heads(32, 8, 128, 64, 128**-0.5, window=200),
    "narrow window": Heads(8, 2, 128, 64, 128**-0.5, window=17),
    "cap": Heads(16, 8, 128, 64, 128**-0.5, softcap=30.0),
    "sinks": Heads(64, 8, 64, 64, 1 / 8, window=128, sinks=True),
    "head dim 256": Heads(8, 4, 256, 64, 1 / 16),
    "head dim 256, window and cap": Heads(16, 8, 256, 64, 1 / 16, window=1024, softcap=50.0),
}


def hopper_checks() -> dict[str, RaggedCheck]:
    """Every check by name."""
    found: dict[str, RaggedCheck] = {}
    name = "attention_prefill_hopper"
    for label, op in HEADS.items():
        for case, sequences, programs in (("ragged", RAGGED, 132), ("edges", EDGES, 7)):
            found[f"hopper {label}, {case}"] = RaggedCheck(
                op, sequences, tile(op), padding=3, template=name, programs=programs
            )
    own = {"in_place": False, "max_sequences": 16, "template": name}
    found["hopper, rows of q alone"] = RaggedCheck(HEADS["8b"], RAGGED, tile(HEADS["8b"]), **own)
    many = tuple((97 * i % 1500, 1) for i in range(200)) + ((0, 513),)
    found["hopper, many sequences"] = RaggedCheck(
        HEADS["8b"], many, tile(HEADS["8b"]), template=name, programs=132
    )
    three = {"block_n": 64, "stages": 3, "queries": 1}
    found["hopper, other tile"] = RaggedCheck(HEADS["window"], RAGGED, three, template=name)
    return found
