# Everything a fresh machine needs is set up here: Python 3.11 or newer and pip are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
STAMP := $(VENV)/.ready
HEAP = $$($(BIN)/python -c "from pathlib import Path; import lowtide; print(next(iter(Path(lowtide.__file__).parent.glob('probe/_heap*.so')), ''))")
PYTEST = LD_PRELOAD=$(HEAP) $(BIN)/python -m pytest --dist loadgroup

SUITE = tests/unit tests/property tests/torch tests/process tests/faults

.PHONY: demo test test-long test-slow test-cuda lint bench bench-planner bench-predicted bench-record bench-leaks bench-guard bench-sizes bench-device bench-planted bench-corpus mutate picture clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Two processes share the cores here: one thread each. `test-slow` repeats what matters with as many as torch takes by itself.
test: $(STAMP) lint
	OMP_NUM_THREADS=1 $(PYTEST) -n 2 --durations=25 -m "not takes_long and not takes_hours" $(SUITE)

# The rest of the same suite: more models, more frameworks, more ways to be killed.
test-long: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTEST) -n 2 --durations=25 -m takes_long $(SUITE)

# The matrix with torch's own number of threads, one case at a time: two at once would wait for each other's threads.
test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTEST) -n 2 -m takes_hours $(SUITE)
	LOWTIDE_FULL=1 $(PYTEST) -n 0 tests/torch/test_matrix.py tests/torch/test_situations.py
	LOWTIDE_FULL=1 OMP_NUM_THREADS=1 $(PYTEST) -n 2 --timeout 7200 tests/slow tests/faults tests/process/test_checkpoint.py \
		tests/process/test_recycled_frameworks.py tests/torch/test_random_programs.py

test-cuda: $(STAMP)
	$(BIN)/python -m pytest tests/cuda -m cuda

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench-record: $(STAMP)
	$(BIN)/python -m pip install --quiet memray
	$(BIN)/python benchmarks/record.py --json benchmarks/results/record.json
	$(BIN)/python benchmarks/watching.py --json benchmarks/results/watching.json

# Scripts of some 35 libraries, in an environment of their own: hours. What was measured with this very code is kept. Some of
# the libraries bring a torchvision that was built for another torch; none of the scripts needs it.
CORPUS = build/corpus/bin/python
bench-corpus:
	test -x $(CORPUS) || $(PYTHON) -m venv build/corpus
	$(CORPUS) -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	$(CORPUS) -m pip install --quiet "$(TORCH)"
	$(CORPUS) -m pip install --quiet --no-build-isolation "$(TORCH)" --editable ".[corpus]"
	$(CORPUS) -m pip uninstall --quiet --yes torchvision torchaudio
	$(CORPUS) benchmarks/run_corpus.py --resume --json benchmarks/results/corpus.json --markdown docs/corpus.md

# The README's picture: needs Chromium.
picture: $(STAMP)
	$(BIN)/lowtide record --quiet -o build/small_gpt.lowtide examples/small_gpt.py --steps 4
	$(BIN)/lowtide report build/small_gpt.lowtide --html build/small_gpt.html 2>/dev/null
	chromium --headless --no-sandbox --disable-gpu --window-size=1400,1010 --virtual-time-budget=5000 \
		--screenshot=docs/images/report.png build/small_gpt.html

# GRAPHS: a folder of planning instances as node-link JSON (docs/planner.md says whose).
bench-planner: $(STAMP)
	$(BIN)/python -m pip install --quiet matplotlib
	$(BIN)/python benchmarks/planner.py --layered $(if $(GRAPHS),--graphs $(GRAPHS)) --json benchmarks/results/planner.json \
		--picture docs/images/scale.png

bench-leaks: $(STAMP)
	$(BIN)/python benchmarks/leaks/suite.py --json benchmarks/results/leaks.json
	$(BIN)/python benchmarks/leaks/accuse.py --seeds 3 --json benchmarks/results/accuse.json

# Which small faults the tests notice, sampled by package: hours.
mutate: $(STAMP)
	$(BIN)/python -m pip install --quiet cosmic-ray
	$(BIN)/python benchmarks/mutants.py --json benchmarks/results/mutants.json

# How many random scripts it takes to find a fault that is put into the runtime: half an hour.
bench-planted: $(STAMP)
	$(BIN)/python benchmarks/planted.py --json benchmarks/results/planted.json

bench-guard: $(STAMP)
	$(BIN)/python benchmarks/guard/graceful.py --json benchmarks/results/guard.json
	$(BIN)/python benchmarks/data/throughput.py --json benchmarks/results/data.json

bench-sizes: $(STAMP)
	$(BIN)/python benchmarks/loss.py --json benchmarks/results/loss.json
	$(BIN)/python benchmarks/predict.py --json benchmarks/results/predict.json
	$(BIN)/python -m pip install --quiet torchinfo
	$(BIN)/python benchmarks/estimators.py --json benchmarks/results/estimators.json

# Needs a CUDA device.
bench-device: $(STAMP)
	$(BIN)/python benchmarks/device.py --json benchmarks/results/device.json

bench: $(STAMP)
	$(BIN)/python benchmarks/budget.py --json benchmarks/results/budget.json
	$(BIN)/python benchmarks/walks.py --json benchmarks/results/walks.json
	$(BIN)/python benchmarks/lengths.py --json benchmarks/results/lengths.json
	$(BIN)/python benchmarks/floors.py --json benchmarks/results/floors.json
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/offload_file.py --json benchmarks/results/offload_file.json
	$(BIN)/python benchmarks/rivals.py --json benchmarks/results/rivals.json
	$(BIN)/python benchmarks/resident.py --json benchmarks/results/resident.json
	$(BIN)/python benchmarks/checkpointed.py --without --json benchmarks/results/checkpointed.json

# Twenty models at four budgets: an hour, on a machine with nothing else to do.
bench-predicted: $(STAMP)
	$(BIN)/python benchmarks/predicted.py --json benchmarks/results/predicted.json

# torch comes first, by itself: the package only asks for a lower bound and never replaces the torch that is there.
$(STAMP): pyproject.toml setup.py src/lowtide/probe/heap.c src/lowtide/planning/search/search.c src/lowtide/planning/unit/player.cpp src/lowtide/runtime/gate.cpp
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev,models]"
	touch $@

clean:
	rm -rf $(VENV) build dist
