"""Fixtures that all tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Neither how long inputs take to make nor how many are filtered out may decide whether a test passes.
settings.register_profile("lowtide", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
settings.load_profile("lowtide")
sys.path.insert(0, str(Path(__file__).parent))
os.environ["LOWTIDE_CACHE"] = "off"  # each run of a script begins without what others have learnt


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``long`` and ``slow`` mark a test, or those of its cases whose ids contain one of their arguments.

    ``make test`` leaves both out, and ``make test-long`` runs the long ones that are not slow.
    """
    for item in items:
        if _is_marked(item, "slow"):
            item.add_marker("takes_hours")
        elif _is_marked(item, "long"):
            item.add_marker("takes_long")


def _is_marked(item: pytest.Item, name: str) -> bool:
    mark, case = item.get_closest_marker(name), getattr(item, "callspec", None)
    return mark is not None and (not mark.args or (case is not None and any(part in case.id for part in mark.args)))


@pytest.fixture(scope="session")
def heap():  # noqa: ANN201 - imported late: floors 0-2 are tested without torch
    """The preloaded heap counter; ``make test`` preloads it."""
    from lowtide.runtime.device.heap_meter import counters

    found = counters()
    assert found is not None, "the heap counter is not preloaded: run these tests by `make test`"
    return found
