"""The KV page pool: which page belongs to which sequence. Counts pages, never touches memory.

A sequence owns pages for its tokens in order; its table is the list the kernels index. Every page
has an owner count (0 free, 1 owned), so that sharing prefixes later needs no new structure.
"""

from dataclasses import dataclass, field

from sitsc.core.errors import OptionError, OutOfPagesError, PageAccountingError


@dataclass(slots=True)
class _Sequence:
    table: list[int] = field(default_factory=list)
    num_tokens: int = 0


class PagePool:
    """`num_pages` pages of `page_tokens` tokens; each operation costs O(1) a page moved.

    Page 0 goes out first; a pool of any size begins with nothing.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_tokens", page_tokens)):
            if value < 1:
                raise OptionError(f"{name}={value} is not allowed", hint=f"{name} must be ≥ 1")
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self._owners: list[int] = []  # of the pages that were ever given out, from page 0 on
        self._free: list[int] = []  # those of them that came back; a stack
        self._sequences: dict[int, _Sequence] = {}

    @property
    def num_free(self) -> int:
        """Pages that no sequence owns."""
        return self.num_pages - len(self._owners) + len(self._free)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the whole pool can hold for one sequence."""
        return self.num_pages * self.page_tokens

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one sequence occupy."""
        return -(-num_tokens // self.page_tokens)

    def allocate(self, sequence_id: int, num_tokens: int = 0) -> list[int]:
        """Begin a sequence with room for `num_tokens`; its live table.

        Raises `OutOfPagesError` (and keeps nothing), `PageAccountingError` on a second begin.
        """
        if sequence_id in self._sequences:
            raise PageAccountingError(f"sequence {sequence_id} is allocated twice")
        self._sequences[sequence_id] = _Sequence()
        try:
            return self.append(sequence_id, num_tokens)
        except OutOfPagesError:
            del self._sequences[sequence_id]
            raise

    def append(self, sequence_id: int, num_tokens: int) -> list[int]:
        """Make room for `num_tokens` more tokens; its live table. All or nothing.

        Raises `OutOfPagesError`, or `PageAccountingError` if the sequence is unknown.
        """
        sequence = self._find(sequence_id)
        length = sequence.num_tokens + num_tokens
        missing = -(-length // self.page_tokens) - len(sequence.table)
        if missing > 0 and missing > self.num_free:
            raise OutOfPagesError(f"{missing} KV pages are needed, {self.num_free} are free")
        for _ in range(missing):
            sequence.table.append(self._take())
        sequence.num_tokens = length
        return sequence.table

    def free(self, sequence_id: int) -> None:
        """End a sequence and give its pages back; `PageAccountingError` if it is unknown."""
        sequence = self._find(sequence_id)
        del self._sequences[sequence_id]
        for page in reversed(sequence.table):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def table(self, sequence_id: int) -> list[int]:
        """The live page table of a sequence, first token's page first."""
        return self._find(sequence_id).table

    def num_tokens(self, sequence_id: int) -> int:
        """Tokens that a sequence has room for."""
        return self._find(sequence_id).num_tokens

    def check(self) -> None:
        """Raise `PageAccountingError` unless every page is free once or owned as counted."""
        owners = [0] * len(self._owners)
        for sequence_id, sequence in self._sequences.items():
            if len(sequence.table) != self.pages_for(sequence.num_tokens):
                raise PageAccountingError(
                    f"sequence {sequence_id} has {len(sequence.table)} pages"
                    f" for {sequence.num_tokens} tokens of {self.page_tokens} a page"
                )
            for page in sequence.table:
                owners[page] += 1
        if len(owners) > self.num_pages:
            raise PageAccountingError("more pages were given out than there are")
        if owners != self._owners or any(count > 1 for count in owners):
            raise PageAccountingError("a page is owned twice, or its owner count is wrong")
        free = sorted(self._free)
        if free != [page for page, count in enumerate(owners) if count == 0]:
            raise PageAccountingError("the free list is not the set of pages without an owner")

    def _take(self) -> int:
        """A page that came back last, or the first that was never given out."""
        if not self._free:
            self._owners.append(1)
            return len(self._owners) - 1
        page = self._free.pop()
        self._owners[page] += 1
        return page

    def _find(self, sequence_id: int) -> _Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise PageAccountingError(f"sequence {sequence_id} owns no pages")
        return sequence
