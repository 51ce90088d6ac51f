"""Laws of randomly drawn scripts, under every budget.

The bits are those of the baseline. A budget is held, or refused in the first three steps, or the run says that it was not
held. No floor is above a peak that a run has reached within its budget, and no reported baseline peak is above the baseline's
real one.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lowtide
import pytest
import torch
import zoo
from harness import FIRST_CALLS_BYTES, FULL, TOLERANCE_BYTES, Plain, above_of, budgeted, close, plain, remembering
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lowtide.runtime.control import step_audit
from lowtide.runtime.control.step_audit import REFUSED
from drawn import ROUTES, Program, job_of, programs

STEPS = 6
PROGRAMS, PAIRS = (1000, 1000) if FULL else (12, 6)
PLAIN_TOO_HIGH = 0.005
"""Share by which the reported baseline peak may be too high, beyond the tolerance in bytes."""
SHARES = (0.9, 0.75, 0.6, 0.4)
"""Budgets, as shares of what the baseline takes above the bytes live before."""


@settings(max_examples=PROGRAMS, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=not FULL)
@given(programs(), st.sampled_from(SHARES), st.booleans())
def test_any_script_keeps_its_bits_under_any_budget(program: Program, share: float, offload: bool) -> None:  # noqa: FBT001
    """The laws of this module, for scripts that Hypothesis draws."""
    holds(program, share, offload=offload)


@pytest.mark.long
@settings(max_examples=PROGRAMS, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=not FULL)
@given(programs(), st.sampled_from(ROUTES), st.sampled_from(SHARES), st.booleans())
def test_scripts_whose_steps_run_other_operators_keep_their_bits(
    program: Program, route: str, share: float, offload: bool,  # noqa: FBT001
) -> None:
    """The laws of this module, where layers are left out or repeated from step to step."""
    holds(replace(program, route=route), share, offload=offload)


def test_a_value_kept_only_by_a_record_is_not_in_the_baseline_peak() -> None:
    """A layer's result cannot be recomputed because a buffer that it was made from has been written, so records refer to it.

    Its bytes used to count for as long as they did: one activation too many at the highest point of the backward.
    """
    layers = ("added_in_place", "layer_norm", "sigmoid", "transposed", "sigmoid", "relu_", "relu_", "added_in_place", "running")
    program = Program(
        layers=layers, width=32, rows=2048, loss="cross_entropy", optimizer="adam_single", accumulate=1, zero="backward",
        evaluate=False, clip=True, read=-1, keep="nothing", varying=False, schedule=True, autocast=False, flags=True, late=False,
    )  # fmt: skip
    for _ in range(3):  # one time in ten the records had gone by then
        holds(program, 0.75, offload=False)


def test_a_step_whose_units_leave_their_plan_is_not_reported_as_planned() -> None:
    """The micro-batches leave their plan twice and run online from then on.

    Such steps used to be reported as planned, with a predicted peak that they exceeded by 8 %, although not the budget.
    """
    program = Program(
        layers=("complex", "residual", "linear", "running", "sigmoid"), width=256, rows=2048, loss="cross_entropy",
        optimizer="adagrad", accumulate=3, zero="backward", evaluate=False, clip=True, read=-1, keep="nothing", varying=False,
        schedule=True, autocast=False, flags=False, late=False,
    )  # fmt: skip
    holds(program, 0.9, offload=False)


def test_a_step_held_online_with_the_drops_of_a_plan_raises_the_prediction() -> None:
    """Two branches take turns, so every other step is held online, and what a plan of the other branch drops is dropped at once.

    Such steps are reported as planned. They used to exceed the predicted peak by 0.8 %, although not the budget.
    """
    program = Program(
        layers=("by_step", "squared"), width=64, rows=2048, loss="two_backwards", optimizer="sgd", accumulate=1,
        zero="backward", evaluate=False, clip=False, read=-1, keep="nothing", varying=False, schedule=False, autocast=False,
        flags=False, late=False,
    )  # fmt: skip
    holds(program, 0.9, offload=False)


def test_gradients_made_anew_are_not_in_the_baseline_of_checkpointed_scripts_twice() -> None:
    """The script as it is written was recorded in a first step, which allocates gradients, and compared with a later one."""
    program = Program(
        layers=("linear", "linear", "linear", "checkpointed"), width=64, rows=512, loss="square", optimizer="sgd", accumulate=1,
        zero="backward", evaluate=False, clip=False, read=-1, keep="nothing", varying=False, schedule=False, autocast=False,
        flags=False, late=False,
    )  # fmt: skip
    holds(program, 0.9, offload=False)


@pytest.mark.parametrize("layers", [("transposed", "linear"), ("linear", "transposed")])
def test_watching_checkpoints_takes_no_memory(layers: tuple[str, ...]) -> None:
    """Digests of results that are transposed in memory used to copy them, which the recording took for the script's."""
    program = Program(
        layers=layers, width=32, rows=2048, loss="square", optimizer="sgd", accumulate=1, zero="forward", evaluate=False,
        clip=False, read=-1, keep="nothing", varying=False, schedule=False, autocast=False, flags=False, late=False,
        checkpoints="not reentrant",
    )  # fmt: skip
    holds(program, 0.9, offload=False)


def test_an_evaluation_does_not_grow_with_the_sizes_of_a_unit() -> None:
    """The last unit followed a plan of one of other sizes, and the evaluation's peak was told 2 % larger with the unit's."""
    program = Program(
        layers=("linear", "batch_norm"), width=128, rows=2048, loss="two_backwards", optimizer="sgd", accumulate=1,
        zero="backward", evaluate=True, clip=False, read=-1, keep="nothing", varying=True, schedule=False, autocast=True,
        flags=False, late=False, route="rounds",
    )  # fmt: skip
    holds(program, 0.9, offload=True)


def test_a_unit_whose_recording_was_forgotten_meanwhile_goes_on() -> None:
    """A micro-batch of other sizes ran other operators, so all recordings like it were discarded, also that of one which was
    missing its prediction: the run was ended by a KeyError.
    """
    program = Program(
        layers=("linear",) * 6, width=32, rows=64, loss="square", optimizer="sgd", accumulate=2, zero="backward",
        evaluate=False, clip=False, read=-1, keep="nothing", varying=True, schedule=False, autocast=False, flags=False,
        late=False,
    )  # fmt: skip
    holds(program, 0.9, offload=True)


@pytest.mark.parametrize(("width", "clip"), [(256, False), (128, True)])
def test_units_that_mostly_make_gradients_say_nothing_of_sizes(width: int, clip: bool) -> None:  # noqa: FBT001
    """Two layers with large weights and few rows: what a unit rises by besides gradients is nearly nothing, so that its ratio
    to the recorded rise was 0 or beyond all bounds. A division by it ended the run, and 3.7 GiB were reported as the
    baseline's peak.
    """
    program = Program(
        layers=("linear", "linear"), width=width, rows=64, loss="square", optimizer="sgd", accumulate=1, zero="forward",
        evaluate=False, clip=clip, read=-1, keep="nothing", varying=True, schedule=False, autocast=False, flags=False,
        late=False,
    )  # fmt: skip
    holds(program, 0.9, offload=True)


def test_states_that_exist_before_the_first_update_are_in_the_base_of_recordings() -> None:
    """Adagrad makes its states when it is created.

    They used to count as made since the first recording, together with gradients that ``zero_grad`` drops before the backward:
    the minimum that a refusal gave was above the baseline's peak.
    """
    program = Program(
        layers=("linear", "linear"), width=256, rows=2048, loss="square", optimizer="adagrad", accumulate=1, zero="backward",
        evaluate=False, clip=False, read=-1, keep="nothing", varying=False, schedule=False, autocast=False, flags=False,
        late=False,
    )  # fmt: skip
    holds(program, 0.9, offload=False)


@settings(max_examples=PAIRS, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=not FULL)
@given(programs(), st.sampled_from((*ROUTES, "all")), st.sampled_from(SHARES), st.sampled_from(SHARES))
def test_a_second_run_keeps_its_bits_by_what_the_first_one_recorded(
    program: Program, route: str, first: float, second: float
) -> None:
    """The laws of this module, for two runs of one script under two budgets, of which the second begins with the first's plans.
    """
    drawn = program if route == "all" else replace(program, route=route)
    with tempfile.TemporaryDirectory() as folder:
        for share in (first, second):
            with remembering(Path(folder) / "kept"):
                holds(drawn, share, offload=True)


def holds(program: Program, share: float, *, offload: bool) -> None:
    """Check the laws for one program and budget; if it is refused, also half-way from the bytes needed to the baseline's peak.
    """
    make = functools.partial(job_of, program)
    reference = plain(make, STEPS)
    above = int(above_of(reference, share))
    needed = _held(make, reference, above, offload=offload)
    if needed is not None and needed < reference.above_bytes:
        _held(make, reference, (needed + reference.above_bytes) // 2, offload=offload)


def _held(make: Callable[[], zoo.Job], reference: Plain, above: int, *, offload: bool) -> int | None:
    """Check the laws for a budget ``above`` the bytes live before; if it is refused, return the bytes above them that are said
    to be needed.
    """
    done = [0]

    def counting() -> zoo.Job:
        job = make()

        def step(number: int) -> torch.Tensor:
            loss = job.step(number)
            done[0] = number + 1
            return loss

        return replace(job, step=step)

    told: list[str] = []
    try:
        with pytest.MonkeyPatch.context() as listening:
            listening.setattr(step_audit, "tell", told.append)
            run = budgeted(counting, above, STEPS, offload=offload)
    except lowtide.BudgetError as refused:
        assert done[0] <= REFUSED, "one step later than usual where gradients were moved in the last of the first steps"
        outside = refused.budget_bytes - above
        assert refused.bound_bytes - outside <= reference.above_bytes + TOLERANCE_BYTES
        assert max(refused.bound_bytes, refused.lowest_bytes) > refused.budget_bytes
        return max(refused.bound_bytes, refused.lowest_bytes) - outside
    outcome = run.outcome
    assert run.bits == reference.bits
    assert len(outcome.steps) == STEPS
    highest = max(outcome.setup_peak_bytes, *(s.peak_bytes for s in outcome.steps))
    assert abs(highest - run.peak_bytes) <= FIRST_CALLS_BYTES, "as the heap counted"
    if not outcome.excused:
        assert outcome.held == (run.peak_bytes <= run.budget_bytes), run.over
    late = [s.index for s in outcome.over if s.index >= REFUSED]
    assert [f"step {n} peaked at" in line for n, line in zip(late, told)] == [True] * bool(late), "the first is told at once"
    last, plan = outcome.steps[-1], outcome.plan
    if plan is not None:
        too_high = plan.baseline_peak_bytes - (run.budget_bytes - above) - reference.above_bytes
        assert too_high <= max(TOLERANCE_BYTES, PLAIN_TOO_HIGH * reference.above_bytes)
        if outcome.held:
            assert plan.bound_peak_bytes <= max(s.peak_bytes for s in outcome.steps) + TOLERANCE_BYTES
        if outcome.held and last.policy == "planned" and plan.predicted_peak_bytes is not None:
            assert last.peak_bytes <= plan.predicted_peak_bytes or close(last.peak_bytes, plan.predicted_peak_bytes)
    return None
