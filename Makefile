# Two commands: `make demo` trains a model on a hundred simulated devices, `make test` runs the quick checks.
# `make test-slow` runs the rest: processes, sockets, Ray, and hypothesis with fresh random seeds;
# `make test-long` what is dear and seldom breaks alone: most benchmarks in their small form, the site, whole documents,
# sweeps, the types for macOS.

PYTHON ?= python3
VENV ?= .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# More flags for torch's and the developer's installation.
PIP_FLAGS ?=
MYPY_FOR = $(VENV)/bin/mypy --platform $(1) --cache-dir .mypy_cache/$(1) headwater examples
PYTEST := $(VENV)/bin/python -m pytest -n 2 --dist worksteal
# The slow tests wait for processes and sockets for half of their time: two for each of two cores.
PYTEST_SLOW := $(VENV)/bin/python -m pytest -n 4 --dist worksteal
# A CPU build of torch; the default index would bring gigabytes of CUDA on amd64.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH ?= $(shell $(PYTHON) -c "import platform; print('torch>=2.7,<2.10' if platform.machine() == 'aarch64' else 'torch>=2.6,<2.14')")

# Whatever the shell says: without its bytecode the project is compiled anew in each of hundreds of processes,
# and so are pytest's assertions in each of its workers: a quarter of a minute of a core.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-long lint types install install-client install-dev docs figures site pictures proto constraints hashes digests release notes clean

demo: $(VENV)/.demo
	$(VENV)/bin/headwater-simulate --rounds 60 --micro-batch-size 4 --page 127.0.0.1:0 --page-stays 60

test: $(VENV)/.dev lint types
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.dev
	$(PYTEST_SLOW) -m "(slow or hypothesis) and not long" --hypothesis-profile=fresh

test-long: $(VENV)/.dev
	$(call MYPY_FOR,darwin)
	$(PYTEST_SLOW) -m long

lint: $(VENV)/.dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

# For this system and for Windows, at the same time; test-long also checks for macOS.
types: $(VENV)/.dev
	@$(call MYPY_FOR,win32) & other=$$!; $(VENV)/bin/mypy; here=$$?; wait $$other && exit $$here

install: $(VENV)/.demo

# What a device needs, and no more: no scikit-learn, matplotlib, tensorboard or ray.
install-client: $(VENV)/.torch
	$(PIP) install --quiet --constraint constraints.txt --editable .

install-dev: $(VENV)/.dev

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	@echo "torch: first from what lies on this machine, else about 200 MB from $(TORCH_INDEX)"
	$(PIP) install $(PIP_FLAGS) --quiet --no-index --no-deps "$(TORCH)" 2>/dev/null \
		|| $(PIP) install $(PIP_FLAGS) --no-deps --index-url $(TORCH_INDEX) "$(TORCH)" \
		|| { echo "torch: from the default index; on amd64 it brings about 3 GB of CUDA"; \
			$(PIP) install "$(TORCH)"; }
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) install --quiet --constraint constraints.txt --editable ".[server,examples]"
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) install $(PIP_FLAGS) --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@ $(VENV)/.demo

# The code that protobuf makes is kept in the repository; a newer generator would need protobuf 7.
proto:
	$(PIP) install --quiet "grpcio-tools<=1.81"
	cd common/transport && ../../$(VENV)/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. wire.proto

docs:
	$(VENV)/bin/python docs/write_tree.py
	$(VENV)/bin/python -m headwater.common.settings.introspection > docs/settings.md

# The figures in the documents, each by the command beside it: half an hour, or PAGES="fleet.md batch.md".
figures:
	$(VENV)/bin/python docs/write_figures.py $(PAGES)

# The documents as pages that need no network, with an API reference from the docstrings.
site: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --config-file docs/site/mkdocs.yml

# The pictures of the page and of the guide, taken while their test drives a browser.
pictures: $(VENV)/.dev
	HEADWATER_PICTURES=docs $(VENV)/bin/python -m pytest -n 0 tests/integration/test_page.py \
		-k "simulation_is_watched or every_slider"

# One file for all platforms; torch has its own rules above. Without the extra "simulators", as pfl needs
# an older dp-accounting than the extra "privacy": it goes into a virtual environment of its own.
constraints:
	$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --no-header \
		--extra dev --extra benchmarks --extra mlflow --extra wandb \
		--no-annotate --no-emit-package torch --no-emit-package headwater pyproject.toml \
		| grep -v -E '^(nvidia|cuda|triton)' > constraints.txt

# The wheels that deploy/ installs, each with its SHA-256, for all platforms and Python versions:
# what a client needs, the same with the examples, and torch for CPUs. PyTorch's index has the builds
# for amd64; what it cannot be asked for is kept in deploy/torch.txt as it stands.
LOCK = $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	--no-annotate
WITHOUT_TORCH = --constraint constraints.txt --no-emit-package torch --no-emit-package headwater pyproject.toml \
	deploy/build.in | awk '/^[a-z]/ { is_kept = !/^(nvidia|cuda|triton)/ } is_kept'
hashes:
	$(LOCK) $(WITHOUT_TORCH) > deploy/requirements.txt
	$(LOCK) --extra examples --extra server $(WITHOUT_TORCH) > deploy/requirements-examples.txt
	$(PYTHON) deploy/lock_torch.py "$(LOCK)" "$(TORCH_INDEX)"

# Where Docker and its registry are at hand: pin the images of deploy/ by digest.
digests:
	$(PYTHON) deploy/pin_images.py
	git diff --stat deploy

# The source and the wheel of a version in dist/, tried in an environment of their own. With TAG=v1.2.3 it must be that
# version. Of git it makes nothing: CONTRIBUTING.md says what comes next.
VERSION = $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
TAG ?= v$(VERSION)
RELEASE := build/release
REFUSE = { echo "make release: $(1)" >&2; exit 1; }
release:
	@[ -z "$$(git status --porcelain)" ] || $(call REFUSE,UncommittedChanges: commit or remove what git status lists)
	@[ "$(TAG)" = "v$(VERSION)" ] || $(call REFUSE,OtherTag: $(TAG) is not v$(VERSION); set the version in pyproject.toml or move the tag)
	@grep -q "^## $(VERSION) (" CHANGELOG.md || $(call REFUSE,NoHeading: write '## $(VERSION) (DATE)' into CHANGELOG.md)
	@grep -q "^version: $(VERSION)$$" CITATION.cff || $(call REFUSE,OtherCitation: write version and date into CITATION.cff)
	rm -rf $(RELEASE) dist
	$(PYTHON) -m venv $(RELEASE)/tools
	$(RELEASE)/tools/bin/python -m pip install --quiet --constraint constraints.txt "build>=1.2,<2" "twine>=6.1,<8"
	$(RELEASE)/tools/bin/python -m build --quiet
	$(RELEASE)/tools/bin/twine check --strict dist/*
	$(MAKE) VENV=$(RELEASE)/tried $(RELEASE)/tried/.torch
	$(RELEASE)/tried/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd $(RELEASE) && tried/bin/headwater --help && tried/bin/headwater --version
	cd $(RELEASE) && tried/bin/python -I -c "import headwater; [getattr(headwater, it) for it in headwater.__all__]"

# What the version changed, by CHANGELOG.md.
notes:
	@awk '/^## / { is_ours = $$2 == "$(VERSION)" } is_ours' CHANGELOG.md

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
