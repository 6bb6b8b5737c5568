# make demo, make test, make check: each sets everything up by itself (once; then it starts within seconds).

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.cb-sglang-ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup demo test check recall loadtest bench clean

setup: $(STAMP)

# The stamp is written last, so that an interrupted set-up is repeated.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(PY) || { echo "setup: creating $(VENV)"; python3 -m venv $(VENV); }
	@echo "setup: installing pinned packages (SGLang and torch: about 11 GB; several minutes the first time)"
	$(PY) -m pip install --constraint constraints.txt --editable ".[demo,dev]"
	@touch $(STAMP)

demo: setup
	$(PY) -m cb_loadtest.demo --json build/demo.json

test: setup
	$(PY) -m pytest

recall: setup
	$(PY) -m cb_loadtest.cli recall --out build/recall.json --markdown docs/recall-table.md

loadtest: setup
	$(PY) -m cb_loadtest.cli run --concurrency 1,4,16 --json build/loadtest.json --out build/loadtest.jsonl
	$(PY) -m cb_loadtest.cli report --run build/loadtest.json --out build/loadtest

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	cd bench/reliability && MYPYPATH=$(CURDIR):$(CURDIR)/kernels:$(CURDIR)/server:$(CURDIR)/loadtest \
		$(CURDIR)/$(VENV)/bin/mypy --config-file $(CURDIR)/pyproject.toml *.py

bench: setup
	$(PY) bench/messages.py --json build/bench-messages.json
	$(PY) kernels/bench/end_to_end.py --json build/bench-end-to-end.json

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
