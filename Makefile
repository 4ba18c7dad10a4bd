# Every target sets up what it needs, from a bare clone on: .ci/bootstrap makes .venv.
# ARGS goes to the command behind the target: make serve ARGS="--port=0", make test ARGS="-k fetch".

MODEL := smollm2-135m-instruct
ARGS :=
BIN := .venv/bin
PLAN_BIN := .cache/plan-venv/bin

.PHONY: help setup serve test test-full test-state bench simulate compare peer-env plan-env kernels kernels-compile lint format proto clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## make .venv; quick when nothing changed
	@.ci/bootstrap

# `octavo serve` fetches the model itself; the last --model counts.
serve: setup  ## fetch the default model and serve it
	$(BIN)/octavo serve --model=$(MODEL) $(ARGS)

test: setup  ## the default tests: minutes
	$(BIN)/pytest $(ARGS)

test-full: setup  ## every test, the long ones included
	$(BIN)/pytest -m "" $(ARGS)

test-state: setup  ## a million random operations on pages, scheduler and engine
	$(BIN)/pytest -m state tests/engine/test_state_machines.py $(ARGS)

bench: setup  ## throughput and latency of a server, over gRPC
	$(BIN)/python -m octavo.bench.throughput $(ARGS)

# fairness, goodput, retries or million: make simulate TABLE=million ARGS=--replicas=16
TABLE := fairness
simulate: setup  ## a table of what the scheduler does, without a device: TABLE=million
	$(BIN)/python -m octavo.bench.simulate $(TABLE) $(ARGS)

compare: setup  ## Octavo beside Hugging Face transformers; needs peer-env
	$(BIN)/python -m octavo.bench.compare_transformers $(ARGS)

# Apart from .venv, and large: torch. ARGS="--python=/path" picks the interpreter it is made from.
peer-env: setup  ## make .cache/peer-venv with torch and transformers
	$(BIN)/python -m octavo.bench.peer_environment $(ARGS)

# Apart from .venv, and large: the compilers of TPUs and GPUs. Tests that need them look for it there.
plan-env: setup  ## make .cache/plan-venv, in which octavo plan knows every chip
	$(BIN)/python -m venv .cache/plan-venv
	$(BIN)/python -m pip --python $(PLAN_BIN)/python install --quiet \
		--editable '.[plan-tpu,plan-gpu]' --group dev

kernels: setup  ## the whole table of attention cases, TPU and GPU kernels in their interpreters
	$(BIN)/pytest -m "" tests/pallas_kernels $(ARGS)

# One process for each chip: a process can compile for one GPU architecture only.
kernels-compile: plan-env  ## the same table through the real compilers of seven chips
	for chip in v5e v6e v5p tpu7x; do $(PLAN_BIN)/python -m tests.pallas_kernels.compile_tpu $$chip || exit 1; done
	for chip in a100 h100 b200; do $(PLAN_BIN)/python -m tests.pallas_kernels.compile_gpu $$chip || exit 1; done

lint: setup  ## style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check

format: setup  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# protoc mirrors the virtual path octavo/server under the output folder; only there do the stubs
# import each other as octavo.server.
proto: setup  ## generate server/octavo_pb2* from server/octavo.proto
	mkdir -p build/proto
	$(BIN)/python -m grpc_tools.protoc -Ioctavo/server=server --python_out=build/proto \
		--pyi_out=build/proto --grpc_python_out=build/proto octavo/server/octavo.proto
	cp build/proto/octavo/server/octavo_pb2* server/

clean:  ## remove everything that was made here, other environments too; the model cache stays
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
