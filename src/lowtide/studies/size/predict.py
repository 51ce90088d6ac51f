"""Predicts the peak at sizes that were never run, from recordings at small sizes.

Training steps of one script at several sizes run the same operators in the same order. The highest bytes inside each operator
are a sum of tensors whose sizes are polynomials in what is varied (a batch: degree 1; a sequence: 2, if attention keeps its
scores; the side of an image: 2). So the height of *every instant* (operator) is fitted on its own, and the highest fitted
value is the peak. The instant that is highest at a large size need not be the one that is highest in the recordings: a
straight line through the recorded peaks misses that.

Degrees are found, not assumed: the lowest degree that predicts a held-out recording is taken. If the recordings do not run the
same operators (a loop over the sequence), the step's peak itself is fitted, and the doubt is larger.
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
"""A degree is accepted if it predicts every instant of a held-out recording within this share of the range of heights."""
NEARLY: Final = 0.05
"""Within this share, a degree is preferred to a higher one that could not be checked: sizes that are rounded down are no
polynomials."""
DRIFT: Final = 0.5
"""Relative doubt of a prediction if some recordings run other operators, or if sizes of tensors follow no law."""
LIBRARY_OPS: Final = ("convolution", "mkldnn", "cudnn", "miopen")
"""Operators (parts of their names) whose library chooses its algorithm, and with it its workspace, by the size: ..."""
LIBRARY_DOUBT: Final = 0.15
"""... relative doubt of a peak beyond the recorded sizes for that reason (12 % was seen: a ResNet between batches of 12 and
16)."""
FAR: Final = 8.0
"""Beyond this multiple of the largest recorded size (as a product of all sizes), a step's time is a guess."""
LEAST_DOUBT: Final = 0.003
"""Minimum relative doubt of a prediction: rounding of blocks, workspaces of libraries."""
NOISE_BYTES: Final = 1.0
"""Error in bytes below which a fit counts as exact."""
BLIND_DOUBT: Final = 0.05
"""Minimum relative doubt if no recording was left to check a degree with, or if operators do not correspond."""
COMPLETE: Final = 2
"""Minimum number of complete steps in a recording: a cold one and a warm one."""


@final
class Model:
    """A model of a script's step at any size, fitted to recordings at several sizes.

    Attributes:
        names: names of the sizes.
        aligned: whether recordings run the same operators, so that every instant is fitted.
        left_out: number of recordings that run other operators than the ones that are used.
        degrees: the degree found for each size.
        checked: whether a recording was left to check the degrees with.
    """

    def __init__(self, recordings: Sequence[tuple[Sizes, Recording]]) -> None:
        """Fit the model.

        Args:
            recordings: recordings, each with its sizes; the sizes have the same names in all of them.

        Raises:
            UsageError: if there are fewer than two recordings, if a size is the same in all of them, or if one has fewer than
                two complete steps with operators.
        """
        if len(recordings) < 2:
            raise UsageError("one recording covers one size: give two or more, made at different sizes")
        self.names = tuple(recordings[0][0])
        at = np.array([[sizes[n] for n in self.names] for sizes, _ in recordings])
        for axis, name in enumerate(self.names):
            if len(set(at[:, axis])) < 2:
                raise UsageError(f"all recordings have the same {name}: give recordings that differ in it")
        steps = [[s for s in laid_out(r) if s.row.complete and s.row.step >= 0] for _, r in recordings]
        if min(len(found) for found in steps) < COMPLETE:
            raise UsageError("a recording has fewer than two complete steps with operators: record more steps at --level ops")
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
        """Indices of the recordings that run the same operators as the largest one, which is among them.

        Empty if a size does not vary over these. A recording with a size of one is often left out: torch copies less if a
        dimension has one element.
        """
        last = int(np.argmax(np.prod(at, axis=1)))
        found = [i for i, steps in enumerate(columns)
                 if all(_alike((steps[k], columns[last][k])) for k in range(self._count))]
        return found if all(len(set(at[found, axis])) > 1 for axis in range(at.shape[1])) else []

    # --- fitting -----------------------------------------------------------------------------------------------------

    @cached_property
    def _graphs(self) -> list[Graph]:
        """The warm step's graph in each recording; empty if recordings do not run the same operators on the same values."""
        graphs = [graph_of(steps[self._count - 1]) for steps in self._columns] if self.aligned else []
        return graphs if all([n.id for n in g.nodes] == [n.id for n in graphs[0].nodes] for g in graphs) else []

    def _growth(self) -> tuple[int, ...]:
        """For each size, the highest degree with which the bytes of any tensor grow in the recordings.

        The bytes of one tensor are a product of sizes, or linear in one. If some are neither (sizes that are rounded down, or
        depend on data), the recordings are not regular.
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
        """(recordings, instants) of step k: highest bytes inside each operator, or of the whole step if operators differ."""
        if self.aligned:
            return np.array([np.asarray(steps[k].peaks, dtype=float) for steps in self._columns])
        return np.array([[float(np.max(steps[k].peaks))] for steps in self._columns])

    def _terms(self, degrees: Sequence[int], at: NDArray[np.float64]) -> NDArray[np.float64]:
        """The monomials at some points, (points, monomials); sizes are scaled to the largest recorded ones."""
        scaled = at / self._at.max(axis=0)
        powers = itertools.product(*(range(d + 1) for d in degrees))
        return np.stack([np.prod(scaled ** np.array(p), axis=1) for p in powers], axis=1)

    def _fitted(
        self, degrees: Sequence[int], known: NDArray[np.float64], rows: Sequence[int], at: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Values at some sizes, (points, columns), fitted to some of the recordings.

        Args:
            degrees: the degree for each size.
            known: values in the recordings, (recordings, columns).
            rows: the recordings to fit to.
            at: the sizes, (points, sizes).
        """
        terms = self._terms(degrees, self._at[rows])
        found, *_ = np.linalg.lstsq(terms, known[rows], rcond=None)
        result: NDArray[np.float64] = self._terms(degrees, at) @ found
        return result

    def _choose(self) -> tuple[tuple[int, ...], bool]:
        """The lowest degrees that predict held-out recordings, and whether the degrees could be checked."""
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
        if self._regular and grown == self._fastest and grown in needed:  # the bytes of every tensor grow so
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
        """The largest error of any instant when a recording is held out (the largest, then the smallest).

        It is a share of the range of heights over the recordings; None if too few recordings are left.
        """
        worst, scale = 0.0, max(float(np.ptp(heights, axis=0).max()), 1.0)
        for out in (int(order[-1]), int(order[0])):
            off = self._off(degrees, heights, out)
            if off is None:
                return None
            worst = max(worst, float(off.max() / scale))
        return worst

    def _off(self, degrees: tuple[int, ...], heights: NDArray[np.float64], out: int) -> NDArray[np.float64] | None:
        """Error in bytes of each instant of one recording when fitted to the others; None if these are too few."""
        rows = [i for i in range(len(self._at)) if i != out]
        terms = self._terms(degrees, self._at[rows])
        if np.linalg.matrix_rank(terms) < terms.shape[1]:
            return None
        found: NDArray[np.float64] = np.abs(self._fitted(degrees, heights, rows, self._at[[out]])[0] - heights[out])
        return found

    # --- answers -----------------------------------------------------------------------------------------------------

    def predictions(self, sizes: Iterable[Sizes], memory_bytes: int, steps: int) -> Predictions:
        """Predict the step at several sizes; see :class:`Predictions`.

        Raises:
            UsageError: if one of them lacks a size.
        """
        return Predictions(
            degrees=dict(zip(self.names, self.degrees, strict=True)), aligned=self.aligned, checked=self.checked,
            left_out=self.left_out, points=tuple(self.at(s) for s in sizes), memory_bytes=memory_bytes, steps=steps,
        )

    def at(self, sizes: Sizes) -> Prediction:
        """Predict the step at one combination of sizes.

        Raises:
            UsageError: if a size is missing.
        """
        missing = [n for n in self.names if n not in sizes]
        if missing:
            raise UsageError(f"no value for {', '.join(missing)}: give --set {missing[0]}=VALUE")
        at = np.array([[sizes[n] for n in self.names]])
        every = range(len(self._at))
        tops = [self._fitted(self.degrees, self._heights(k), every, at)[0] for k in range(self._count)]
        peaks = [float(t.max()) for t in tops]
        where = int(np.argmax(peaks))
        reach = float(np.prod(at / self._at.max(axis=0)))
        blind = not self.checked or not self.aligned
        doubt = max(BLIND_DOUBT if blind else LEAST_DOUBT, self._unseen(at[0], tops) / peaks[where] - 1)
        if self._constant and reach > 1:  # sizes that are rounded up to a multiple may grow at the next one
            doubt = max(doubt, reach - 1)
        if self._drifts:
            doubt = max(doubt, DRIFT)
        if self._calls_libraries and (at > self._at.max(axis=0)).any():
            doubt = max(doubt, LIBRARY_DOUBT)
        if self._lower is not None:  # the truth lies between two degrees, neither of which could be checked
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
        """Seconds of a warm step; no part of it takes less time as a size grows, however noisy the recordings were.

        From the seconds of a few steps, only the time per sample of a batch can be estimated: a higher power would be noise.
        """
        degrees = [min(d, 1) if _is_batch(n) else d for n, d in zip(self.names, self.degrees, strict=True)]
        seconds = np.array([[_seconds_of(s) for s in steps[1:]] for steps in self._columns]).min(axis=1)
        parts, _ = nnls(self._terms(degrees, self._at) / seconds[:, None], np.ones(len(seconds)))
        return float((self._terms(degrees, at) @ parts)[0])

    def _unseen(self, at: NDArray[np.float64], tops: Sequence[NDArray[np.float64]]) -> float:
        """The peak if the error at the held-out recording grows as fast as the fastest-growing tensor.

        If no tensor grows faster than the fitted degree, the error is workspace, which grows at most as fast as the tensors.
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
        """The warm step's graph at some sizes, for planning; None if the recordings do not run the same operators."""
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
    """Seconds of a step's operators, without the overhead of recording them; of the whole step if they were not timed."""
    return sum(decode_run(int(f))[0] for f in step.entries["flags"][step.ops]) or float(step.row.seconds)


def _is_batch(name: str) -> bool:
    """Whether a size is a number of samples: steps are linear in it, so a higher degree must be shown, not assumed."""
    return "batch" in name.lower() or name.lower() in ("b", "bs", "n")


def _alike(steps: Sequence[RecordedStep]) -> bool:
    """Whether steps ran the same operators in the same modules."""
    first = [(steps[0].names[e["a"]], steps[0].names[e["b"]]) for e in steps[0].entries[steps[0].ops]]
    return all(
        len(s.ops) == len(first) and [(s.names[e["a"]], s.names[e["b"]]) for e in s.entries[s.ops]] == first for s in steps[1:]
    )
