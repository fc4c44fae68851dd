# Needs Python 3.11 or newer, make and g++; everything else is installed into .venv, but for Chromium,
# in which tests look at pages: apt-get installs it where none is found.
#   make demo   a real model from download to answer
#   make test   lint, types and all CPU tests (TESTS=tests/core to run some, WORKERS=4 processes)
#   make plans  golden plans of presets and targets anew (PLANS=folder to write them elsewhere)

PYTHON ?= python3
CXX := $(if $(filter default undefined,$(origin CXX)),g++,$(CXX))
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export SITSC_CACHE ?= $(CURDIR)/.cache
MODELS := $(SITSC_CACHE)/models
MODEL := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf
MINILM := $(MODELS)/all-MiniLM-L6-v2
FETCH := import pathlib, sitsc.models.fetch as f; f.fetch_smollm2(pathlib.Path("$(MODELS)"))
FETCH_MINILM := import pathlib, sitsc.models.fetch_minilm as f; f.fetch_minilm(pathlib.Path("$(MODELS)"))
OLD := import sys; sys.version_info < (3, 11) and sys.exit("Python 3.11 or newer is needed")
TESTS ?=
PLANS ?= plans
# A file of tests is one process's; threads that wait do so without taking the other's core.
WORKERS ?= 2
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

BROWSERS := chromium chromium-browser google-chrome
CHROMIUM := apt-get install -qq -y --no-install-recommends chromium

.PHONY: demo test browser plans lint format clean

demo: $(INSTALLED)
	$(BIN)/sitsc demo

test: lint browser $(MODEL) $(MINILM)
	SITSC_SMOLLM2=$(MODEL) SITSC_MINILM=$(MINILM) $(PYTEST) $(TESTS)

browser:
	@for name in $(BROWSERS); do command -v $$name > /dev/null && exit 0; done; \
	{ $(CHROMIUM) || { apt-get update -qq && $(CHROMIUM); }; } > /dev/null 2>&1 || \
	{ echo "tests of pages need Chromium: apt-get install chromium"; exit 1; }

plans: $(INSTALLED)
	$(BIN)/sitsc plan make --list plans/plans.toml --jobs $(WORKERS) -o $(PLANS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(MODEL): | $(INSTALLED)
	$(BIN)/python -c '$(FETCH)'

$(MINILM): | $(INSTALLED)
	$(BIN)/python -c '$(FETCH_MINILM)'

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(OLD)'
	@command -v $(CXX) > /dev/null || { echo "g++ is needed (or set CXX)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .cache demo build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
