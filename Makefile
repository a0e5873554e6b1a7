# Every target makes its own environment first; a clone needs Python 3.11+, pip and make, nothing else. The demo installs
# what it needs; the other targets add the rest. pip compiles nothing: Python compiles the modules that are imported.
PYTHON ?= python3
BIN := .venv/bin
PACKAGES := recipes lab audit
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
DEMO_READY := .venv/.demo-ready
READY := .venv/.ready
OVER := .venv/trackers
PEERS := .venv/peers
MODELS := .venv/models

.PHONY: demo test test-all test-gpu gpu-pack gpu-run test-cluster test-slurm test-trackers check docs bench bench-peers clean

demo: $(DEMO_READY)
	@rm -rf runs/demo
	$(BIN)/lockstep train digits --nproc 2 --run-dir runs/demo
	$(BIN)/lockstep predict runs/demo --samples 5 > runs/demo/predictions.jsonl & \
	    $(BIN)/lockstep evaluate runs/demo --nproc 2 > runs/demo/evaluation.json && wait $$!
	@$(BIN)/python examples/demo_result.py runs/demo

test: $(READY)
	$(BIN)/python tests/in_shards.py --durations=10 $(TESTS)

# Also the combinations that are left out above because others test the same. TESTS: paths and options of pytest.
test-all: $(READY)
	$(BIN)/python -m pytest -m "not cluster" $(TESTS)

# What the GPUs of this machine show, tests and figures: gpu-report.md. Without a GPU it says so, and ends without an error.
test-gpu: $(READY)
	$(BIN)/python -m tests.gpu.report

# For a machine with a GPU, torch and transformers, but without a network: gpu-pack on a machine with a network makes .whl,
# and gpu-run there takes at most eight minutes, with the most telling tests and figures first. PYTHON has torch.
gpu-pack:
	PYTHON=$(PYTHON) tests/gpu/pack.sh

gpu-run:
	PYTHON=$(PYTHON) tests/gpu/run.sh

# Several nodes on this machine, in network namespaces, which need root. Without root it says so, and skips.
# The hosts of `launch ssh` need sshd. The models of Kubernetes (50 MB) are installed over the environment, not into it.
test-cluster: $(READY)
	test -x $(MODELS)/bin/python || $(BIN)/python -m venv $(MODELS)
	$(BIN)/python -c 'import glob, site; print(*site.getsitepackages(), *glob.glob("$(CURDIR)/packages/*/src"), "$(CURDIR)/src", sep="\n")' \
	    > $$(echo $(MODELS)/lib/python*/site-packages)/under.pth
	$(MODELS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[cluster-test]'
	$(MODELS)/bin/python -m pytest -m cluster --ignore tests/launch/cluster/test_slurm_jobs.py tests/launch/cluster

# Generated job scripts under a real SLURM on this machine. Needs root, slurm-wlm and munge; without these it says so.
test-slurm: $(READY)
	$(BIN)/python -m pytest -m cluster -rP tests/launch/cluster/test_slurm_jobs.py

# The trackers against their real libraries (200 MB). They are installed over the environment, not into it: trackio wants
# an older pillow than the constraints have.
test-trackers: $(READY)
	test -x $(OVER)/bin/python || $(BIN)/python -m venv $(OVER)
	$(BIN)/python -c 'import glob, site; print(*site.getsitepackages(), *glob.glob("$(CURDIR)/packages/*/src"), "$(CURDIR)/src", sep="\n")' \
	    > $$(echo $(OVER)/lib/python*/site-packages)/under.pth
	$(OVER)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[wandb,mlflow,trackio]'
	$(OVER)/bin/python -m pytest -m "" tests/parts/test_trackers.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/plain_english.py
	$(BIN)/mypy
	$(BIN)/zizmor --offline --quiet .github/workflows action.yml

# The documentation as a site, in build/site. A broken link is an error. Material for MkDocs gets repairs
# until May 2027; its successor Zensical reads the same mkdocs.yml.
docs: $(READY)
	@$(BIN)/python -c 'import material, mkdocstrings, pymdownx' 2>/dev/null || \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	mkdir -p build/site-pages
	for part in *.md CITATION.cff LICENSE docs benchmarks examples packages src tests; do ln -sfn ../../$$part build/site-pages/$$part; done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/overhead.py --data collate --sizes small
	$(BIN)/python benchmarks/startup.py

# Beside Lightning, Accelerate and transformers' Trainer, at the versions of benchmarks/peers.txt, in an environment over
# that of make. PEERS_OPTIONS="--tiny --rounds 1" shows in minutes that all of it runs.
bench-peers: $(READY)
	test -x $(PEERS)/bin/python || $(BIN)/python -m venv $(PEERS)
	$(BIN)/python -c 'import glob, site; print(*site.getsitepackages(), *glob.glob("$(CURDIR)/packages/*/src"), "$(CURDIR)/src", sep="\n")' \
	    > $$(echo $(PEERS)/lib/python*/site-packages)/under.pth
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -r benchmarks/peers.txt
	$(PEERS)/bin/python benchmarks/peers.py $(PEERS_OPTIONS)

clean:
	rm -rf .venv runs build src/*.egg-info packages/*/src/*.egg-info packages/*/build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(DEMO_READY): pyproject.toml $(PACKAGES:%=packages/%/pyproject.toml) constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit(sys.version.split()[0] + " is too old: make PYTHON=python3.11, or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e . $(PACKAGES:%=-e packages/%)
	@touch $@

$(READY): $(DEMO_READY)
	$(INSTALL) -e '.[dev]'
	@touch $@
