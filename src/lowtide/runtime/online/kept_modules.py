"""Modules whose values are never dropped (``--keep``)."""

from __future__ import annotations

from typing import final


@final
class KeptModules:
    """The modules whose values are never dropped, given by path, with or without the model's class in front."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """Begin without a module that matches."""
        self.names = names
        self._met: set[str] = set()
        self._known: dict[str, bool] = {}

    @property
    def unmet(self) -> tuple[str, ...]:
        """Names that no module has matched so far."""
        return tuple(name for name in self.names if name not in self._met)

    def covers(self, module: str) -> bool:
        """Whether a module, given by path, is one of them or inside one."""
        found = self._known.get(module)
        if found is None:
            paths = (module, module.partition(".")[2])
            named = {n for n in self.names for path in paths if path == n or path.startswith(n + ".")}
            self._met |= named
            found = self._known[module] = bool(named)
        return found
