"""The page pool against an independent model, and its errors by name."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sitsc.core.errors import OptionError, OutOfPagesError, PageAccountingError
from sitsc.core.serving.kv_blocks import PagePool


class PoolMachine(RuleBasedStateMachine):
    """Model: only how many tokens each sequence has; pages follow by rounding up."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(7, 3)
        self.tokens: dict[int, int] = {}
        self.next_id = 0

    def pages(self, tokens: int) -> int:
        return (tokens + 2) // 3

    def used(self) -> int:
        return sum(self.pages(tokens) for tokens in self.tokens.values())

    @rule(tokens=st.integers(0, 12))
    def allocate(self, tokens: int) -> None:
        name, self.next_id = self.next_id, self.next_id + 1
        if self.used() + self.pages(tokens) > 7:
            with pytest.raises(OutOfPagesError):
                self.pool.allocate(name, tokens)
        else:
            self.pool.allocate(name, tokens)
            self.tokens[name] = tokens

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), tokens=st.integers(0, 12))
    def append(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        before = list(self.pool.table(name))
        total = self.tokens[name] + tokens
        if self.used() - len(before) + self.pages(total) > 7:
            with pytest.raises(OutOfPagesError):
                self.pool.append(name, tokens)
            assert self.pool.table(name) == before
        else:
            table = self.pool.append(name, tokens)
            assert table[: len(before)] == before
            self.tokens[name] = total

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        self.pool.free(name)
        del self.tokens[name]

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.num_free == 7 - self.used()
        owned = [page for name in self.tokens for page in self.pool.table(name)]
        assert len(owned) == len(set(owned)) == self.used()
        assert all(0 <= page < 7 for page in owned)
        assert all(self.pool.num_tokens(name) == n for name, n in self.tokens.items())


TestPool = PoolMachine.TestCase


def test_errors_by_name() -> None:
    pool = PagePool(2, 4)
    pool.allocate(1, 4)
    with pytest.raises(PageAccountingError, match="twice"):
        pool.allocate(1)
    for call in (pool.free, pool.table, pool.num_tokens, lambda name: pool.append(name, 1)):
        with pytest.raises(PageAccountingError, match="sequence 9"):
            call(9)
    with pytest.raises(OutOfPagesError, match="2 KV pages are needed, 1 are free"):
        pool.append(1, 5)
    pool.free(1)
    with pytest.raises(PageAccountingError):
        pool.free(1)
    with pytest.raises(OptionError, match="num_pages=0"):
        PagePool(0, 4)


def test_check_sees_damage() -> None:
    for damage in (
        lambda pool: pool.table(1).append(1),  # owned twice, and one page too many
        lambda pool: pool.table(1).pop(),
        lambda pool: pool._free.pop(),
        lambda pool: pool._free.append(pool.table(1)[0]),
        lambda pool: pool._owners.__setitem__(0, 2),
    ):
        pool = PagePool(4, 2)
        pool.allocate(1, 3)
        pool.allocate(2, 2)
        pool.free(2)  # a page that came back
        pool.check()
        damage(pool)
        with pytest.raises(PageAccountingError):
            pool.check()


def test_pages_that_came_back_go_out_first() -> None:
    pool = PagePool(1 << 40, 2)  # a pool of any size costs nothing until it is used
    assert pool.allocate(1, 4) == [0, 1]
    assert pool.allocate(2, 3) == [2, 3]
    pool.free(1)
    assert pool.num_free == (1 << 40) - 2
    assert pool.allocate(3, 6) == [0, 1, 4]
    pool.check()
