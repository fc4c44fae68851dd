"""A step as whole numbers, for ranks in other processes: what the scheduler's process sends.

In: a `StepBatch`. Out: a list of integers, and the same step back from it. Options of sampling and
text stay where the scheduler is.
"""

from collections.abc import Iterator, Sequence

from sitsc.core.errors import ExecutionError
from sitsc.core.serving.batch import StepBatch

STOP = -1
_FORM = 1  # of the message, so that ranks of other builds are told apart
_FIXED = 5


def encode(batch: StepBatch) -> list[int]:
    """[form, decode?, sequences, tokens, pages in all, then the lists one after another]."""
    tables = batch.block_tables
    fixed = [_FORM, int(batch.regime == "decode"), batch.num_seqs, batch.num_tokens]
    found = [*fixed, sum(len(table) for table in tables)]
    found += [*batch.request_ids, *batch.token_ids, *batch.query_start, *batch.context_lens]
    found += [int(wanted) for wanted in batch.sample]
    found += [len(table) for table in tables]
    for table in tables:
        found += table
    return found


def decode(numbers: Sequence[int]) -> StepBatch:
    """The step of a message. Raises ExecutionError for anything else."""
    if len(numbers) < _FIXED or numbers[0] != _FORM:
        raise ExecutionError("a rank sent no step that this one knows", hint="start all anew")
    _, decoding, sequences, tokens, pages = numbers[:_FIXED]
    length = _FIXED + 5 * sequences + 1 + tokens + pages
    counts = numbers[len(numbers) - pages - sequences :][:sequences]
    whole = min(sequences, tokens, pages, *counts, 0) == 0 and sum(counts) == pages
    if len(numbers) != length or not whole:
        raise ExecutionError("a step came in another length than it says", hint="start all anew")
    left = iter(numbers[_FIXED:])
    ids, token_ids = tuple(_take(left, sequences)), _take(left, tokens)
    starts, contexts = _take(left, sequences + 1), _take(left, sequences)
    sample = [bool(wanted) for wanted in _take(left, sequences)]
    tables = [_take(left, count) for count in _take(left, sequences)]
    regime = "decode" if decoding else "prefill"
    return StepBatch(regime, ids, token_ids, starts, contexts, tables, sample)


def _take(left: Iterator[int], count: int) -> list[int]:
    return [next(left) for _ in range(count)]
