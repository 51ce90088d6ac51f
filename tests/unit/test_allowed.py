"""Names of levers: one text may list several, and an unknown name is refused together with the names that exist."""

from __future__ import annotations

import pytest

from lowtide.base.lever_catalogue import CHECKPOINTS, GRADIENTS, LEVERS, LOSS, SPLIT_OPS, SLICES, STATES, UPDATE, check_levers, parse_levers
from lowtide.base.errors import UsageError


@pytest.mark.parametrize("texts", ["chunked-loss, split-ops", ("chunked-loss,split-ops",), ["split-ops", "chunked-loss"]])
def test_names_may_be_given_as_one_text_or_several(texts):
    """One comma-separated text, several texts, and a tuple with such a text give the same set."""
    assert parse_levers(texts) == {LOSS, SPLIT_OPS}


def test_exact_and_all_name_groups_of_levers():
    """"exact" and "all" stand for groups of levers; no name is no lever."""
    assert parse_levers("exact") == {GRADIENTS, STATES, UPDATE, SLICES, CHECKPOINTS}
    assert parse_levers("all") == set(LEVERS)
    assert parse_levers(()) == set()


def test_an_unknown_name_is_refused_and_not_split_into_letters():
    """An unknown text is refused as a whole and the message lists the names that exist; a text is never read letter by letter.
    """
    with pytest.raises(UsageError, match="unknown memory optimization 'chunkedloss': choose from move-gradients"):
        parse_levers("chunkedloss")


def test_a_lever_cannot_be_both_allowed_and_excluded():
    """A lever that is both allowed and excluded is refused by name, also where it was allowed through "all"."""
    with pytest.raises(UsageError, match="split-ops: both"):
        check_levers("all", "split-ops")
