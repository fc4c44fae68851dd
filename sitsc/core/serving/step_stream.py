"""Steps one after another as whole numbers: one that repeats the last is a short message.

In: each `StepBatch` in turn. Out: a message for it, and on the other side the same step again. In a
decode step of the same requests only token ids and new pages are told; lengths have grown by one.
"""

from collections.abc import Sequence

from sitsc.core.errors import ExecutionError
from sitsc.core.serving.batch import StepBatch
from sitsc.core.serving.wire import decode, encode

_SAME = -2  # the first number of the short form: token ids, then (row, page) for each new page


class StepWriter:
    """Writes messages; remembers how many pages each row of the last step had."""

    def __init__(self) -> None:
        self._ids: tuple[int, ...] = ()
        self._lens: list[int] = []
        self._pages: list[int] = []

    def message(self, batch: StepBatch) -> list[int]:
        """The message of the next step."""
        found = self._short(batch) if self._follows(batch) else encode(batch)
        self._ids = batch.request_ids if batch.regime == "decode" else ()
        self._lens = batch.context_lens
        self._pages = [len(table) for table in batch.block_tables]
        return found

    def _follows(self, batch: StepBatch) -> bool:
        if batch.regime != "decode" or batch.request_ids != self._ids:
            return False
        pairs = zip(batch.context_lens, self._lens, strict=True)
        return all(new == old + 1 for new, old in pairs)

    def _short(self, batch: StepBatch) -> list[int]:
        found = [_SAME, len(batch.token_ids), *batch.token_ids]
        for row, (table, known) in enumerate(zip(batch.block_tables, self._pages, strict=True)):
            for page in table[known:]:
                found += (row, page)
        return found


class StepReader:
    """Reads the messages of one writer, in their order."""

    def __init__(self) -> None:
        self._last: StepBatch | None = None

    def step(self, numbers: Sequence[int]) -> StepBatch:
        """The next step. Raises ExecutionError for a message that does not follow."""
        if numbers and numbers[0] == _SAME:
            self._last = self._grown(numbers)
        else:
            self._last = decode(numbers)
        return self._last

    def _grown(self, numbers: Sequence[int]) -> StepBatch:
        last = self._last
        if last is None or len(numbers) < 2 or numbers[1] != last.num_seqs:
            raise ExecutionError("a rank sent a step that does not follow", hint="start all anew")
        count = numbers[1]
        pages = numbers[2 + count :]
        if len(numbers) < 2 + count or len(pages) % 2:
            what = "a step came in another length than it says"
            raise ExecutionError(what, hint="start all anew")
        for row, page in zip(pages[::2], pages[1::2], strict=True):
            if not 0 <= row < count:
                raise ExecutionError(f"a step has no row {row}", hint="start all anew")
            last.block_tables[row].append(page)
        return StepBatch(
            "decode",
            last.request_ids,
            list(numbers[2 : 2 + count]),
            last.query_start,
            [length + 1 for length in last.context_lens],
            last.block_tables,
            last.sample,
        )
