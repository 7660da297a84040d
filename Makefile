# Every target makes what it needs: `make demo` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export TOKENIZERS_PARALLELISM = false

.PHONY: demo finetune test test-all lint coverage checkpoint clean

# torch first and by version: a plain `torch` may pull gigabytes of CUDA packages.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/installed ## what the extension methods do to the shipped checkpoint
	$(BIN)/rope-ext compare --model checkpoints/tiny-512 --factor 8 \
		--methods dynamic_yarn,yarn,dynamic_ntk,ntk,rerope,self_extend,dual_chunk,pi \
		--lengths 512,1024,2048,4096 \
		--windows 12 --trials 4 --output runs/demo --resume

TUNED := runs/tiny_512_yarn_pose
ASKED := --lengths 512,1k,2k,4k --tasks perplexity,passkey --windows 12 --trials 4 --resume

finetune: $(VENV)/installed ## train the shipped checkpoint for 4096 tokens, measure, merge
	test -e $(TUNED)/rope_ext.json || $(BIN)/accelerate launch \
		--config_file recipes/accelerate/single.yaml recipes/finetune.py \
		--config recipes/tiny_512_yarn_pose.yaml \
		$(if $(wildcard $(TUNED)/checkpoint-*),--resume_from_checkpoint true)
	$(BIN)/python -m eval.report --model checkpoints/tiny-512 --method yarn --factor 8 $(ASKED) \
		--output runs/finetune/before
	$(BIN)/python -m eval.report --model checkpoints/tiny-512 --adapter $(TUNED) --method adapter \
		$(ASKED) --output runs/finetune/after
	test -e runs/tiny_4096 || $(BIN)/python recipes/merge.py $(TUNED) --output runs/tiny_4096

# Two workers with two threads each would spin against each other on two cores.
test test-all: export OMP_NUM_THREADS = 1
test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(VENV)/installed
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

coverage: $(VENV)/installed ## which model families can be extended; writes the page in docs/
	$(BIN)/python -m eval.coverage --write docs/FAMILIES.md

checkpoint: $(VENV)/installed ## train the shipped checkpoint again (hours on a CPU)
	$(BIN)/python recipes/pretrain_tiny.py --output checkpoints/tiny-512 --resume

clean:
	rm -rf $(VENV) runs
