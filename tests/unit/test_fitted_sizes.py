"""Rules of a fit over sizes: which degrees are chosen, and how far what was not predicted may grow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lowtide.studies.size import predict


def model(**fields: Any) -> Any:
    """The fit of one size at 1, 2, 3 and 5, of which only what is given is known."""
    found = predict.Model.__new__(predict.Model)
    defaults: dict[str, Any] = {
        "names": ("width",), "aligned": False, "_at": np.array([[1.0], [2.0], [3.0], [5.0]]), "_count": 1, "_regular": False,
        "_heights": lambda _: np.zeros((4, 1)), "_fastest": (1,), "degrees": (1,),
    }
    for name, value in (defaults | fields).items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(("errors", "chosen"), [
    ({1: 0.4, 2: 0.2, 3: 0.3}, 2), ({1: 0.2, 2: 0.4, 3: 0.3}, 1), ({1: 0.4, 2: 0.0, 3: 0.0}, 2),
])
def test_the_degree_is_the_one_that_predicts_best_or_the_lowest_that_is_good_enough(
    errors: dict[int, float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "DEGREES", 3)
    fit = model(_held_out=lambda degrees, *_: errors[degrees[0]])
    assert fit._choose() == ((chosen,), True)


@pytest.mark.parametrize(("fastest", "size", "ratio"), [
    (1, 8.0, 8 / 5),  # nothing grows faster than the fit: it is workspace, which grows with the size
    (2, 8.0, (8 - 2) * (8 - 3) / ((5 - 2) * (5 - 3))),  # the next power, which is 0 at the fitted sizes
    (3, 8.0, 5 * 8 / 5),
    (2, 4.5, 1.0),
])
def test_what_was_off_grows_as_fast_as_any_tensor_does(fastest: int, size: float, ratio: float) -> None:
    """The largest recording was off by 100 bytes, with a fit of degree 1 to the others."""
    fit = model(_fastest=(fastest,), _off=lambda *_: np.array([100.0]))
    assert fit._unseen(np.array([size]), [np.array([5000.0])]) == pytest.approx(5000 + 100 * ratio)

