"""What earlier runs of the same script recorded and planned: units of this run can follow those plans from their first on.

A recording is looked up by what decides which operators a unit runs: the script's text, the versions of torch and Lowtide, the
options, and the unit's signature with the shapes of the module's parameters. That is no proof (a library may have
changed), and need not be: a plan is followed by operator, and a unit that runs others leaves it, as within one run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, final

import msgspec
from torch.nn.parameter import is_lazy

import torch
from lowtide import __version__
from lowtide.base.errors import StructureError
from lowtide.planning.unit.unit_file import SolvedUnit, front_of, sealed, solved_unit, unsealed
from lowtide.runtime.tensors import modules_of
from lowtide.runtime.units.knowledge import Knowledge
from lowtide.runtime.units.plan_cache import PlanCache
from lowtide.runtime.units.recorded_unit import RecordedUnit, RetainedBytes
from lowtide.runtime.units.unit_signature import UnitSignature, is_of, parameters_of

FORMAT: Final = 1
"""Version of the files."""
PLACE: Final = "LOWTIDE_CACHE"
"""Environment variable: the folder for what later runs may use, or ``off``."""
_OFF: Final = "off"
_SCRIPTS: Final = 64
"""Scripts whose recordings are kept; those that ran longest ago are removed first."""
_DIGITS: Final = 32
_OURS: Final = re.compile(rf"[0-9a-f]{{{_DIGITS}}}(\.\d+\.partial)?")
"""Names of the files and folders here; a killed process may leave a partial file."""
_FILES: Final = 64
"""Recordings of one script that are kept."""
_KINDS: Final = 1024
"""Kinds of units for which a recording is looked for in one run: where sizes change, there is no end of them."""
_EVENTS: Final = 50_000
"""A unit with more events is not kept: its file would have some ten megabytes."""


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded unit. The attributes are those of :class:`RecordedUnit`, with operators by name."""

    solved: SolvedUnit
    operators: tuple[tuple[int, str], ...]
    packs: tuple[tuple[int, int], ...]
    backward_starts: tuple[int, ...]
    left: tuple[int, int, bool]
    gradient_bytes: int
    state_bytes: int
    calls: int
    retains: tuple[bool, ...]
    leaving_bytes: int
    collective: bool
    detour_bytes: int
    timed: int


@final
class EarlierRuns:
    """The recordings of earlier runs of one script with the same options."""

    def __init__(self, folder: Path) -> None:
        """Read nothing yet.

        Args:
            folder: where the files are; it need not exist.
        """
        self._folder = folder
        self._names: dict[UnitSignature, str] = {}
        self._modules: dict[Any, tuple[weakref.ref[torch.nn.Module], str]] = {}
        self._found: dict[UnitSignature, RecordedUnit] = {}

    @classmethod
    def of(cls, decisive: Iterable[object]) -> EarlierRuns | None:
        """Those of one script; None if nothing is to be kept.

        Args:
            decisive: what decides what the script runs, and how: its text, the options of the command.
        """
        place = cache_folder()
        if place is None:
            return None
        about = (
            FORMAT, __version__, torch.__version__, platform.python_version(), platform.machine(), os.cpu_count(),
            torch.get_num_threads(), *decisive,
        )
        return cls(place / "units" / _digest(about))

    def find(self, kind: UnitSignature, knowledge: Knowledge) -> RecordedUnit | None:
        """The recording of a unit of this kind in an earlier run; None if there is none, or it was looked for before."""
        if kind in self._names or len(self._names) >= _KINDS:
            return None
        name = self._names[kind] = self._name(kind, knowledge)  # now: a script may drop its model before it ends
        if not name:
            return None
        try:
            found = unsealed((self._folder / name).read_bytes(), _File)
        except OSError:
            return None
        entry = None if found is None else _recorded(found, kind)
        if entry is not None:
            self._found[kind] = entry
        return entry

    def leave(self, entry: RecordedUnit) -> None:
        """Leave the file of a recording as it is: no unit of this run could follow it, because no plan fits this budget."""
        self._found = {kind: found for kind, found in self._found.items() if found is not entry}

    @property
    def followed(self) -> int:
        """How many units have followed plans of earlier runs' recordings, as predicted."""
        return sum(entry.followed for entry in self._found.values())

    def has(self, kind: UnitSignature, knowledge: Knowledge) -> bool:
        """Whether an earlier run recorded units of this kind."""
        name = self._name(kind, knowledge)
        return bool(name) and (self._folder / name).is_file()

    def keep(self, recordings: PlanCache) -> None:
        """Write what later runs may use: the recordings whose plans were followed as predicted.

        Files that led this run astray are removed. Nothing is reported if that fails.
        """
        latest = {kind: entry for kind, entry in recordings.latest() if not recordings.is_wild(kind)}
        worth = {name: entry for kind, entry in latest.items() if (name := self._names.get(kind)) and entry.followed}
        files = {name: file for name, entry in worth.items() if (file := _file(entry)) is not None}
        astray = {self._names[kind] for kind, entry in self._found.items() if latest.get(kind) is not entry}
        with contextlib.suppress(OSError):
            for name in astray - files.keys():
                (self._folder / name).unlink(missing_ok=True)
            if not files:
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            for name, file in files.items():
                _replace(self._folder / name, sealed(file))
            os.utime(self._folder)
            _prune(self._folder, _FILES)
            _prune(self._folder.parent, _SCRIPTS)

    def _name(self, kind: UnitSignature, knowledge: Knowledge) -> str:
        """A name for a kind of unit that is the same in every run; empty if there is none.

        Within a run, modules and optimizers are told apart by identity. In the name, the shapes of their tensors stand for
        them.
        """
        optimizer = next((o for o in knowledge.persistent.optimizers if id(o) == kind.after), None)
        module = self._described(kind, knowledge) if kind.call else ""
        if (kind.after and optimizer is None) or module is None:
            return ""
        about = [kind.accumulates, kind.engaged, kind.plain_checkpoints, module, kind.call[2:]]
        if optimizer is not None:
            about += [_class(optimizer), [[_shape(p) for p in group["params"]] for group in optimizer.param_groups]]
        return _digest(about)

    def _described(self, kind: UnitSignature, knowledge: Knowledge) -> str | None:
        """A digest of the module that begins units of a kind; None if it has no parameters of its own, or is gone."""
        of = kind.call[:4]
        known = self._modules.get(of)
        if known is not None and known[0]() is not None:
            return known[1]
        module = next((m for m in knowledge.persistent.roots if is_of(kind, m)), None)
        if module is None:
            return None
        text = _digest((_class(module), [(_shape(p), p.dtype) for p in parameters_of(modules_of(module))]))
        self._modules[of] = weakref.ref(module), text
        return text


def cache_folder() -> Path | None:
    """The folder for what later runs may use; None if the user wants nothing kept, or has no home."""
    asked = os.environ.get(PLACE, "")
    if asked == _OFF:
        return None
    if asked:
        return Path(asked).absolute()  # the script may change to another folder
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "lowtide"
    except RuntimeError:  # there is no home
        return None


def _digest(about: object) -> str:
    return hashlib.sha256(repr(about).encode(errors="surrogateescape")).hexdigest()[:_DIGITS]


def _shape(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """The shape of a parameter; None for one of a lazy module before its first call."""
    return None if is_lazy(parameter) else tuple(parameter.shape)


def _class(item: object) -> str:
    return f"{type(item).__module__}.{type(item).__qualname__}"


def _file(entry: RecordedUnit) -> _File | None:
    """The file of a recording; None if it is too large, or an operator has no name by which a later run finds it."""
    operators = tuple((event, str(func)) for event, func in entry.funcs)
    named = all(_operator(name) is func for (_, name), (_, func) in zip(operators, entry.funcs, strict=True))
    if not named or len(entry.trace.events) > _EVENTS:
        return None
    left = entry.left
    return _File(
        solved=solved_unit(entry.front),
        operators=operators,
        packs=tuple(entry.packs),
        backward_starts=tuple(entry.backward_starts),
        left=(left.there_bytes, left.away_bytes, left.dropped),
        gradient_bytes=entry.gradient_bytes,
        state_bytes=sum(entry.states.values()) if entry.state_bytes is None else entry.state_bytes,
        calls=len(entry.calls) or 2,
        retains=entry.retains,
        leaving_bytes=entry.leaving_bytes,
        collective=entry.collective,
        detour_bytes=entry.detour_bytes,
        timed=min(1, entry.timings.ended),  # a second timing would rule out programs for other budgets
    )


def _recorded(file: _File, kind: UnitSignature) -> RecordedUnit | None:
    """The recording in a file; None if this process lacks one of its operators, or a plan in it cannot be carried out."""
    funcs = [(event, _operator(name)) for event, name in file.operators]
    if any(func is None for _, func in funcs):
        return None
    try:
        front = front_of(file.solved)
    except StructureError:
        return None
    there, away, dropped = file.left
    entry = RecordedUnit(
        funcs, list(file.packs), list(file.backward_starts), front, RetainedBytes(there, away, dropped), file.gradient_bytes,
        {}, (kind,) if file.calls == 1 else (), file.retains, file.leaving_bytes, file.collective,
        detour_bytes=file.detour_bytes, state_bytes=file.state_bytes,
    )  # fmt: skip
    entry.timings.begun = entry.timings.ended = file.timed
    return entry


def _operator(name: str) -> Any:
    """The operator overload of a name such as ``aten.add.Tensor``; None if there is none."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that another process sees all of it or nothing."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _prune(folder: Path, most: int) -> None:
    """Remove what was written longest ago of a folder's entries, if there are more than ``most``.

    Only files and folders are touched whose names are those that are given here: the folder may be anywhere, even one of the
    user's with other things in it.
    """
    ours = [entry for entry in folder.iterdir() if _OURS.fullmatch(entry.name)]
    for entry in sorted(ours, key=lambda entry: entry.stat().st_mtime, reverse=True)[most:]:
        if not entry.is_dir():
            entry.unlink()
            continue
        for file in entry.iterdir():
            if _OURS.fullmatch(file.name) and not file.is_dir():
                file.unlink()
        with contextlib.suppress(OSError):  # something else is in it
            entry.rmdir()
