# Two commands for a new machine: `make demo` and `make test`. Both set up what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
, := ,
BENCH_STAMP := $(VENV)/.bench-ready

.PHONY: help setup demo test unit-test program-test integration-test test-all test-ecosystem test-engines test-long oracle native-test rdma-test rdma-two-guests lint bench-setup bench stress chaos chaos-weights chaos-loops soak cluster clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP) ## Virtual environment, Debian packages where missing, build

demo: $(STAMP) ## The main job: GRPO on a tiny transformer, through the pool (MODE=async: synchronously and asynchronously)
	$(BIN)/python examples/$(if $(filter async,$(MODE)),grpo_async,grpo).py

test: $(STAMP) ## All tests but the slow ones, the fuzzer with fewer inputs
	CMAKE_BUILD_PARALLEL_LEVEL=1 $(MAKE) -j3 --output-sync=target integration-test unit-test native-test program-test FUZZ_INPUTS=50000

# By default Ray gives its workers niceness 15: beside builds and drivers they starve, and tests run into their time limits.
export RAY_worker_niceness = 0

# $(call pytest,NAME,WHAT). A process that native code ends says why long before its last line: that is repeated where it is looked for.
pytest = @mkdir -p build; bash -o pipefail -c '$(BIN)/python -m pytest -q -m "not slow" $(2) 2>&1 | tee build/$(1).log' \
	  || { status=$$?; grep -aE "terminate called|what\(\):|Check failed|^Fatal|File .*/tests/|^(FAILED|ERROR) " build/$(1).log | tail -n 12; exit $$status; }

unit-test: $(STAMP) ## Without Ray
	$(call pytest,unit-test,tests/unit tests/conformance tests/rdma)

PROGRAMS = $(addprefix tests/integration/test_,$(addsuffix .py,batches_example decorator grpo_example install metrics_export oracle restart))

program-test: $(STAMP) ## Whole programs, each with a Ray of its own
	$(call pytest,program-test,$(PROGRAMS))

ECOSYSTEM = $(addprefix tests/integration/test_,$(addsuffix .py,miles_buffer miles_weights serve_example serve_weights status_page \
	verl_checkpoint verl_delta verl_engine verl_example verl_message_queue verl_nodes verl_queue verl_routing))

integration-test: $(STAMP) ## The others with Ray, on one node and on several
	$(call pytest,integration-test,tests/integration $(addprefix --ignore ,$(PROGRAMS) $(ECOSYSTEM)))

test-ecosystem: $(STAMP) ## The endpoint and its page in a browser; verl, Miles and TransferQueue
	$(call pytest,ecosystem-test,$(ECOSYSTEM))

test-all: $(STAMP) native-test ## The slow ones too
	$(BIN)/python -m pytest -q

test-long: $(STAMP) ## Ten times as many random models, layouts and plans of weights (TIMES=10)
	MOONCAKE_EXAMPLES=$(or $(TIMES),10) $(BIN)/python -m pytest -q --timeout 3600 $(WEIGHT_PROPERTIES)

# What draws models, layouts, plans, patches and logs at random.
WEIGHT_PROPERTIES = $(addprefix tests/unit/test_,$(addsuffix .py,weight_properties plan described served_plans serving_layouts \
	tracing strided sources megatron_source digest patches delta_log snapshots))

oracle: $(STAMP) ## Every oracle case, also with the decorator in place of install()
	ORACLE_SUBJECT="pool decorated" $(BIN)/python -m pytest -q tests/integration/test_oracle.py

# $(call sanitized,FOLDER,SANITIZERS): configures a build of the C++ tests.
sanitized = $(BIN)/cmake -S native -B build/$(1) -G Ninja -DMOONCAKE_TESTS=ON -DMOONCAKE_FUZZ_INPUTS=$(or $(FUZZ_INPUTS),1000000) \
	-DMOONCAKE_SANITIZE=$(2) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja

native-test: $(STAMP) ## C++ tests under ASan+UBSan, and under TSan
	$(call sanitized,asan,address$(,)undefined)
	$(BIN)/cmake --build build/asan
	$(BIN)/ctest --test-dir build/asan --output-on-failure
	$(call sanitized,tsan,thread)
	$(BIN)/cmake --build build/tsan
	$(BIN)/ctest --test-dir build/tsan --output-on-failure

# Each in an environment of its own, which is installed once a machine (gigabytes, minutes).
ENGINE_ENVIRONMENTS = build/engines/vllm/.ready build/engines/sglang/.ready
ENGINE_PYTHONS = MOONCAKE_VLLM_PYTHON=$(CURDIR)/build/engines/vllm/bin/python MOONCAKE_SGLANG_PYTHON=$(CURDIR)/build/engines/sglang/bin/python

test-engines: $(STAMP) $(ENGINE_ENVIRONMENTS) ## Real vLLM and SGLang on CPUs: every way to give them new weights, and their own loaders (ALL=1: for more models)
	$(ENGINE_PYTHONS) $(BIN)/python -m pytest -q $(if $(ALL),,-m "not slow") --durations=15 --timeout 900 tests/engines tests/integration/test_engine_loaders.py

build/engines/%/.ready: scripts/engine-env.sh scripts/engines/%.txt $(STAMP)
	@sh scripts/engine-env.sh $* $(VENV) $(@D)

# Without the plugins that these tests do without: starting takes its time in an emulated machine.
RDMA_PYTEST = PYTHONUNBUFFERED=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m pytest -q -p no:cacheprovider -p pytest_timeout

rdma-test: $(STAMP) rdma-two-guests ## RDMA, in an emulated machine with soft-RoCE (minutes)
	$(call sanitized,asan,address$(,)undefined)
	$(call sanitized,tsan,thread)
	$(BIN)/cmake --build build/asan --target verbs_reader_test
	$(BIN)/cmake --build build/tsan --target verbs_reader_test
	MOONCAKE_RDMA_REQUIRED=1 scripts/rdma-vm.sh -t 1500 sh -ec \
	  'build/asan/tests/verbs_reader_test; TSAN_OPTIONS=halt_on_error=1 build/tsan/tests/verbs_reader_test; $(RDMA_PYTEST) tests/rdma'

rdma-two-guests: $(STAMP) ## RDMA between two emulated machines, on a wire that loses packets
	$(BIN)/python tests/rdma/two_guests.py

lint: $(STAMP) ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench-setup: $(BENCH_STAMP) ## Mooncake and TransferQueue, to compare with

bench: $(BENCH_STAMP) ## All benchmarks, against Ray's own store and others, as tables
	$(BIN)/python -m bench put_get
	$(BIN)/python -m bench actor_pipeline
	$(BIN)/python -m bench batch
	$(BIN)/python -m bench partial
	$(BIN)/python -m bench driver
	$(BIN)/python -m bench spill
	$(BIN)/python -m bench pull
	$(BIN)/python -m bench fanout
	$(BIN)/python -m bench plan
	$(BIN)/python -m bench delta
	$(BIN)/python -m bench sync
	$(BIN)/python -m bench async_loop
	$(BIN)/python -m bench serve
	$(BIN)/python -m bench engine_update

stress: $(STAMP) ## Kill processes at random, and find nothing wrong (SECONDS=60)
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m stress both --seconds $(or $(SECONDS),60)

chaos: $(STAMP) ## Four nodes: cut links, kill nodes, brokers and services at random, and find nothing wrong (SECONDS=120)
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m stress chaos --seconds $(or $(SECONDS),120)

chaos-weights: $(STAMP) ## The same for a group that syncs weights: trainers, engines and the coordinator die (SECONDS=120)
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m stress weights --seconds $(or $(SECONDS),120)

chaos-loops: $(STAMP) ## The same for an asynchronous loop: rollout workers, learners, the buffer and nodes die (SECONDS=600)
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m stress loops --seconds $(or $(SECONDS),600)

soak: $(STAMP) ## A steady load, under which no process may grow (MINUTES=30)
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m stress soak --minutes $(or $(MINUTES),30)

cluster: $(STAMP) ## A Ray cluster of N=3 nodes on this machine, each with a network of its own, to try things in by hand
	$(BIN)/python -m bench.cluster $(or $(N),3)

clean: ## Forget builds and the virtual environment
	rm -rf build out $(VENV)

# A compiler, and venv where Debian ships python3 without it; libraries that Mooncake's engine needs.
$(STAMP): pyproject.toml requirements-test.txt CMakeLists.txt native/CMakeLists.txt $(wildcard native/*.cpp native/*.h native/pool/* native/peer/* native/columns/* native/delta/* native/verbs/* mooncake_ray/_native/*.pyx mooncake_ray/_native/*.h)
	@sh scripts/debian-packages.sh $(PYTHON) libibverbs.so.1=libibverbs1 libnuma.so.1=libnuma1 libcurl.so.4=libcurl4 ip=iproute2 tc=iproute2 chromium=chromium
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements-test.txt
	$(BIN)/python -m pip install -q --no-deps verl==0.9.1 tensordict==0.10.0 TransferQueue==0.1.11 mooncake-transfer-engine-non-cuda==0.3.13.post1 megatron-core==0.16.1
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

$(BENCH_STAMP): $(STAMP) requirements-bench.txt
	@sh scripts/debian-packages.sh $(PYTHON) iperf3=iperf3 nginx=nginx
	$(BIN)/python -m pip install -q --no-deps -r requirements-bench.txt
	touch $@
