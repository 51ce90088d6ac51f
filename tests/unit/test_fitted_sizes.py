"""Rules of a fit over sizes: which degree is chosen, and how far the error of a prediction may grow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lowtide.studies.size import predict


def model(**fields: Any) -> Any:
    """A fit of one size at 1, 2, 3 and 5; only the given fields are replaced."""
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
def test_the_lowest_good_degree_or_else_the_best_is_chosen(
    errors: dict[int, float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowest degree whose held-out error is small enough; if there is none, the degree with the smallest error."""
    monkeypatch.setattr(predict, "DEGREES", 3)
    fit = model(_held_out=lambda degrees, *_: errors[degrees[0]])
    assert fit._choose() == ((chosen,), True)


@pytest.mark.parametrize(("fastest", "size", "ratio"), [
    (1, 8.0, 8 / 5),  # nothing grows faster than the fit: it is workspace, which grows with the size
    (2, 8.0, (8 - 2) * (8 - 3) / ((5 - 2) * (5 - 3))),  # the next power, which is 0 at the fitted sizes
    (3, 8.0, 5 * 8 / 5),
    (2, 4.5, 1.0),
])
def test_the_prediction_error_grows_as_fast_as_the_fastest_tensor(fastest: int, size: float, ratio: float) -> None:
    """The fit of degree 1 to the other recordings missed the largest one by 100 bytes. That error is extrapolated with the
    degree of the fastest-growing tensor, and never shrinks below itself.
    """
    fit = model(_fastest=(fastest,), _off=lambda *_: np.array([100.0]))
    assert fit._unseen(np.array([size]), [np.array([5000.0])]) == pytest.approx(5000 + 100 * ratio)

