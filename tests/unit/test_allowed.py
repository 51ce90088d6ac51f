"""Names of levers: a text means what the same text in a tuple does, and a wrong name is refused with those that there are."""

from __future__ import annotations

import pytest

from lowtide.base.lever_catalogue import GRADIENTS, LEVERS, LOSS, SPLIT_OPS, SLICES, UPDATE, check_levers, parse_levers
from lowtide.base.errors import UsageError


@pytest.mark.parametrize("texts", ["chunked-loss, split-ops", ("chunked-loss,split-ops",), ["split-ops", "chunked-loss"]])
def test_a_text_several_texts_and_a_list_in_one_text_mean_the_same(texts):
    assert parse_levers(texts) == {LOSS, SPLIT_OPS}


def test_exact_and_all_stand_for_several():
    assert parse_levers("exact") == {GRADIENTS, UPDATE, SLICES}
    assert parse_levers("all") == set(LEVERS)
    assert parse_levers(()) == set()


def test_a_wrong_name_is_refused_whole():
    with pytest.raises(UsageError, match="no memory optimization is called 'chunkedloss': there are move-gradients"):
        parse_levers("chunkedloss")


def test_a_lever_is_not_both_allowed_and_excluded():
    with pytest.raises(UsageError, match="split-ops: both"):
        check_levers("all", "split-ops")
