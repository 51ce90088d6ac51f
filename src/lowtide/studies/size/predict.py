"""The peak at sizes that were never run, from recordings at small ones.

Training steps of one script at several sizes run the same operators one by one. At each operator, the highest bytes inside it
are a sum of tensors whose sizes are polynomials in what is varied (a batch: degree 1; a sequence: 2, where attention keeps its
scores; a side of an image: 2), so the height of *every instant* is fitted apart, and the highest of them is the peak. Which
instant is highest at the large size need not be the one that is highest in the recordings: that is what a straight line
through the recorded peaks gets wrong.

Degrees are found, not assumed: the lowest is taken that predicts what was held out. Where recordings do not run the same
operators (a loop over the sequence), the step's peak itself is fitted, and the doubt is larger.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final, final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from lowtide.base.errors import UsageError
from lowtide.planning.graph import Graph
from lowtide.recording.file_format import decode_run
from lowtide.recording.graph import graph_of
from lowtide.recording.reader import Recording
from lowtide.recording.recorded_step import RecordedStep, laid_out
from lowtide.studies.size.prediction import Prediction, Predictions, Sizes

DEGREES: Final = 4
"""Highest degree that is tried: attention over the patches of an image grows with the fourth power of its side."""
HELD_OUT: Final = 0.0005
"""A degree is taken if it predicts every instant of a recording that was held out within this share of what varies."""
NEARLY: Final = 0.05
"""Within this share it is preferred to a higher one that nothing could check: sizes that are floored are no polynomials."""
DRIFT: Final = 0.5
"""Share of a prediction that it may be off where recordings run other operators, or sizes of tensors follow no law."""
LIBRARY_OPS: Final = ("convolution", "mkldnn", "cudnn", "miopen")
"""Operators (parts of their names) whose library chooses its algorithm, and with it its workspace, by the size: ..."""
LIBRARY_DOUBT: Final = 0.15
"""... share that a peak beyond the recorded sizes may be off for that (12 % were seen: a ResNet between batches 12 and 16)."""
FAR: Final = 8.0
"""Times the largest recorded size (all sizes multiplied) beyond which a step's time is a guess."""
LEAST_DOUBT: Final = 0.003
"""Share of a prediction that it may be off, at the least: rounding of blocks, workspaces of libraries."""
NOISE_BYTES: Final = 1.0
"""Bytes below which a fit is exact."""
BLIND_DOUBT: Final = 0.05
"""The same, where no recording was left to check a degree with, or operators do not correspond."""
COMPLETE: Final = 2
"""Steps that a recording has at least: a cold one and a warm one."""


@final
class Model:
    """What recordings at several sizes say of all sizes.

    Attributes:
        names: of the sizes.
        aligned: whether recordings run the same operators, so that every instant is fitted.
        left_out: recordings that do not, among others that do.
        degrees: found for each size.
        checked: whether a recording was left to check them with.
    """

    def __init__(self, recordings: Sequence[tuple[Sizes, Recording]]) -> None:
        """Fit.

        Args:
            recordings: each with its sizes, of the same names.

        Raises:
            UsageError: if there are fewer than two, or one has no two complete steps with operators.
        """
        if len(recordings) < 2:
            raise UsageError("one recording shows one size: give two or more, made at different sizes")
        self.names = tuple(recordings[0][0])
        at = np.array([[sizes[n] for n in self.names] for sizes, _ in recordings])
        for axis, name in enumerate(self.names):
            if len(set(at[:, axis])) < 2:
                raise UsageError(f"all recordings have the same {name}: vary it")
        steps = [[s for s in laid_out(r) if s.row.complete and s.row.step >= 0] for _, r in recordings]
        if min(len(found) for found in steps) < COMPLETE:
            raise UsageError("a recording has fewer than two complete steps with operators (--level ops)")
        self._count = min(len(found) for found in steps)
        columns = [found[: self._count] for found in steps]
        chosen = self._corresponding(at, columns)
        self.aligned = bool(chosen)
        self.left_out = len(columns) - len(chosen) if chosen else 0
        self._at = at[chosen] if chosen else at
        self._columns = [columns[i] for i in chosen] if chosen else columns
        self._lower: tuple[int, ...] | None = None
        self._fastest = self._growth()
        last = self._columns[0][self._count - 1]
        ran = {last.names[e["a"]] for e in last.entries[last.ops]}
        self._calls_libraries = any(part in name for part in LIBRARY_OPS for name in ran)
        self._constant = all(not np.ptp(self._heights(k), axis=0).any() for k in range(self._count))
        self._drifts = bool(self.left_out) and any(
            at[i].min() > 1 for i, steps in enumerate(columns) if not any(steps is kept for kept in self._columns)
        )
        self.degrees, self.checked = self._choose()

    def _corresponding(self, at: NDArray[np.float64], columns: Sequence[Sequence[RecordedStep]]) -> list[int]:
        """Recordings that run the same operators as the largest does, itself included; none if they do not vary enough.

        A size of one is often left out so: torch copies less where a dimension has one element.
        """
        last = int(np.argmax(np.prod(at, axis=1)))
        found = [i for i, steps in enumerate(columns)
                 if all(_alike((steps[k], columns[last][k])) for k in range(self._count))]
        return found if all(len(set(at[found, axis])) > 1 for axis in range(at.shape[1])) else []

    # --- fitting -----------------------------------------------------------------------------------------------------

    @cached_property
    def _graphs(self) -> list[Graph]:
        """The warm step's graph in each recording; none where recordings do not run the same operators on the same values."""
        graphs = [graph_of(steps[self._count - 1]) for steps in self._columns] if self.aligned else []
        return graphs if all([n.id for n in g.nodes] == [n.id for n in graphs[0].nodes] for g in graphs) else []

    def _growth(self) -> tuple[int, ...]:
        """Per size the highest degree in which the bytes of any tensor grow, as the recordings show it.

        Bytes of one tensor are one product of sizes, or linear; where some are neither (sizes that are floored, or depend on
        data) recordings are not regular.
        """
        graphs = self._graphs
        self._regular = bool(graphs)
        if not graphs:
            return tuple(len(self._columns) for _ in self.names)
        known = np.array([[float(n.bytes) for n in g.nodes] for g in graphs])
        return tuple(self._growth_along(axis, known) for axis in range(len(self.names)))

    def _growth_along(self, axis: int, known: NDArray[np.float64]) -> int:
        others = [tuple(np.delete(row, axis)) for row in self._at]
        fastest = 1
        for other in sorted(set(others)):
            rows = sorted((i for i, o in enumerate(others) if o == other), key=lambda i: self._at[i, axis])
            sizes, values = self._at[rows, axis], known[rows]
            if len(set(sizes)) < 2:
                continue
            values = values[:, (np.ptp(values, axis=0) > 0) & (values.min(axis=0) > 0)]
            straight = np.polyfit(sizes, values, 1) if values.size else np.zeros((2, 0))
            affine = np.abs(np.outer(sizes, straight[0]) + straight[1] - values).max(axis=0, initial=0.0) < NOISE_BYTES
            for column in values[:, ~affine].T:
                power = float(np.log(column[-1] / column[0]) / np.log(sizes[-1] / sizes[0]))
                whole = round(power)
                exact = whole >= 1 and bool(np.all(np.abs(column[0] * (sizes / sizes[0]) ** whole - column) < NOISE_BYTES))
                self._regular = self._regular and exact
                fastest = max(fastest, whole)
        return fastest

    def _heights(self, k: int) -> NDArray[np.float64]:
        """(recordings, instants) of step k: the highest bytes inside each operator; of the whole step where they differ."""
        if self.aligned:
            return np.array([np.asarray(steps[k].peaks, dtype=float) for steps in self._columns])
        return np.array([[float(np.max(steps[k].peaks))] for steps in self._columns])

    def _terms(self, degrees: Sequence[int], at: NDArray[np.float64]) -> NDArray[np.float64]:
        """(points, monomials), scaled to the largest recorded size."""
        scaled = at / self._at.max(axis=0)
        powers = itertools.product(*(range(d + 1) for d in degrees))
        return np.stack([np.prod(scaled ** np.array(p), axis=1) for p in powers], axis=1)

    def _fitted(
        self, degrees: Sequence[int], known: NDArray[np.float64], rows: Sequence[int], at: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Values at some sizes, fitted to some of the recordings: (points, columns)."""
        terms = self._terms(degrees, self._at[rows])
        found, *_ = np.linalg.lstsq(terms, known[rows], rcond=None)
        result: NDArray[np.float64] = self._terms(degrees, at) @ found
        return result

    def _choose(self) -> tuple[tuple[int, ...], bool]:
        """The lowest degrees that predict what was held out; whether anything was."""
        most = [min(len(set(self._at[:, axis])) - 1, DEGREES) for axis in range(len(self.names))]
        heights = [self._heights(k) for k in range(self._count)]
        order = np.argsort(np.prod(self._at, axis=1))
        best: tuple[float, tuple[int, ...]] | None = None
        for degrees in sorted(itertools.product(*(range(1, m + 1) for m in most)), key=lambda d: (sum(d), d)):
            errors = [self._held_out(degrees, h, order) for h in heights]
            if any(e is None for e in errors):
                continue
            error = max(e for e in errors if e is not None)
            if best is None or error < best[0]:
                best = error, degrees
            if error <= HELD_OUT:
                return degrees, True
        needed = [d for d in itertools.product(*(range(1, m + 1) for m in most))
                  if np.linalg.matrix_rank(self._terms(d, self._at)) == np.prod([x + 1 for x in d])]
        highest = max(needed, key=sum, default=tuple(1 for _ in most))
        if best is None:
            return highest, False
        grown = tuple(min(g, m) for g, m in zip(self._fastest, most, strict=True))
        if self._regular and grown == self._fastest and grown in needed:  # every tensor's bytes say so
            return grown, True
        if self.aligned and not self._regular and best[0] > NEARLY and grown in needed:
            self._lower, self._drifts = best[1], True
            return grown, False
        if self.aligned and any(h > b and not _is_batch(n) for h, b, n in zip(highest, best[1], self.names, strict=True)):
            self._lower = best[1]
            if best[0] > NEARLY:
                return highest, False
            self._lower = highest
        return best[1], True

    def _held_out(self, degrees: tuple[int, ...], heights: NDArray[np.float64], order: NDArray[np.intp]) -> float | None:
        """How far off the instants of a held-out recording are (the largest, the smallest), as a share of what varies at all.

        None where too few are left.
        """
        worst, scale = 0.0, max(float(np.ptp(heights, axis=0).max()), 1.0)
        for out in (int(order[-1]), int(order[0])):
            off = self._off(degrees, heights, out)
            if off is None:
                return None
            worst = max(worst, float(off.max() / scale))
        return worst

    def _off(self, degrees: tuple[int, ...], heights: NDArray[np.float64], out: int) -> NDArray[np.float64] | None:
        """How far off each instant of one recording is, fitted to the others; None where these are too few."""
        rows = [i for i in range(len(self._at)) if i != out]
        terms = self._terms(degrees, self._at[rows])
        if np.linalg.matrix_rank(terms) < terms.shape[1]:
            return None
        found: NDArray[np.float64] = np.abs(self._fitted(degrees, heights, rows, self._at[[out]])[0] - heights[out])
        return found

    # --- answers -----------------------------------------------------------------------------------------------------

    def predictions(self, sizes: Iterable[Sizes], memory_bytes: int, steps: int) -> Predictions:
        """The step at several sizes; see :class:`Predictions`.

        Raises:
            UsageError: if one lacks a size.
        """
        return Predictions(
            degrees=dict(zip(self.names, self.degrees, strict=True)), aligned=self.aligned, checked=self.checked,
            left_out=self.left_out, points=tuple(self.at(s) for s in sizes), memory_bytes=memory_bytes, steps=steps,
        )

    def at(self, sizes: Sizes) -> Prediction:
        """The step at some sizes.

        Raises:
            UsageError: if a size is not given.
        """
        missing = [n for n in self.names if n not in sizes]
        if missing:
            raise UsageError(f"say what {', '.join(missing)} shall be: --set {missing[0]}=VALUE")
        at = np.array([[sizes[n] for n in self.names]])
        every = range(len(self._at))
        tops = [self._fitted(self.degrees, self._heights(k), every, at)[0] for k in range(self._count)]
        peaks = [float(t.max()) for t in tops]
        where = int(np.argmax(peaks))
        reach = float(np.prod(at / self._at.max(axis=0)))
        blind = not self.checked or not self.aligned
        doubt = max(BLIND_DOUBT if blind else LEAST_DOUBT, self._unseen(at[0], tops) / peaks[where] - 1)
        if self._constant and reach > 1:  # what is rounded up to a multiple may grow at the next one
            doubt = max(doubt, reach - 1)
        if self._drifts:
            doubt = max(doubt, DRIFT)
        if self._calls_libraries and (at > self._at.max(axis=0)).any():
            doubt = max(doubt, LIBRARY_DOUBT)
        if self._lower is not None:  # between two degrees that nothing could be checked against
            lower = max(float(self._fitted(self._lower, self._heights(k), every, at)[0].max()) for k in range(self._count))
            doubt = max(doubt, abs(lower - peaks[where]) / peaks[where])
        step = self._columns[0][where]
        entry = step.entries[step.ops[int(tops[where].argmax())]] if self.aligned else None
        return Prediction(
            sizes=dict(sizes),
            cold_peak_bytes=round(peaks[0]),
            peak_bytes=round(peaks[where]),
            doubt=float(doubt),
            step_seconds=self._seconds(at),
            far=reach > FAR,
            op="" if entry is None else f"{step.names[entry['a']]} ({step.names[entry['b']] or 'outside modules'})",
            checked=self.checked and self.aligned,
        )

    def _seconds(self, at: NDArray[np.float64]) -> float:
        """Of a warm step: no part of which takes less as a size grows, however noisy the recordings were.

        Of a few steps' seconds no more can be told of a batch than what each sample takes: a higher power would be noise.
        """
        degrees = [min(d, 1) if _is_batch(n) else d for n, d in zip(self.names, self.degrees, strict=True)]
        seconds = np.array([[_seconds_of(s) for s in steps[1:]] for steps in self._columns]).min(axis=1)
        parts, _ = nnls(self._terms(degrees, self._at) / seconds[:, None], np.ones(len(seconds)))
        return float((self._terms(degrees, at) @ parts)[0])

    def _unseen(self, at: NDArray[np.float64], tops: Sequence[NDArray[np.float64]]) -> float:
        """The peak if what a held-out recording was off by grows as fast as any tensor does.

        Where no tensor grows faster than what was fitted it is workspace, which grows with the size at most.
        """
        ratio = 1.0
        for axis, degree in enumerate(self.degrees):
            sizes = sorted(set(self._at[:, axis]))
            held, known = sizes[-1], sizes[-2 - degree : -1]
            reach = max(1.0, at[axis] / held)
            if self._fastest[axis] > degree and reach > 1:
                newton = float(np.prod([(at[axis] - x) / (held - x) for x in known]))
                ratio *= max(1.0, newton * reach ** (self._fastest[axis] - degree - 1))
            else:
                ratio *= reach ** self._fastest[axis]
        largest = int(np.argsort(np.prod(self._at, axis=1))[-1])
        highest = 0.0
        for k, top in enumerate(tops):
            off = self._off(self.degrees, self._heights(k), largest)
            worst = top if off is None else top + np.where(off < NOISE_BYTES, 0.0, off) * ratio
            highest = max(highest, float(worst.max()))
        return highest

    def graph_at(self, sizes: Sizes) -> Graph | None:
        """The warm step's graph at some sizes, to be planned; None where recordings do not run the same operators."""
        graphs = self._graphs
        if not graphs:
            return None
        first = graphs[0]
        at = np.array([[sizes[n] for n in self.names]])

        def fitted(key: str) -> NDArray[np.float64]:
            known = np.array([[float(getattr(n, key)) for n in g.nodes] for g in graphs])
            found: NDArray[np.float64] = self._fitted(self.degrees, known, range(len(self._at)), at)[0]
            return np.maximum(found, 0)

        size, workspace, seconds = fitted("bytes"), fitted("workspace_bytes"), fitted("seconds")
        nodes = tuple(
            replace(n, bytes=round(size[i]), workspace_bytes=round(workspace[i]), seconds=float(seconds[i]))
            for i, n in enumerate(first.nodes)
        )
        return replace(first, nodes=nodes, name=", ".join(f"{k}={v:g}" for k, v in sizes.items()))


def _seconds_of(step: RecordedStep) -> float:
    """What a step's operators took, without what recording adds to each of them; the whole step where they were not timed."""
    return sum(decode_run(int(f))[0] for f in step.entries["flags"][step.ops]) or float(step.row.seconds)


def _is_batch(name: str) -> bool:
    """Whether a size is a number of samples: steps are linear in it, so that a higher degree must be shown, not assumed."""
    return "batch" in name.lower() or name.lower() in ("b", "bs", "n")


def _alike(steps: Sequence[RecordedStep]) -> bool:
    """Whether steps ran the same operators in the same modules."""
    first = [(steps[0].names[e["a"]], steps[0].names[e["b"]]) for e in steps[0].entries[steps[0].ops]]
    return all(
        len(s.ops) == len(first) and [(s.names[e["a"]], s.names[e["b"]]) for e in s.entries[s.ops]] == first for s in steps[1:]
    )
