# Every target makes the environment that it needs by itself; see CONTRIBUTING.md.

PYTHON ?= $(shell for p in python3.12 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { command -v $$p; break; }; done)
JOBS ?= 2# test processes
gpu: OUT ?= bench/out/gpu# where `make gpu` puts its results
bench-tpu: OUT ?= bench/out/tpu# and `make bench-tpu`
SWEEP ?=# another sample of sweeps for `make test`: a number, see tests/sweeps.py
ARGS ?=# more options of the benchmarks, see bench/README.md
PYTORCH := torch==2.13.0# the peer of `make bench`
OLDEST := jax==0.11.2 jaxlib==0.11.2 triton==3.6.0 llvmlite==0.45.0# the oldest supported versions

.PHONY: help demo train generate test test-full test-levels mutants test-clients test-oldest check bench pytorch bench-tpu gpu docs docs-version clean
.NOTPARALLEL: # two pips in one environment would disturb each other

# Even where the environment forbids it, Python keeps bytecode: or else each process compiles all sources and tests again.
export PYTHONDONTWRITEBYTECODE =

help:
	@echo 'make demo         run the main job: a transformer that reads and learns Python source, on our flash attention'
	@echo 'make train        train a transformer on a mesh of 8 virtual devices, and compare with one, and with plain JAX'
	@echo 'make generate     generate text with that transformer, or a Llama, by a server loop with a paged cache, beside plain JAX'
	@echo 'make test         run the tests'
	@echo 'make test-full    run all tests in parts, slow ones and all cases of sweeps, too; goes on where it stopped'
	@echo 'make test-levels  run a sample of the tests of CPU code at lesser levels than that of this CPU; ARGS=--all for all'
	@echo 'make mutants      plant faults in copies of the tree; the tests must find each'
	@echo 'make test-oldest  run the smoke tests with the oldest supported jax and triton'
	@echo 'make test-clients run the tests with Flax, Equinox, Keras, optax and PyTorch, in an environment that has them'
	@echo 'make check        lint, check types and layers'
	@echo 'make bench        measure speed and memory against XLA and the peak of the CPU; check the limits'
	@echo 'make pytorch      make an environment with PyTorch, against which `make bench` then measures, too'
	@echo 'make bench-tpu    estimate the cycles of the TPU kernels and of their peers, without a TPU'
	@echo 'make gpu          on a machine with an NVIDIA GPU: prove the kernels there, measure them against their peers'
	@echo 'make docs         build the documentation into build/docs; a warning is an error'
	@echo 'make docs-version commit the documentation to the branch gh-pages, as that of this version; nothing is pushed'
	@echo 'make clean        remove the environments and everything else that was made'

# The tests' CUDA plugin, where it is installed, prints a traceback on machines without a GPU.
demo train generate bench docs docs-version: export JAX_PLATFORMS ?= cpu

demo: .venv/installed-demo
	@.venv/bin/python examples/demo.py

train: .venv/installed-train
	@.venv/bin/python examples/train.py --devices 8 --mesh data=2,model=2,sequence=2 --compare $(ARGS)

generate: .venv/installed-generate
	@.venv/bin/python -m examples.generate $(ARGS)

test: .venv/installed-test
	@.venv/bin/python -m pytest -q -n $(JOBS) --dist worksteal -m 'not slow' $(if $(SWEEP),--sweep $(SWEEP))

test-full: .venv/installed-test
	@.venv/bin/python -m tests.full --jobs $(JOBS) $(ARGS)

test-levels: .venv/installed-test
	@.venv/bin/python -m tests.levels --jobs $(JOBS) $(ARGS)

mutants: .venv/installed-test
	@.venv/bin/python -m tests.mutants --jobs $(JOBS) $(ARGS)

test-clients: export KERAS_BACKEND := jax
test-clients: .venv-clients/installed-clients
	@.venv-clients/bin/python -m pytest -q -n $(JOBS) tests/clients

test-oldest: .venv-oldest/installed-test
	@.venv-oldest/bin/python -m pytest -q -n $(JOBS) -m smoke $$(grep -rl --include='*.py' 'mark\.smoke' tests)

check: .venv/installed-dev
	@.venv/bin/ruff check --quiet
	@.venv/bin/ruff format --quiet --check
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 .venv/bin/pyright
	@.venv/bin/lint-imports --no-logo

bench: .venv/installed-cpu
	@.venv/bin/python -m bench.run $(ARGS)

pytorch: .venv-pytorch/installed

bench-tpu: .venv/installed-bench
	@.venv/bin/python -m bench.tpu_static --out $(OUT) $(ARGS)

# Needs no environment of its own: any Python that has jax with CUDA, triton and hypothesis, from the source tree.
gpu:
	@for p in .venv/bin/python python3 python3.12 python; do \
	  $$p -c 'import jax, triton, hypothesis' 2>/dev/null && break; done; \
	PYTHONPATH=. exec $$p -m bench.gpu --out $(OUT) $(ARGS)

# No --quiet: it would hide warnings from --strict. The variable turns off the theme's notice that it ends in May 2027.
docs: .venv/installed-test .venv/installed-docs # pages show programs of Triton and LLVM
	@.venv/bin/python -m docs.generate
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

# mike calls mkdocs by its name, and finds it on PATH alone.
docs-version: export PATH := $(CURDIR)/.venv/bin:$(PATH)
docs-version: docs
	@NO_MKDOCS_2_WARNING=1 mike deploy --update-aliases \
	  $$(python -c 'from importlib.metadata import version; print(version("tilekern"))') latest
	@mike set-default latest

clean:
	rm -rf .venv .venv-clients .venv-oldest .venv-pytorch build dist *.egg-info bench/out
	rm -rf .hypothesis .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# .venv/installed-test: an environment with tilekern (editable) and its extra `test`.
.venv/installed-%: pyproject.toml
	@$(call install,.venv,$*,)

.venv-oldest/installed-%: pyproject.toml
	@$(call install,.venv-oldest,$*,$(OLDEST))

.venv-clients/installed-%: pyproject.toml
	@$(call install,.venv-clients,$*,)

# Any Python that PyTorch has a wheel for: nothing of ours is installed beside it.
.venv-pytorch/installed:
	@python=$$(for p in python3.11 python3.12 python3.13 python3; do command -v $$p && break; done); \
	echo ".venv-pytorch: installing $(PYTORCH) for $$($$python --version)"; \
	$$python -m venv .venv-pytorch >/dev/null 2>&1 || $$python -m venv --clear --without-pip .venv-pytorch || exit 1; \
	pip=".venv-pytorch/bin/python -m pip"; $$pip --version >/dev/null 2>&1 || pip="$$python -m pip --python .venv-pytorch/bin/python"; \
	$$pip install -qq --disable-pip-version-check '$(PYTORCH)' numpy && touch $@

# $(call install,environment,extra,pins). Where Python ships without ensurepip, its own pip installs from outside.
define install
	python='$(PYTHON)'; \
	"$${python:-false}" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { \
	  echo "tilekern needs Python 3.12 or newer: put python3.12 on PATH, or say make PYTHON=/path/to/python" >&2; exit 1; }; \
	echo "$(1): installing tilekern[$(2)] $(3) for $$($$python --version) (a minute or two at first)"; \
	$$python -m venv $(1) >/dev/null 2>&1 || $$python -m venv --clear --without-pip $(1) || exit 1; \
	pip="$(1)/bin/python -m pip"; $$pip --version >/dev/null 2>&1 || pip="$$python -m pip --python $(1)/bin/python"; \
	$$pip install -qq --disable-pip-version-check -e '.[$(2)]' $(3) && touch $@
endef
