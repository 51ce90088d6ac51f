"""The guard's pure parts: rules, forecasts, causes, and which errors mean that memory ran out."""

from __future__ import annotations

import ctypes
import errno
import signal
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from scipy import stats

from lowtide.base.errors import UsageError
from lowtide.guard.cause import Cause, Ending, why
from lowtide.guard.forecast import Forecast, Growth, slopes
from lowtide.guard import fence, keep, memory, process
from lowtide.guard.fence import Watching, cgroup
from lowtide.guard.memory import Reading
from lowtide.guard.outcome import Generation, Live
from lowtide.guard.rule import RecycleWhen, Rule, parse
from lowtide.probe.beat import Beat
from lowtide.probe.catalogue import Where, out_of_memory
from lowtide.report.guard import forecast
from lowtide.base.units import MIB

# --- rules ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "rule"), [
    ("epoch", Rule(RecycleWhen.EPOCH)), ("exit", Rule(RecycleWhen.EXIT)), ("never", Rule(RecycleWhen.NEVER)), ("every=500", Rule(RecycleWhen.EVERY, every=500)),
    ("watermark", Rule(RecycleWhen.WATERMARK)), ("watermark=80%", Rule(RecycleWhen.WATERMARK, watermark=0.8)),
])
def test_every_recycle_rule_is_parsed(text, rule):
    assert parse(text) == rule


@pytest.mark.parametrize("text", ["", "epochs", "every", "every=0", "every=-3", "every=x", "watermark=0%", "watermark=100%", "exit=3"])
def test_an_unknown_recycle_rule_is_refused(text):
    with pytest.raises(UsageError, match="--recycle"):
        parse(text)


# --- forecast -------------------------------------------------------------------------------------------------------------


def forecast_of(sizes, every=0.1):
    forecast = Forecast()
    for i, size in enumerate(sizes):
        forecast.add(100 + i * every, size)
    return forecast


@pytest.mark.parametrize("rate", [1, 5, 20, 50])
@pytest.mark.parametrize("noise", [0, 5, 20])
def test_a_steady_leak_is_forecast_within_20_percent(rate, noise):
    """Growth of 1 to 50 MiB/s under a sawtooth of temporaries and noise: half-way to the limit, the forecast time is within 20
    %.
    """
    random = np.random.default_rng(rate)
    limit = 500 + rate * 20
    times = np.arange(0, 40, 0.1)
    sizes = 300 + rate * times + noise * np.abs(np.sin(times * 7)) + random.normal(0, 0.3, len(times))
    half = int(np.argmax(sizes >= (300 + limit) / 2)) or len(times) - 1
    growth = forecast_of(sizes[:half] * MIB).growth()
    assert growth is not None
    left = growth.seconds_to(limit * MIB)
    true = (limit - 300 - noise) / rate - times[half - 1]
    assert left == pytest.approx(true, rel=0.2, abs=0.5)


def test_a_level_size_has_no_forecast():
    """Noise around a constant size gives no time at which the limit would be reached."""
    random = np.random.default_rng(3)
    sizes = 500 * MIB + random.normal(0, MIB, 600)
    growth = forecast_of(sizes).growth()
    assert growth is not None
    assert growth.seconds_to(1000 * MIB) is None


@pytest.mark.parametrize(("noise", "said"), [(1, "does not grow"), (200, "a second, if at all")])
def test_noise_that_hides_growth_is_not_reported_as_no_growth(noise, said):
    """"does not grow" is reported only where the readings show it; under large noise the report gives the rate "if at all"."""
    random = np.random.default_rng(3)
    growth = forecast_of(500 * MIB + random.normal(0, noise * MIB, 60)).growth()
    assert growth is not None
    assert growth.seconds_to(1000 * MIB) is None
    assert forecast(live_of(growth, 1000 * MIB)).endswith(said)
    assert forecast(live_of(None, 1000 * MIB)) == "too early to say"


def live_of(growth, cap):
    reading = Reading(seconds=0.0, bytes=0, unique_bytes=0, resident_bytes=0, device_bytes=0, processes=1, pressure=0.0)
    return Live(
        generation=0, seconds=6.0, reading=reading, cap_bytes=cap, growth=growth,
        left_seconds=None if growth is None else growth.seconds_to(cap), beat=Beat(), steps_per_second=0.0, asked="", done=(),
    )


def test_warm_up_growth_is_forgotten():
    """Ten seconds of fast growth, then a level: once the level has lasted longer, there is no forecast."""
    sizes = np.concatenate([np.linspace(0, 400, 100), np.full(300, 400.0)]) * MIB
    growth = forecast_of(sizes).growth()
    assert growth is not None
    assert growth.seconds_to(1000 * MIB) is None


def test_growth_long_ago_is_forgotten():
    """After ten minutes of growth and three without, memory is reported as flat."""
    sizes = np.concatenate([300 + 5 * np.arange(0, 600, 0.5), np.full(360, 3300.0)])
    growth = forecast_of(sizes * MIB, every=0.5).growth()
    assert growth.is_flat(4000 * MIB)
    assert growth.seconds_to(4000 * MIB) is None


def test_slopes_equal_those_of_scipy():
    """The Theil-Sen estimate and its interval, with ties and without."""
    random = np.random.default_rng(5)
    for n in (6, 9, 12):
        for _ in range(50):
            times = np.sort(random.random(n)) * 100
            sizes = np.round(times * random.normal() + random.normal(0, 20, n), random.integers(-1, 3))
            expected = stats.theilslopes(sizes, times, 0.95)
            assert np.allclose(slopes(times, sizes), (expected.slope, expected.low_slope, expected.high_slope))


def test_too_few_readings_give_no_growth():
    assert forecast_of(np.arange(10) * MIB).growth() is None
    assert Forecast().growth() is None


# --- causes ---------------------------------------------------------------------------------------------------------------

KILLED = -signal.SIGKILL
CASES = [
    (Ending(code=0), Cause.FINISHED),
    (Ending(code=75, saved=True), Cause.RECYCLED),
    (Ending(code=75), Cause.ERROR),  # another program's own meaning
    (Ending(code=75, saved=True, passed_on=signal.SIGTERM), Cause.STOPPED),
    (Ending(code=1, kills_within=1, error="ValueError: a bug"), Cause.ERROR),
    (Ending(code=1, kills_within=1, error="RuntimeError: DataLoader worker (pid 3) is killed by signal: Killed."), Cause.OOM_KILLER),
    (Ending(code=1, kills_within=1, counted_alone=False), Cause.ERROR),  # a neighbour in the same cgroup
    (Ending(code=KILLED, kills_within=1, counted_alone=False), Cause.OOM_KILLER),
    (Ending(code=-signal.SIGTERM, passed_on=signal.SIGTERM), Cause.STOPPED),
    (Ending(code=KILLED, kills_within=1, kills_machine=1, named=True), Cause.OOM_KILLER),
    (Ending(code=KILLED, kills_within=1), Cause.OOM_KILLER),
    (Ending(code=KILLED, kills_within=1, at_cap=True), Cause.CAP),
    (Ending(code=1, kills_within=0, at_cap=True), Cause.ERROR),  # it was at the cap once, and failed of something else
    (Ending(code=KILLED, kills_within=None, kills_machine=2, named=True), Cause.OOM_KILLER),
    (Ending(code=1, kills_within=1), Cause.OOM_KILLER),  # a worker was killed, and the program failed of it
    (Ending(code=137, kills_within=1), Cause.OOM_KILLER),  # a shell between
    (Ending(code=KILLED, kills_within=0, kills_machine=0, named=False), Cause.OUTSIDE),
    (Ending(code=KILLED, kills_machine=3, named=False), Cause.OUTSIDE),  # others were killed, not this one
    (Ending(code=KILLED, kills_within=0, kills_machine=3, named=None), Cause.UNKNOWN),
    (Ending(code=KILLED), Cause.UNKNOWN),
    (Ending(code=KILLED, ours=Cause.CAP, kills_machine=0), Cause.CAP),
    (Ending(code=-signal.SIGTERM), Cause.OUTSIDE),
    (Ending(code=-signal.SIGSEGV), Cause.CRASH),
    (Ending(code=134), Cause.CRASH),
    (Ending(code=1), Cause.ERROR),
    (Ending(code=1, memory_error=True), Cause.MEMORY_ERROR),
    (Ending(code=1, rank_lost=1), Cause.RANK),
]


@pytest.mark.parametrize(("ending", "cause"), CASES, ids=range(len(CASES)))
def test_the_cause_is_named_only_from_certain_evidence(ending, cause):
    """`why` names the cause that exit code, kernel counters and the guard's own actions prove, else "unknown"."""
    assert why(ending) is cause


def test_only_memory_causes_restart_a_process():
    """Only these four causes have to do with memory (`of_memory`)."""
    assert {c for c in Cause if c.of_memory} == {Cause.RECYCLED, Cause.OOM_KILLER, Cause.CAP, Cause.MEMORY_ERROR}


# --- cgroups --------------------------------------------------------------------------------------------------------------


def test_a_version_2_cgroup_is_created_and_read(tmp_path, monkeypatch):
    """A folder stands in for the kernel's. Usage is memory.current without the inactive file pages and active file pages;
    kills are oom_kill. Version 1 is tested on the real one, where there is one.
    """
    own = tmp_path / "user.slice" / "me"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("memory\n")
    monkeypatch.setattr("lowtide.guard.fence._own", lambda controller: None if controller else "/user.slice/me")
    made = cgroup(123 * MIB, "lowtide-1", roots=[tmp_path])
    assert made is not None
    assert (made.folder / "memory.max").read_text() == str(123 * MIB)
    assert (made.folder / "memory.swap.max").read_text() == "0"
    assert (own / "cgroup.subtree_control").read_text() == "+memory"
    (made.folder / "memory.current").write_text("1000\n")
    (made.folder / "memory.stat").write_text("anon 600\ninactive_file 150\nactive_file 50\n")
    (made.folder / "memory.events").write_text("oom 3\noom_kill 2\n")
    assert made.used(()) == 800
    assert made.kills() == 2


def test_no_cgroup_is_returned_where_none_can_be_created(tmp_path):
    assert cgroup(MIB, "lowtide-1", roots=[tmp_path]) is None
    assert Watching().used(()) is None


@pytest.mark.parametrize(("parent", "own"), [(300, 700), (700, 300)])
def test_the_smallest_limit_above_a_process_counts(tmp_path, monkeypatch, parent, own):
    """Both the process's own cgroup and its parents limit it; "max" is no limit."""
    folder = tmp_path / "user.slice" / "me"
    folder.mkdir(parents=True)
    (tmp_path / "memory.max").write_text("max\n")
    (folder.parent / "memory.max").write_text(f"{parent * MIB}\n")
    (folder / "memory.max").write_text(f"{own * MIB}\n")
    monkeypatch.setattr(fence, "CGROUPS", tmp_path)
    monkeypatch.setattr(fence, "_own", lambda controller: None if controller else "/user.slice/me")
    assert fence.room() == 300 * MIB


def test_without_a_cgroup_limit_the_machines_memory_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(fence, "CGROUPS", tmp_path)
    assert fence.room() == psutil.virtual_memory().total


# --- process scans --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("working", "looks"), [(0.0, 2), (5.0, 1)])
def test_process_scans_become_rare_by_cpu_time_not_by_waiting(monkeypatch, working, looks):
    """A scan of the process list is repeated less often if it took much CPU time. When elapsed time counted, one that took 5 s
    because no core was free left new processes unseen for 500 s.
    """
    now, worked, listed = [100.0], [0.0], []

    def pids(_):
        listed.append(now[0])
        now[0] += 5
        worked[0] += working
        return ()

    monkeypatch.setattr(memory.Tree, "pids", pids)
    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: now[0], thread_time=lambda: worked[0]))
    tree = memory.Tree()
    tree.read(Watching())
    now[0] += 0.5
    tree.read(Watching())
    assert len(listed) == looks


# --- starting again -------------------------------------------------------------------------------------------------------


def kept_up(monkeypatch, generations, restarts):
    """Run the guard on processes that end with the given (cause, checkpoints saved); returns the outcome and the wait before
    each.
    """
    waits = []

    def generation(keeper, waited):
        waits.append(waited)
        cause, saves = generations[len(waits) - 1]
        return Generation(
            number=len(waits) - 1, exit=0 if cause is Cause.FINISHED else 1, cause=cause, asked="", seconds=1.0, start_seconds=0.1,
            load_seconds=0.0, save_seconds=0.0, waited_seconds=waited, steps=1, points=saves, saves=saves, peak_bytes=1,
            unique_bytes=1, resident_bytes=1, device_bytes=0, growth_bytes_per_second=None, error=None,
        )

    monkeypatch.setattr(keep.RunKeeper, "_generation", generation)
    monkeypatch.setattr(keep.RunKeeper, "_sleep", lambda *_: None)
    outcome = keep.RunKeeper(keep.GuardSettings(command=["x"], cap_bytes=MIB, restarts=restarts)).run()
    return outcome, waits


def test_orphans_are_not_adopted_after_a_run_is_over(monkeypatch):
    """The subreaper flag is reset: otherwise a process that goes on would collect zombies that nothing waits for."""
    kept_up(monkeypatch, [(Cause.FINISHED, 1)], restarts=0)
    adopts = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(process._PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0) == 0
    assert not adopts.value


def test_failures_after_a_new_checkpoint_are_counted_from_zero(monkeypatch):
    """A new checkpoint resets the number of failures and the back-off."""
    fails = (Cause.OOM_KILLER, 0)
    outcome, waits = kept_up(monkeypatch, [fails, fails, (Cause.OOM_KILLER, 1), fails, fails, (Cause.FINISHED, 1)], restarts=3)
    assert outcome.exit_code == 0
    first = keep.BACK_OFF_SECONDS[0]
    assert waits == [0, first, 2 * first, first, 2 * first, 4 * first]


def test_failures_without_a_new_checkpoint_end_the_run(monkeypatch):
    """Three restarts are allowed; the fourth failure without a new checkpoint ends the run and says so."""
    outcome, waits = kept_up(monkeypatch, [(Cause.OOM_KILLER, 0)] * 9, restarts=3)
    assert outcome.exit_code == 1
    assert len(waits) == 4
    assert "4 times in a row without a new checkpoint" in outcome.text


# --- errors that mean that memory ran out ---------------------------------------------------------------------------------


def error(module, name, message, base=Exception):
    """An error of a type with the given full name."""
    return type(name, (base,), {"__module__": module})(message)


def test_out_of_memory_errors_of_torch_and_numpy_are_recognized():
    """Real errors of torch and NumPy on the host, and torch's own type for a device."""
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory(caught.value).where is Where.HOST
    with pytest.raises(MemoryError) as numpy:
        np.ones((1 << 50,))
    assert out_of_memory(numpy.value).where is Where.HOST
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")).where is Where.DEVICE


@pytest.mark.parametrize(("raised", "where"), [
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), Where.DEVICE),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), Where.DEVICE),
    (RuntimeError("MPS backend out of memory (MPS allocated: 1.0 GB)"), Where.DEVICE),
    (RuntimeError("unable to mmap 1024 bytes from file </torch_1>: Cannot allocate memory (12)"), Where.HOST),
    (RuntimeError("std::bad_alloc"), Where.HOST),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), Where.HOST),
    (MemoryError(), Where.HOST),
    (error("tensorflow.python.framework.errors_impl", "ResourceExhaustedError", "OOM when allocating tensor"), Where.DEVICE),
    (error("jaxlib._jax", "XlaRuntimeError", "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.", RuntimeError), Where.DEVICE),
    (error("jax.errors", "JaxRuntimeError", "RESOURCE_EXHAUSTED: Failed to allocate request", RuntimeError), Where.DEVICE),
    (ValueError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate"), Where.DEVICE),
])
def test_every_known_shortage_is_recognized_also_as_a_cause(raised, where):
    """An error that means "out of memory" is recognized with the place (host or device), raised directly or as another's
    `__cause__`.
    """
    assert out_of_memory(raised).where is where
    wrapped = ValueError("while training")
    wrapped.__cause__ = raised
    assert out_of_memory(wrapped).where is where


@pytest.mark.parametrize("raised", [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory is what I fear"), OSError(errno.ENOSPC, "full"),
    KeyError("memory"), error("jaxlib._jax", "XlaRuntimeError", "INVALID_ARGUMENT: shapes", RuntimeError),
    RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
])
def test_other_errors_are_not_taken_for_out_of_memory(raised):
    assert out_of_memory(raised) is None


def test_an_error_in_a_memory_error_handler_is_no_shortage():
    """`__context__` does not count: an error raised while a MemoryError is handled is another error."""
    try:
        try:
            raise MemoryError
        except MemoryError:
            {}["missing"]
    except KeyError as error:
        assert out_of_memory(error) is None


# --- one watched process --------------------------------------------------------------------------------------------------


def watched(**fields):
    """The guard's view of a process that holds half of its cap, without the process."""
    found = keep._Watched.__new__(keep._Watched)
    defaults = {
        "_beat": Beat(), "_cap": 100 * MIB, "_peaks": [1, 2, 3, 4], "_growth": None, "asked": "",
        "process": SimpleNamespace(began=0.0),
    }
    for name, value in (defaults | fields).items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(("left", "points", "stops"), [(7.9, 2, True), (8.1, 2, False), (7.9, 1, False), (None, 2, False)])
def test_a_stop_is_requested_while_two_gaps_and_saves_still_fit(left, points, stops):
    """Gaps of 3 s, saves of 0.5 s and one second to spare: 8 s before the cap is reached. A process with a single safe point
    is not asked, because its gap is unknown.
    """
    process_ = watched(_beat=Beat(points=points, longest_gap=3.0, longest_save=0.5))
    live = SimpleNamespace(reading=SimpleNamespace(bytes=50 * MIB), left_seconds=left)
    assert bool(process_.reason(live, 0.9)) == stops


@pytest.mark.parametrize(("low", "told"), [(5.0, 10.0), (0.0, None), (-1.0, None)])
def test_growth_of_a_generation_is_reported_only_if_certain(low, told):
    process_ = watched(_growth=Growth(rate=10.0, low=low, high=20.0, level=0.0))
    assert process_.generation(0, Ending(code=0), 0.0, {}, []).growth_bytes_per_second == told
