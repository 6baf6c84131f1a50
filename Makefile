# Two commands do everything from a fresh clone: `make tune` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Of the GPU here, or else sm_121; e.g. make tune ARCH=h200
ARCH ?=
TUNE_ARGS ?= -p B=16,H=32,S=1024,D=64 -p B=4,H=32,S=4096,D=64
comma := ,
# Where there is an NVIDIA driver, what measures is installed, too.
DRIVER := $(wildcard /proc/driver/nvidia/version)$(shell command -v nvidia-smi 2>/dev/null)
EXTRAS := $(if $(DRIVER),gpu$(comma))report
# Byte code is written where a module is imported: half of what is installed never is.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# One more than there are CPUs: many tests wait for processes, servers and clocks.
WORKERS ?= $(shell expr $$(nproc) + 1)
READY := $(VENV)/.$(if $(DRIVER),gpu,tune)-ready

# Else each of the hundreds of processes that tests start compiles the package's sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: tune test test-all test-gpu oldest aarch64 lint docs wheel release clean help

help:
	@echo "make tune   set up, tune the GPU that is here (ARCH= names another) and draw report/ (TUNE_ARGS: $(TUNE_ARGS))"
	@echo "make test   set up and run the tests that a change of every day needs"
	@echo "make test-all set up and run all tests: also servers, kills and studies"
	@echo "make test-gpu set up and run every shipped program of an H100 or H200 on it, and the tests marked gpu"
	@echo "make oldest builds with the oldest compiler that the package takes, beside the one it was set up with"
	@echo "make aarch64 looks whether each dependency has a wheel for aarch64 hosts"
	@echo "make lint   ruff and mypy"
	@echo "make docs   the documentation as a site in site/"
	@echo "make wheel  build the wheel and try it outside the checkout"
	@echo "make release builds and checks what is published, and says how to publish it"
	@echo "make clean  remove the virtual environment and build products"

tune: $(READY)
	$(BIN)/tiledsched tune $(if $(ARCH),--arch $(ARCH)) $(TUNE_ARGS) --report report

# All tests of docs/studies are slow.
test: $(VENV)/.test-ready
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m 'not slow' tests

test-all: $(VENV)/.test-ready
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# Builds the programs first where they are missing, which takes half an hour on two cores and is kept in .gpu_suite/.
test-gpu: $(VENV)/.test-ready
	$(BIN)/python tests/gpu_suite.py all

# Found before the one in the virtual environment.
OLDEST := $(abspath $(VENV))/oldest
OLDEST_READY := $(VENV)/.oldest-ready
$(OLDEST_READY): $(VENV)/.test-ready
	$(INSTALL) --upgrade --no-deps --target $(OLDEST) \
	    $(foreach part,nvidia-cuda-tileiras nvidia-cuda-nvcc nvidia-nvvm,'$(part)==13.4.*')
	@touch $@

# Without what cuTile does before it calls the compiler, which `make test` runs.
oldest: $(OLDEST_READY)
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest --numprocesses auto --dist worksteal -m compiler \
	    -k 'not launch_runs and not kernels_name_is and not widths_of_one and not misbehave and not hints_reach and not without_torch' \
	    tests/test_build.py tests/test_host_code.py tests/test_products.py tests/test_refresh.py

# The host of a DGX Spark is aarch64: what it installs must not have to be compiled there.
aarch64: $(VENV)/.test-ready
	$(BIN)/python -c 'from importlib.metadata import requires; print(*(each.split(";")[0] for each in requires("tiledsched") \
	    if each.partition("extra == ")[2][1:-1] in ("", "gpu", "report") and not each.startswith("tiledsched")), sep="\n")' > $(VENV)/needed
	$(INSTALL) --dry-run --ignore-installed --no-deps --only-binary :all: \
	    --implementation cp --python-version 3.12 --target $(VENV)/none --requirement $(VENV)/needed \
	    $(foreach glibc,2_39 2_28 2_17,--platform manylinux_$(glibc)_aarch64) --platform manylinux2014_aarch64

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.test-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: $(VENV)/.test-ready
	BIN=$(BIN) sh tests/try_wheel.sh

release: $(VENV)/.test-ready
	BIN=$(BIN) .ci/release

clean:
	rm -rf $(VENV) dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "tiledsched needs Python 3.10 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(READY): $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

# torch is for the tests of `sdpa` and its fallback; the constraint picks a build that runs without a GPU. TileGym's
# kernels are run by the interpreter's tests: without its dependencies, which ask for one older release of transformers.
$(VENV)/.test-ready: $(READY)
	$(INSTALL) --constraint constraints.txt --editable '.[dev]' torch
	$(INSTALL) --no-deps tilegym==1.5.1
	@touch $@
