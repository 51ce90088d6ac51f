"""Law: a training step is one round of the optimizers, however many there are and whenever they are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from lowtide.probe.marks import Rounds


class Optimizer:
    """Optimizers are compared by identity."""


def made(rounds: Rounds, count: int) -> list[Optimizer]:
    found = [Optimizer() for _ in range(count)]
    for optimizer in found:
        rounds.made(optimizer)
    return found


def alone(rounds: Rounds) -> Iterator[int]:
    (a,) = made(rounds, 1)
    for _ in range(20):
        yield rounds.stepped(a)


def two_that_alternate(rounds: Rounds) -> Iterator[int]:
    a, b = made(rounds, 2)
    for _ in range(20):
        yield rounds.stepped(a) + rounds.stepped(b)


def one_per_parameter(rounds: Rounds) -> Iterator[int]:
    """Stepped within the backward; the order may change."""
    many = made(rounds, 30)
    for step in range(20):
        yield sum(rounds.stepped(o) for o in (many if step % 3 else reversed(many)))


def one_that_never_steps(rounds: Rounds) -> Iterator[int]:
    a, _unused = made(rounds, 2)
    for _ in range(20):
        yield rounds.stepped(a)


def one_that_stops(rounds: Rounds) -> Iterator[int]:
    a, b = made(rounds, 2)
    for step in range(20):
        yield rounds.stepped(a) + (rounds.stepped(b) if step < 8 else 0)


def one_after_the_other_all_made_before(rounds: Rounds) -> Iterator[int]:
    for optimizer in made(rounds, 4):
        for _ in range(5):
            yield rounds.stepped(optimizer)


def trials(rounds: Rounds) -> Iterator[int]:
    """Each creates its own optimizer, which stays alive."""
    kept = []
    for _ in range(5):
        kept += made(rounds, 1)
        for _ in range(4):
            yield rounds.stepped(kept[-1])


def trials_of_one_step(rounds: Rounds) -> Iterator[int]:
    kept = []
    for _ in range(20):
        kept += made(rounds, 1)
        yield rounds.stepped(kept[-1])


def folds(rounds: Rounds) -> Iterator[int]:
    """Each creates two optimizers and drops the former ones."""
    for _ in range(5):
        a, b = made(rounds, 2)
        for _ in range(4):
            yield rounds.stepped(a) + rounds.stepped(b)
        del a, b
        gc.collect()


def not_seen_when_made(rounds: Rounds) -> Iterator[int]:
    """Copies and unpickled optimizers, whose creation is not observed."""
    kept = []
    for _ in range(4):
        kept.append(Optimizer())
        for _ in range(5):
            yield rounds.stepped(kept[-1])


@pytest.mark.parametrize("training", [
    alone, two_that_alternate, one_per_parameter, one_that_never_steps, one_that_stops,
    one_after_the_other_all_made_before, trials, trials_of_one_step, folds, not_seen_when_made,
])
def test_every_round_is_counted_once(training):
    """Every round is counted, at most one of them late (together with the next): it takes one more step to see that an
    optimizer now steps alone.
    """
    told = list(training(Rounds()))
    assert sum(told) in ((20,) if training is not one_that_stops else (19, 20))
    so_far, most_late = 0, 0
    for at, ended in enumerate(told, 1):
        so_far += ended
        most_late = max(most_late, at - so_far)
        assert so_far <= at
    assert most_late <= 1


@pytest.mark.parametrize("first", ["judge", "maker"])
def test_an_optimizer_that_steps_every_fifth_time_ends_no_step(first):
    """With five updates of one optimizer (a GAN's judge) for each of another, a round has five steps."""
    rounds = Rounds()
    judge, maker = made(rounds, 2)
    turn = [maker, *[judge] * 5] if first == "maker" else [*[judge] * 5, maker]
    told = [sum(rounds.stepped(o) for o in turn) for _ in range(10)]
    assert told[1:] == [5] * 9


def test_an_optimizer_that_joins_late_adds_at_most_one_step():
    rounds = Rounds()
    (a,) = made(rounds, 1)
    for _ in range(5):
        assert rounds.stepped(a) == 1
    (b,) = made(rounds, 1)
    told = [rounds.stepped(a) + rounds.stepped(b) for _ in range(10)]
    assert 10 <= sum(told) <= 11


def test_counting_rounds_keeps_no_optimizer_alive():
    rounds = Rounds()
    for _ in range(3):
        a, b = made(rounds, 2)
        rounds.stepped(a)
        rounds.stepped(b)
    del a, b
    gc.collect()
    assert not any(type(o) is Optimizer for o in gc.get_objects())
