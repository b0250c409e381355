# `make demo` and `make test` are all that a newcomer needs; both set up everything from nothing. `make test` takes minutes and
# shows that a clone works; `make test-all` is everything that continuous integration runs.
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= python3

.PHONY: demo test test-all setup lint types contracts quick-1 quick-2 unit unit-1 unit-2 sim e2e e2e-1 e2e-2 e2e-3 e2e-4 faults hostile wheel campaign fuzz fuzz-channels benchmark benchmark-gpu evidence evidence-quick evidence-gpu pictures clean

setup: $(VENV)/.done
$(VENV)/.done: pyproject.toml constraints.txt
	@echo "setup, 1 of 3: a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@echo "setup, 2 of 3: PyTorch, the largest part; this takes minutes, without a word"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	@echo "setup, 3 of 3: Potluck, and what else it needs; minutes, too"
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@
	@echo "setup is done; . $(BIN)/activate lets a terminal find potluck"

demo: setup
	rm -rf demo-run
	$(BIN)/potluck demo --out demo-run --json demo-run.json

test: setup
	$(MAKE) -j2 --output-sync=target lint quick-1 quick-2 types contracts

# Most of `e2e`, `faults` and `hostile` wait for real time to pass, so more of them run beside each other than there are cores. What waits
# longest comes first; what only computes, and fills the cores whenever others wait, last.
test-all: setup
	$(MAKE) -j5 --output-sync=target lint hostile faults e2e-4 e2e-3 e2e-1 e2e-2 unit-2 unit-1 sim types contracts

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

contracts: setup
	$(BIN)/lint-imports

# Parts of `unit` and `e2e`, which take about as long as each other; `quick` is `unit` without what takes many seconds, and one demo.
UNIT_1 := $(addprefix tests/unit/,protocol bootstrap peer/net peer/ui)
QUICK := -m "not slow and not campaign"
quick-1: setup
	$(BIN)/python -m pytest tests/docs tests/parity tests/e2e/test_demo.py $(UNIT_1) $(QUICK)

quick-2: setup
	$(BIN)/python -m pytest tests/unit $(addprefix --ignore=,$(UNIT_1)) $(QUICK)

unit: setup
	$(BIN)/python -m pytest tests/docs tests/unit tests/parity tests/fuzz

unit-1: setup
	$(BIN)/python -m pytest tests/docs tests/parity tests/fuzz $(UNIT_1)

unit-2: setup
	$(BIN)/python -m pytest tests/unit $(addprefix --ignore=,$(UNIT_1))

e2e_files = $(wildcard $(addprefix tests/e2e/test_,$(addsuffix .py,$(1))))
E2E_1 := $(call e2e_files,typed_commands new_user lying_stages scores several_devices wheel)
E2E_2 := $(call e2e_files,service doctor)
E2E_3 := $(call e2e_files,appoint audit error_classes group_signals held_out hours monitor_costs run_set)
e2e-1: setup
	$(BIN)/python -m pytest $(E2E_1)

e2e-2: setup
	$(BIN)/python -m pytest $(E2E_2)

e2e-3: setup
	$(BIN)/python -m pytest $(E2E_3)

e2e-4: setup
	$(BIN)/python -m pytest tests/e2e $(addprefix --ignore=,$(E2E_1) $(E2E_2) $(E2E_3))

sim: setup
	PYTHONHASHSEED=0 $(BIN)/python -m pytest tests/sim

e2e: setup
	$(BIN)/python -m pytest tests/e2e

faults: setup
	$(BIN)/python -m pytest tests/faults

hostile: setup
	$(BIN)/python -m pytest tests/hostile

# The wheel, into dist/, and a run that it takes part in from an empty environment with the newest dependencies. Not part of `make test-all`:
# minutes and gigabytes, less with the CPU build of PyTorch (PIP_EXTRA_INDEX_URL). TORCH=torch==2.13.0 takes that release of it.
TORCH ?= torch
wheel: setup
	$(BIN)/python -m hatchling build --target wheel
	TORCH="$(TORCH)" $(BIN)/python -m pytest tests/e2e/test_wheel.py -m campaign

# The pictures of the documents, and every screen into pictures/: of the demo that a monitor watches, and of a volunteer's first minutes in a
# run of its own, as `python -m tests.docs.pictures --volunteer pictures` takes them alone. Needs Chromium.
pictures: setup
	$(BIN)/python -m tests.docs.pictures docs/images --all pictures

# Not part of `make test-all`: minutes to hours; results go to docs/results/.
campaign: setup
	$(BIN)/python -m pytest tests -m campaign
	$(BIN)/python -m tests.sim.run --seeds 0:10000
	$(BIN)/python -m tests.sim.run --seeds 0:1000 --liars 6
	$(BIN)/python -m tests.sim.run --seeds 0:1000 --liars 30
	$(BIN)/python -m tests.sim.run --seeds 0:1000 --colluders
	$(BIN)/python -m tests.sim.run --seeds 0:1000 --family
	$(BIN)/python -m tests.sim.run --seeds 0:9 --long
	$(BIN)/python -m tests.sim.run --seeds 0:1000 --aggregates
	$(BIN)/python -m tests.sim.run --seeds 0:1000 --aggregates --lying-nodes
	$(BIN)/python -m tests.sim.run --seeds 0:1000 --probation 1
	$(BIN)/python -m tests.sim.run --seeds 0:1000 --lying-nodes
	$(BIN)/python -m tests.sim.run --seeds 0:1000 --lying-nodes --calm
	$(BIN)/python -m tests.sim.run --seeds 0:1000 --quarrels
	$(BIN)/python -m tests.sim.run --seeds 0:1000 --quarrels --calm
	$(BIN)/python -m tests.sim.roles --seeds 0:1000
	$(BIN)/python -m tests.benchmarks.honest --rounds 10000
	$(BIN)/python -m tests.faults.soak --minutes 30
	$(BIN)/python -m tests.faults.repair --times 100

# Messages to every channel, each within a bound of processor time by its size; what was done is kept, so a run that was cut off goes on.
fuzz-channels: setup
	nice $(BIN)/python -m tests.fuzz.campaign --channels --inputs 10000000 --keep fuzz-channels.jsonl

fuzz: setup
	nice $(BIN)/python -m tests.fuzz.campaign --inputs 10000000
	nice $(BIN)/python -m tests.fuzz.handlers --messages 10000000

benchmark: setup
	$(BIN)/python -m tests.benchmarks.swarm
	$(BIN)/python -m tests.benchmarks.codec
	$(BIN)/python -m tests.benchmarks.newcomer

# On a machine with a CUDA card; what was measured is kept in gpu.jsonl, so a run that was cut off goes on. DEVICE=cpu MODELS=small elsewhere.
DEVICE ?= cuda
MODELS ?= 178M 512M
benchmark-gpu: setup
	$(BIN)/python -m tests.benchmarks.gpu --device $(DEVICE) --model $(MODELS) --out gpu-$(DEVICE).jsonl

# The tables of the papers again, by small models: two hours on two cores, a quarter of an hour, and larger models on a GPU. What was trained is
# kept in evidence.jsonl and evidence.parts, so a run that was cut off goes on. MODEL=178M is the larger one. CORPUS is a folder of `potluck data
# build`: a vocabulary of 8,192 in sequences of 512 for 27M, of 32,000 in sequences of 1,024 for 178M.
EVIDENCE := -m tests.benchmarks.evidence --keep evidence.jsonl --page docs/results/evidence.md
MODEL ?= 27M
CORPUS ?= corpus
evidence: setup
	$(BIN)/python $(EVIDENCE)

evidence-quick: setup
	$(BIN)/python $(EVIDENCE) --quick

evidence-gpu: setup
	$(BIN)/python $(EVIDENCE) --scale $(MODEL) --device $(DEVICE) --corpus $(CORPUS)

clean:
	rm -rf $(VENV) demo-run demo-run.json dist
