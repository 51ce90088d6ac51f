"""Starts to watch the Python process that imports it at start-up, then runs the machine's own ``sitecustomize``.

``lowtide leak``, ``sweep`` and ``guard`` put this folder first on ``PYTHONPATH``. A failure here must not fail the script.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder


def _begin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    package = os.path.dirname(os.path.dirname(here))
    if importlib.util.find_spec("lowtide") is None:  # another interpreter: load Lowtide's own files, none of its dependencies
        spec = importlib.util.spec_from_file_location(
            "lowtide", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
        )
        if spec is None or spec.loader is None:
            return
        sys.modules["lowtide"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    from lowtide.probe import beat, sampler

    sampler.begin()
    beat.begin()


def _then_the_machines_own() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [p for p in sys.path if os.path.abspath(p or ".") != here]
    sys.path[:] = rest
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    _begin()
except Exception as error:  # an old or foreign interpreter: it runs unwatched, and the parent sees that no samples come
    if os.environ.get("LOWTIDE_PROBE_DEBUG"):
        raise
    del error
_then_the_machines_own()
