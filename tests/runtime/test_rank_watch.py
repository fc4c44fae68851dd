"""Signs of life: who is silent, stuck or gone is found, and nobody else; by a clock of the test."""

from torch._C._distributed_c10d import HashStore

from sitsc.runtime.rank_watch import SILENT, STUCK, Watch


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def watches(count: int) -> tuple[list[Watch], Clock]:
    clock, store = Clock(), HashStore()
    made = [Watch(store, rank, count, lambda text: None, clock) for rank in range(count)]
    for watch in made:
        watch.beat()
    return made, clock


def pass_time(clock: Clock, seconds: float, alive: list[Watch]) -> list[str | None]:
    """Half seconds go by, in which some ranks give signs; what they find at the end."""
    found: list[str | None] = [None for _ in alive]
    for _ in range(round(2 * seconds)):
        clock.seconds += 0.5
        for watch in alive:
            watch.beat()
        found = [watch.look() or old for watch, old in zip(alive, found, strict=True)]
    return found


def test_all_alive_and_idle_is_well():
    ranks, clock = watches(3)
    assert pass_time(clock, 60, ranks) == [None] * 3


def test_a_silent_rank_is_named():
    ranks, clock = watches(3)
    assert pass_time(clock, SILENT - 1, ranks[:2]) == [None] * 2
    found = pass_time(clock, 2, ranks[:2])
    assert all(text is not None and "rank 2 is dead or frozen" in text for text in found)


def test_a_long_computation_is_well_while_nobody_waits():
    ranks, clock = watches(2)
    with ranks[1].busy():
        assert pass_time(clock, 3 * STUCK, ranks) == [None] * 2


def test_a_rank_that_others_wait_for_too_long_is_stuck():
    ranks, clock = watches(3)
    with ranks[1].busy(), ranks[0].busy(), ranks[0].waiting():
        assert pass_time(clock, STUCK - 1, ranks) == [None] * 3
        found = pass_time(clock, 3, ranks)
    assert found[0] is not None and "rank 1 is stuck" in found[0]
    assert found[2] is not None and "rank 1 is stuck" in found[2]


def test_a_step_that_may_take_long_is_given_time():
    ranks, clock = watches(2)
    with ranks[1].busy(30.0), ranks[0].waiting():
        assert pass_time(clock, STUCK + 25, ranks) == [None] * 2
        found = pass_time(clock, 10, ranks)
    assert found[0] is not None and "rank 1 is stuck" in found[0]


def test_progress_is_no_stop():
    ranks, clock = watches(2)
    for _ in range(6):
        with ranks[1].busy(), ranks[0].waiting():
            assert pass_time(clock, STUCK / 2, ranks) == [None] * 2


def test_a_rank_that_has_ended_is_missed_only_by_who_waits():
    ranks, clock = watches(2)
    ranks[1].stop()
    assert pass_time(clock, 20, ranks[:1]) == [None]
    with ranks[0].waiting():
        (found,) = pass_time(clock, 1, ranks[:1])
    assert found == "rank 1 has ended while others wait for it"


def test_a_rank_that_never_came_is_named():
    clock, store = Clock(), HashStore()
    watch = Watch(store, 0, 2, lambda text: None, clock)
    (found,) = pass_time(clock, STUCK + 2, [watch])
    assert found is not None and "rank 1 has given no sign" in found


def test_gpus_that_wait_for_each_other_end_the_job():
    ranks, clock = watches(2)
    with ranks[0].on_device():
        assert pass_time(clock, STUCK - 1, ranks) == [None] * 2
        found = pass_time(clock, 3, ranks)
    assert found[0] is not None and "wait for each other" in found[0]


def test_a_step_of_gpus_may_wait_for_a_rank_that_computes():
    ranks, clock = watches(2)
    with ranks[1].busy(30.0), ranks[0].on_device():
        assert pass_time(clock, STUCK + 20, ranks) == [None] * 2
    for _ in range(3):  # one step after the other
        with ranks[0].on_device():
            assert pass_time(clock, STUCK - 1, ranks) == [None] * 2
