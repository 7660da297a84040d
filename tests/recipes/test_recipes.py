"""recipes/finetune.py and merge.py, on a tiny Llama trained (so to say) on 128 tokens."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import datasets
import peft
import pytest
import torch
import transformers
from accelerate.utils import DistributedType
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import rope_ext
from recipes import checks, data, finetune, merge, parallel, positions, settings
from recipes.loss import ChunkedLoss
from rope_eval.folder import lock
from rope_ext import OptionError, RopeExtError
from rope_ext.errors import MeasureError, SeveralErrors
from rope_ext.position.bias import learned
from tests.helpers.checkpoint import TRAINED
from tests.helpers.models import tiny_llama
from tests.helpers.recipe_runs import arguments, history

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


# Data


def test_packing_by_hand() -> None:
    documents = {"input_ids": [[1, 2, 3], [4, 5, 6, 7, 8], [9]]}
    four = data.Pack(4, masking=True)(documents)
    assert four["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert four["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    three = data.Pack(3, masking=True)(documents)
    assert three["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert three["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 0]]
    assert set(data.Pack(3, masking=False)(documents)) == {"input_ids"}


def test_documents_have_one_beginning_and_one_end(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenize = data.Tokenize(tokenizer)
    plain, begun, empty = tokenize({"text": ["two", "<s>two</s>", None]})["input_ids"]
    assert empty == []
    assert plain == begun == [0, *tokenizer("two", add_special_tokens=False).input_ids, 1]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_are_the_documents_one_after_the_other(checkpoint: Path, streaming: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    long, short = "one two three four five six seven", "eight"
    source = datasets.Dataset.from_dict({"text": [long, short, long]})
    if streaming:
        source = source.to_iterable_dataset()
    ids = [0, *tokenizer(long, add_special_tokens=False).input_ids, 1]
    pack = data.Pack(len(ids), masking=True)
    rows = data.rows(source, tokenizer, pack, minimum=len(ids))
    found = list(islice(rows, 5))
    assert len(found) == (5 if streaming else 2)  # a stream begins again
    for index, row in enumerate(found):
        assert (list(row["input_ids"]), row["index"]) == (ids, index)
        assert list(row["position_ids"]) == list(range(len(ids)))


def test_many_documents_lose_less_than_a_row_in_a_hundred(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    source = datasets.Dataset.from_dict({"text": ["one two three four"] * 3000})
    tokens = 3000 * len(data.Tokenize(tokenizer)({"text": ["one two three four"]})["input_ids"][0])
    rows = data.rows(source, tokenizer, data.Pack(100))
    assert 0.99 * tokens < 100 * len(rows) <= tokens
    assert rows["index"][:] == list(range(len(rows)))


def test_formats_hold_the_same_documents(tmp_path: Path) -> None:
    both = ["first\nof two lines", "second"]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text(both[0])
    (folder / "b.md").write_text(both[1])
    (folder / "c.bin").write_text("no text")
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps({"n": 1, "content": text}) for text in both))
    table = tmp_path / "table.parquet"
    datasets.Dataset.from_dict({"text": both}).to_parquet(table)
    for name, column in ((folder, "text"), (lines, "content"), (table, "text")):
        for streaming in (False, True):
            found = data.documents(str(name), column=column, streaming=streaming)
            assert list(found) == [{"text": text} for text in both], name


def test_data_without_text_are_refused(tmp_path: Path) -> None:
    for name, content, message in (
        ("a.jsonl", '{"text": 3}', r"no text column 'text'; .*none"),
        ("b.jsonl", "{", "cannot read the dataset"),
        ("d.csv", "text", "has no text files; supported suffixes"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(data.DataError, match=message):
            data.documents(str(tmp_path / name))


def test_odd_files_are_read_or_refused_in_words(checkpoint: Path, tmp_path: Path) -> None:
    tokenize = data.Tokenize(AutoTokenizer.from_pretrained(checkpoint))
    plain = tokenize({"text": ["one two"]})
    assert tokenize({"text": ["\ufeffone two"]}) == plain
    with pytest.raises(data.DataError, match=r"not text but int: 3; .*--text_column"):
        tokenize({"text": ["one", 3]})
    table = tmp_path / "begins-with-none.parquet"
    datasets.Dataset.from_dict({"text": [None, "one"]}).to_parquet(table)
    assert len(data.documents(str(table))) == 2
    for name, content, message in (
        ("empty.jsonl", b"", r"empty.jsonl' \(\w+\); give"),
        ("surrogate.jsonl", b'{"text": "a \\ud800"}', "surrogate pair in string is invalid"),
        ("latin.txt", b"caf\xe9 au lait", "'utf-8' codec can't decode byte 0xe9"),
    ):
        (tmp_path / name).write_bytes(content)
        for streaming in (False, True):
            with pytest.raises(data.DataError, match=message):
                data.documents(str(tmp_path / name), streaming=streaming)


def test_python_library_is_read() -> None:
    found = data.documents(data.PYTHON_LIBRARY)
    assert found.column_names == ["text"]
    assert len(found) > 100


@given(
    length=st.integers(2, 40),
    room=st.integers(1, 200),
    chunks=st.integers(2, 8),
    seed=st.integers(0, 2**20),
)
def test_pose_positions(length: int, room: int, chunks: int, seed: int) -> None:
    target, chunks = length + room, min(chunks, length)
    rng = random.Random(seed)
    starts, offsets = positions.skipped_positions(length, target, chunks, rng)
    assert len(starts) == len(offsets) == chunks
    assert starts[0] == offsets[0] == 0
    assert starts == sorted(set(starts))
    assert max(starts) < length
    assert offsets == sorted(offsets)
    collator = data.Collator(positions.PoSE(target, chunks), seed)
    row = {"input_ids": list(range(length)), "index": 5}
    (found,) = collator([row])["position_ids"].tolist()
    assert found[0] == 0
    assert found == sorted(set(found))
    assert found[-1] < target


def test_every_border_and_offset_is_reached() -> None:
    rng = random.Random(0)
    drawn = [positions.skipped_positions(6, 10, 2, rng) for _ in range(400)]
    assert {starts[1] for starts, _ in drawn} == {1, 2, 3, 4, 5}
    assert {offsets[1] for _, offsets in drawn} == {0, 1, 2, 3, 4}


SCHEMES = {
    "pose": positions.PoSE(512),
    "pose_released": positions.ReleasedPoSE(512, 32),
    "random": positions.Scattered(512),
    "random_floats": positions.RandomFloats(512),
    "cream": positions.CREAM(512),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_positions_depend_on_seed_epoch_and_index_only(scheme: str) -> None:
    rows = [{"input_ids": list(range(32)), "index": index} for index in (3, 7, 11)]

    def drawn(order: list[int], seed: int = 0, epoch: int = 0) -> list[list[int]]:
        collator = data.Collator(SCHEMES[scheme], seed, epoch)
        found = collator([rows[i] for i in order])["position_ids"].tolist()
        return [found[order.index(i)] for i in sorted(order)]

    torch.manual_seed(1)
    random.seed(1)
    first = drawn([0, 1, 2])
    assert first == drawn([2, 0, 1])
    assert first[1:] == drawn([2, 1])
    assert len({tuple(row) for row in first}) == 3
    assert first != drawn([0, 1, 2], seed=1)
    assert first != drawn([0, 1, 2], epoch=1)


def test_chunk_two_sees_chunk_one(model: transformers.LlamaForCausalLM) -> None:
    """With the collator's mask of ones, and not without it: the mask code sees documents."""
    rope_ext.patch(model, "yarn", factor=4)
    collator = data.Collator(positions.PoSE(256), seed=3)
    batch = collator([{"input_ids": list(range(3, 35)), "index": 0}])
    border = int((batch["position_ids"][0].diff() > 1).nonzero()) + 1
    ids, labels = batch.pop("input_ids"), batch.pop("labels")
    assert torch.equal(ids, labels)

    def seen(**inputs: torch.Tensor) -> torch.Tensor:
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=embeds, use_cache=False, **inputs).logits
        logits[0, border:].sum().backward()
        return embeds.grad[0, :border].abs().max()

    assert seen(**batch) > 0
    del batch["attention_mask"]
    assert seen(**batch) == 0


@pytest.mark.parametrize("method", ["yarn", "rerope"])
def test_masked_documents_do_not_see_each_other(method: str) -> None:
    model = rope_ext.patch(tiny_llama(), method, factor=4)
    documents = [list(range(3, 83)), list(range(40, 60)), list(range(90, 120))]
    packed = data.Pack(130, masking=True)({"input_ids": documents})
    row = {name: value[0].tolist() for name, value in packed.items()}
    batch = data.Collator()([row])
    labels = batch.pop("labels")[0].tolist()
    assert [at for at, label in enumerate(labels) if label == data.IGNORED] == [0, 80, 100]
    with torch.no_grad():
        together = model(**batch, use_cache=False).logits[0]
        alone = [model(torch.tensor([ids]), use_cache=False).logits[0] for ids in documents]
    # float32 sums in another order
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_dynamic_methods_take_a_skipped_row_for_as_long_as_it_spans() -> None:
    collator = data.Collator(positions.PoSE(512), seed=1)
    rows = [{"input_ids": list(range(3, 35)), "index": index} for index in range(3)]
    batch = collator(rows)
    batch.pop("labels")
    model = rope_ext.patch(tiny_llama(), "dynamic_ntk", factor=8)
    with torch.no_grad():
        found = model(**batch, use_cache=False).logits
        for row, logits in enumerate(found):
            length = int(batch["position_ids"][row, -1]) + 1
            assert length > 64
            rope_ext.patch(model, "dynamic_ntk", factor=8, length=length, replace=True)
            one = {name: value[row : row + 1] for name, value in batch.items()}
            torch.testing.assert_close(
                model(**one, use_cache=False).logits[0], logits, rtol=1e-4, atol=1e-4
            )


# What is trained


def test_lora_with_embeddings_and_norms(model: transformers.LlamaForCausalLM) -> None:
    recipe = settings.Recipe(train_embeddings_and_norms=True)
    whole = finetune.with_lora(model.to(torch.bfloat16), recipe)
    trained = {
        name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
        for name, parameter in whole.named_parameters()
        if parameter.requires_grad
    }
    layers = [f"model.layers.{i}" for i in range(2)]
    expected = {"model.embed_tokens.weight", "model.norm.weight"}
    expected |= {
        f"{layer}.{norm}_layernorm.weight"
        for layer in layers
        for norm in ("input", "post_attention")
    }
    expected |= {
        f"{layer}.self_attn.{name}_proj.lora_{half}.default.weight"
        for layer in layers
        for name in "qkvo"
        for half in "AB"
    }
    assert trained == expected
    for parameter in whole.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)


def test_a_trained_embedding_does_not_double_what_layers_keep(ids: torch.Tensor) -> None:
    """Its weight is held in float32, and the stream of a bfloat16 model stays as it is."""
    recipe = settings.Recipe(train_embeddings_and_norms=True, dtype="bfloat16")
    whole = finetune.with_lora(tiny_llama().to(torch.bfloat16), recipe)
    with torch.autocast("cpu", torch.bfloat16):
        output = whole(ids, labels=ids, output_hidden_states=True)
    assert {hidden.dtype for hidden in output.hidden_states[:-1]} == {torch.bfloat16}
    output.loss.backward()
    trained = [p for p in whole.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {p.grad.dtype for p in trained} == {torch.float32}


@pytest.mark.parametrize("name", ["t5", "fire", "shaw", "learned"])
def test_what_an_encoding_learns_is_trained_beside_lora(name: str, ids: torch.Tensor) -> None:
    """In float32, and the stream of a bfloat16 model stays as it is."""
    model = rope_ext.patch(tiny_llama().to(torch.bfloat16), name, factor=4)
    whole = finetune.with_lora(model, settings.Recipe(dtype="bfloat16"))
    with torch.autocast("cpu", torch.bfloat16):
        output = whole(ids[:, :60], labels=ids[:, :60], output_hidden_states=True)
    assert {hidden.dtype for hidden in output.hidden_states[:-1]} == {torch.bfloat16}
    output.loss.backward()
    own = {n: p for n, p in whole.named_parameters() if "rope_ext" in n and p.requires_grad}
    assert len(own) == len(learned(whole)) // 2  # the others are what peft keeps of before
    assert all(p.dtype == torch.float32 and p.grad.any() for p in own.values())


def test_norms_of_other_families_are_found() -> None:
    config = transformers.Qwen3Config(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, intermediate_size=16
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {name.rpartition(".")[2] for name in finetune.embeddings_and_norms(model)}
    layer = {"input_layernorm", "post_attention_layernorm"}
    assert names == {"embed_tokens", "norm", "q_norm", "k_norm", *layer}


def test_tied_weights_stay_tied(tmp_path: Path, ids: torch.Tensor) -> None:
    base = tmp_path / "base"
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    recipe = settings.Recipe(train_embeddings_and_norms=True, chunked_loss=False)
    whole = finetune.with_lora(rope_ext.patch(model, "yarn", factor=4), recipe)
    optimizer = torch.optim.SGD((p for p in whole.parameters() if p.requires_grad), lr=1.0)
    whole(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    head = whole.get_output_embeddings().weight
    assert head is whole.get_input_embeddings().weight
    assert not torch.equal(head, AutoModelForCausalLM.from_pretrained(base).lm_head.weight)
    whole.save_pretrained(tmp_path / "adapter")
    rope_ext.save_sidecar(whole, tmp_path / "adapter")
    again = rope_ext.from_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, whole.eval()(ids).logits)


def test_loraplus_trains_b_faster(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    words = arguments(checkpoint, texts, tmp_path / "run", loraplus_ratio=16, weight_decay=0.1)
    recipe, args = settings.parse(words)
    model = finetune.build(recipe, AutoConfig.from_pretrained(checkpoint))
    optimizer = finetune.LongTrainer(recipe, model, args).create_optimizer()
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert rates.pop(id(parameter)) == pytest.approx(0.16 if "lora_B" in name else 0.01)
    assert not rates
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}


SSMAX = {"method_options": '{"temperature": "ssmax"}', "pose_chunks": None, "length": 256}


@pytest.mark.parametrize("more", [{}, {"loraplus_ratio": 16}, {"lora_r": 0}], ids=str)
def test_scales_of_a_temperature_have_their_own_rate(
    more: dict, checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    given = {"weight_decay": 0.1, "temperature_lr": 0.3, **SSMAX, **more}
    recipe, args = settings.parse(arguments(checkpoint, texts, tmp_path / "run", **given))
    model = finetune.build(recipe, AutoConfig.from_pretrained(checkpoint))
    optimizer = finetune.LongTrainer(recipe, model, args).create_optimizer()
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(groups) == len(trained)
    for name, parameter in trained.items():
        group, scale = groups[id(parameter)], "rope_ext_temperature" in name
        assert (group["lr"] == 0.3) == scale and not (scale and group["weight_decay"])


@pytest.mark.parametrize("name", ["yarn", "self_extend"])
def test_scales_of_a_temperature_are_trained_alone(
    name: str, checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    run, more = tmp_path / "run", {**SSMAX, "method": name, "lora_target": "none"}
    finetune.main(arguments(checkpoint, texts, run, **more))
    saved = load_file(run / "adapter_model.safetensors")
    layers = AutoConfig.from_pretrained(checkpoint).num_hidden_layers
    assert len(saved) == layers and all("rope_ext_temperature" in name for name in saved)
    model = rope_ext.from_pretrained(run)
    scales = [p for n, p in model.named_parameters() if n.endswith("modules_to_save.default.scale")]
    for value in scales:
        assert any(torch.equal(value, one) for one in saved.values())
        assert (value - 1).abs().min() > 0.01  # two steps of 0.1, the second of half
    assert "differ by" in merge.merge(run, tmp_path / "merged", "float32")
    merged = learned(rope_ext.from_pretrained(tmp_path / "merged"))
    assert [value.tolist() for value in merged.values()] == [value.tolist() for value in scales]


# Chunked loss


@pytest.mark.parametrize("count", [None, torch.tensor(200.0)])
@pytest.mark.parametrize("lora", [False, True])
def test_chunked_loss_is_the_plain_loss(
    ids: torch.Tensor, count: torch.Tensor | None, lora: bool
) -> None:
    labels = ids.clone()
    labels[:, 20:50] = data.IGNORED

    def run(chunked: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = whole = tiny_llama(tie_word_embeddings=lora)
        if lora:
            recipe = settings.Recipe(train_embeddings_and_norms=True)
            torch.manual_seed(0)
            whole = finetune.with_lora(model, recipe)
        if chunked:
            ChunkedLoss(model)
        loss = whole(input_ids=ids, labels=labels, num_items_in_batch=count).loss
        loss.backward()
        grads = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
        return loss.detach(), grads

    loss, grads = run(chunked=True)
    plain_loss, plain_grads = run(chunked=False)
    # float32, other order of sums
    torch.testing.assert_close(loss, plain_loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(grads, plain_grads, rtol=1e-4, atol=1e-6)
    assert len(grads) > 10


def test_chunked_loss_under_autocast(ids: torch.Tensor) -> None:
    losses = []
    for chunked in (False, True):
        model = tiny_llama()
        if chunked:
            ChunkedLoss(model)
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
    assert losses[1].dtype == torch.float32
    # Both have their logits in bfloat16: 3 digits, averaged over 318 tokens.
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=0)


def test_chunked_loss_leaves_logits_alone(ids: torch.Tensor) -> None:
    model = tiny_llama()
    expected = model(ids).logits
    ChunkedLoss(model)
    model(input_ids=ids, labels=ids)
    assert torch.equal(model(ids).logits, expected)


def test_chunked_loss_takes_labels_that_are_shifted_already(ids: torch.Tensor) -> None:
    """As context parallelism does: the last token of a part predicts the first of the next."""
    model = tiny_llama()
    ids, shifted = ids[:, :80], ids[:, 1:81]
    expected = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), shifted.flatten())
    ChunkedLoss(model)
    found = model(input_ids=ids, labels=ids, shift_labels=shifted).loss
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_chunked_loss_weighs_labels(ids: torch.Tensor) -> None:
    model = tiny_llama()
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) * 30
    losses = torch.nn.functional.cross_entropy(
        model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    expected = (losses * weights[:, 1:].flatten()).mean()
    ChunkedLoss(model)
    found = model(input_ids=ids, labels=ids, loss_weights=weights).loss
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)  # float32, other order
    again = model(input_ids=ids, labels=ids).loss  # the next batch has none
    torch.testing.assert_close(again, losses.mean(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", ["Gemma2", "Cohere", "Granite"])
def test_chunked_loss_refuses_scaled_and_capped_logits(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=16,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ChunkedLoss(model)
    ids = torch.zeros((1, 4), dtype=torch.long, device="meta")
    with pytest.raises(rope_ext.UnsupportedModelError, match="--chunked_loss false"):
        model(input_ids=ids, labels=ids)


def test_chunked_loss_needs_a_new_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy")
    with pytest.raises(rope_ext.UnsupportedModelError, match=r"torch>=2.13.*--use_liger_kernel"):
        ChunkedLoss(tiny_llama())


# Settings


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid(path: Path) -> None:
    words = ["--config", str(path), "--use_cpu", "true"]  # without a GPU, for bfloat16
    words += ["--quantize", "false", "--optim", "adamw_torch"]  # without bitsandbytes
    recipe, args = settings.parse(words)
    settings.check_together(recipe, args)
    assert settings.method_of(recipe).name == recipe.method
    assert args.output_dir == f"runs/{path.stem}"
    text = path.read_text()
    assert f"recipes/finetune.py \\\n#       --config recipes/{path.name}\n" in text
    config = text.partition("--config_file ")[2].split()[0]
    assert (ROOT / config).exists()


def test_the_command_line_is_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("factor: 2\nlearning_rate: 1e-3\nlora_target: [a, b]\nstreaming: true\n")
    file.write_text(file.read_text() + "method_options: {beta_fast: 16}\nattn:\n")
    output = ["--output_dir", str(tmp_path / "run")]
    recipe, args = settings.parse(["--factor", "8", "--config", str(file), *output])
    assert (recipe.factor, args.learning_rate, recipe.streaming) == (8.0, 1e-3, True)
    assert recipe.lora_target == ["a", "b"]
    assert recipe.attn is None
    assert settings.method_of(recipe) == rope_ext.YaRN(factor=8, beta_fast=16)


def test_options_are_those_of_a_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rope_ext.YaRN(factor=8, attention_factor=1.3, temperature="log_n")
    choices = [SimpleNamespace(method=method) for method in (rope_ext.NTK(factor=8), found)]
    read = {"runs/calibration.json": SimpleNamespace(choices=choices)}
    monkeypatch.setattr(settings.Calibration, "load", read.__getitem__)
    given = ["--method_options", "runs/calibration.json", "--output_dir", str(tmp_path / "run")]
    recipe, _ = settings.parse([*given, "--factor", "8"])
    assert settings.method_of(recipe) == found
    assert json.loads(recipe.method_options)["attention_factor"] == 1.3
    assert "beta_fast" not in recipe.method_options  # published
    recipe, _ = settings.parse([*given, "--factor", "8", "--method", "ntk"])
    assert settings.method_of(recipe) == rope_ext.NTK(factor=8)
    with pytest.raises(OptionError, match=r"calibrates ntk, yarn, not --method pi"):
        settings.parse([*given, "--factor", "8", "--method", "pi"])
    with pytest.raises(OptionError, match="calibrated for factor 8, and --factor is 4"):
        settings.parse(given)
    monkeypatch.undo()
    with pytest.raises(RopeExtError, match=r"calibration\.json"):
        settings.parse(given)


@pytest.mark.parametrize(
    ("method", "scheme", "warned"),
    [("rerope", "pose", True), ("rerope", "consecutive", False), ("yarn", "random", False)],
)
def test_gaps_between_positions_are_warned_of_where_they_are_slow(method, scheme, warned) -> None:
    recipe = settings.Recipe(method=method, positions=scheme)
    expected = pytest.warns(UserWarning, match=f"rerope.*--positions {scheme} leaves gaps.*yarn")
    with expected if warned else nullcontext():
        settings.warn_of_gaps(recipe, settings.method_of(recipe))


WINDOWS = {
    "positions": "mixed_windows",
    "pose_chunks": 0,
    "length": 256,
    "method": "dynamic_yarn",
}
REFUSED = [
    ({"model": "nowhere/at-all"}, "nowhere/at-all"),
    ({"model": None}, "--model is missing"),
    ({"dataset": "nowhere/at-all"}, "cannot read the dataset 'nowhere/at-all'.*python-library"),
    ({"text_column": "words"}, r"no text column 'words'; set --text_column.* text$"),
    ({"minimum_document": 5000}, "no document is long enough: the longest of all 12 has"),
    (
        {"minimum_document": 5000, "streaming": True},
        "no document is long enough: the longest of the first 12 has",
    ),
    ({"factor": 80, "length": 9000, "pose_chunks": 0}, "not enough for one row of --length 9000"),
    ({"factor": 1}, "does not extend the trained length"),
    ({"length": 128, "pose_chunks": 0}, "longer than the trained 128 tokens"),
    ({"length": 513, "pose_chunks": 0}, "at most the target of 512"),
    ({"length": 512}, "too long for --positions pose, since the target is 512"),
    (
        {"length": 512, "pose_chunks": 0, "positions": "random"},
        "too long for --positions random",
    ),
    ({"positions": "rando"}, "--positions 'rando' is not valid; did you mean 'random'"),
    ({"positions": "random"}, "--pose_chunks needs --positions pose, not random"),
    ({"positions": "random", "pose_chunks": 0, "document_masking": True}, "positions random chang"),
    *(
        (
            {"positions": "random_floats", "pose_chunks": 0, "method": method},
            f"needs fixed frequencies, and {method} counts whole tokens; give --positions random,",
        )
        for method in ("rerope", "dynamic_ntk", "alibi", "nope")
    ),
    ({"positions": "cream", "pose_chunks": 0, "length": 512}, "too long for --positions cream"),
    ({**WINDOWS, "length": 128}, "longer than the trained 128 tokens"),
    ({**WINDOWS, "length": 513}, "at most the target of 512"),
    ({**WINDOWS, "short_share": 0}, "--short_share 0 is not valid.* above 0 and below 1"),
    ({**WINDOWS, "short_share": "nan"}, "--short_share nan is not valid"),
    ({**WINDOWS, "document_masking": True}, "--positions mixed_windows chang"),
    ({**WINDOWS, "retrieval_share": 0.2}, "--positions mixed_windows could separate"),
    (
        {**WINDOWS, "length": 33000, "factor": 400},
        "--positions mixed_windows with --attn sdpa needs a mask.* 2.0 GiB",
    ),
    (
        {**WINDOWS, "attn": "flash_attention_2"},
        "--positions mixed_windows with --attn flash.*--per_device_train_batch_size 1",
    ),
    ({"rows": "books"}, "--rows 'books' is not valid.* packed, document, chunked, bookended"),
    ({"positions": "pose_released", "pose_chunks": 0, "rows": "bookended"}, "leave --rows out"),
    (
        {"rows": "document", "pose_chunks": 0, "length": 256, "document_masking": True},
        "--rows document does not make",
    ),
    ({"rows": "document", "length": 500, "pose_chunks": 2}, "no document is long enough"),
    ({"streaming": True, "length": 6000, "factor": 80}, "not enough for one row of --length 6000"),
    ({"pose_chunks": 1}, "0 .no PoSE., or from 2 to --length 64"),
    ({"pose_chunks": 65}, "0 .no PoSE., or from 2 to --length 64"),
    ({"document_masking": True}, "leave one of them out"),
    ({"method": "yarm"}, "did you mean 'yarn'"),
    ({"method_options": '{"beta": 3}'}, "yarn has no option 'beta'"),
    ({"method_options": "beta=3"}, "give JSON such as"),
    ({"method_options": "[]"}, "give JSON such as"),
    ({"method": "none", "method_options": '{"a": 3}'}, "remove one of them"),
    ({"method": "dynamic_ntk", "method_options": '{"mode": "growing"}'}, "mode 'fixed'"),
    (
        {"method": "dynamic_ntk", "document_masking": True, "length": 256, "pose_chunks": 0},
        "fixed 'length'",
    ),
    (
        {"document_masking": True, "length": 33000, "pose_chunks": 0, "factor": 400},
        "2.0 GiB.*--attn flex_attention.* at most 23170",
    ),
    (
        {"document_masking": True, "attn": "flash_attention_2", "pose_chunks": 0, "length": 256},
        "--per_device_train_batch_size 1 and --gradient_accumulation_steps 2",
    ),
    ({"lora_r": 0, "quantize": True}, "--quantize needs LoRA"),
    ({"lora_r": 0, "loraplus_ratio": 4}, "--loraplus_ratio needs LoRA"),
    ({"lora_target": "none"}, "--method yarn learns nothing; give --method_options .*ssmax"),
    ({"lora_target": "none", "method": "nope"}, "--method nope learns nothing"),
    (
        {"lora_target": "none", "method": "alibi", "method_options": '{"learned": false}'},
        "--method alibi learns nothing",
    ),
    ({"lora_target": ["query"]}, "--lora_target some of down_proj, .*q_proj"),
    ({"dtype": "float8"}, "give float32 or bfloat16"),
    ({"dtype": "bfloat16"}, "--bf16 true"),
    ({"streaming": True, "max_steps": None}, "set --max_steps"),
    ({"datasets": ["{}"]}, "remove one of them"),
    ({"eval_strategy": "steps", "eval_rows": 0}, "--eval_rows 0 is not valid; it must be 1 or"),
    ({"eval_strategy": "steps", "eval_passkeys": -1}, "--eval_passkeys -1 is not valid"),
    ({"eval_strategy": "steps", "eval_length": 20}, r"passkey prompt needs \d+ tokens, and eval"),
    (
        {"eval_strategy": "steps", "eval_rows": 100, "eval_length": 400},
        "not enough for --eval_rows 100 of 400 tokens; lower --eval_rows",
    ),
    (
        {"eval_strategy": "steps", "eval_dataset": "nowhere/else"},
        "cannot read the dataset 'nowhere/",
    ),
    ({"label_smoothing_factor": 0.1}, "--chunked_loss false"),
    ({"learning_rat": 1}, "unknown setting '--learning_rat'; did you mean 'learning_rate'"),
    ({"resume_from_checkpoint": "true"}, "no checkpoint to resume from"),
    ({"resume_from_checkpoint": "nowhere"}, "no checkpoint to resume from .nowhere."),
    ({"config": "nowhere.yaml"}, "cannot read --config nowhere.yaml"),
    ({"positions": "pose_released", "pose_chunks": 0, "rows": "chunked"}, "leave --rows out"),
    (
        {"rows": "chunked", "pose_chunks": 0, "length": 256, "document_masking": True},
        "--rows chunked does not make",
    ),
    ({"rows": "chunked", "length": 500, "pose_chunks": 2}, "lower --length 500"),
    ({"gradient_accumulation_steps": -2}, "--gradient_accumulation_steps -2 .* be 1 or more"),
    ({"gradient_accumulation_steps": 0}, "--gradient_accumulation_steps 0 .* be 1 or more"),
    ({"per_device_train_batch_size": 0}, "--per_device_train_batch_size 0 .* be 1 or more"),
    ({"per_device_train_batch_size": -1}, "--per_device_train_batch_size -1 .* be 1 or more"),
    ({"seed": -1}, "--seed -1 is not valid; it must be from 0 to 4294967295"),
    ({"seed": "abc"}, "argument --seed: invalid int value: 'abc'; see --help"),
    ({"data_seed": 2**32}, "--data_seed 4.*from 0 to 4294967295"),
    ({"attn": "sdpaa"}, "--attn 'sdpaa' is not valid; did you mean 'sdpa'"),
    ({"minimum_document": -1}, "--minimum_document -1 .* 0 or more"),
    ({"learning_rate": -1}, "--learning_rate -1 .* 0 or more"),
    ({"learning_rate": "nan"}, "--learning_rate nan .* 0 or more"),
    ({"learning_rate": "inf"}, "--learning_rate inf .* 0 or more"),
    ({"loraplus_ratio": -4}, "--loraplus_ratio -4 .* above 0"),
    ({"temperature_lr": 0}, "--temperature_lr 0 .* above 0"),
    ({"lora_r": -4}, "--lora_r -4 .* 0 or more"),
    ({"lora_alpha": 0}, "--lora_alpha 0 .* 1 or more"),
    ({"lora_dropout": 2}, "--lora_dropout 2 .* at least 0 and below 1"),
    ({"max_steps": -3}, "--max_steps -3 .* 1 or more, or -1"),
    ({"max_steps": 0}, "--max_steps 0 .* 1 or more, or -1"),
    ({"max_steps": -1, "num_train_epochs": -1}, "--num_train_epochs -1 .* above 0"),
    ({"warmup_steps": -1}, "--warmup_steps -1 .* 0 or more"),
    ({"save_steps": -1}, "--save_steps -1 .* 1 or more, or a share"),
    ({"save_steps": 1.5}, "--save_steps 1.5 .* 1 or more, or a share"),
    ({"save_total_limit": 0}, "--save_total_limit 0 .* 1 or more; leave it out"),
    ({"logging_steps": -1}, "--logging_steps -1 .* 1 or more, or a share"),
    ({"length": 0}, "--length 0 .* 2 or more"),
    ({"length": -5}, "--length -5 .* 2 or more"),
    ({"pose_chunks": -2}, "--pose_chunks -2 is not valid"),
    ({"weight_decay": -1}, "--weight_decay -1 .* 0 or more"),
    ({"max_grad_norm": -1}, "--max_grad_norm -1 .* 0 or more"),
    ({"adam_beta2": 1}, "--adam_beta2 1 .* at least 0 and below 1"),
    ({"original_max_position_embeddings": 0}, "--original_max_position_embeddings 0 .* 1 or more"),
    ({"dataloader_num_workers": -1}, "--dataloader_num_workers -1 .* 0 or more"),
    ({"eval_strategy": "steps", "eval_steps": -1}, "--eval_steps -1 .* 1 or more"),
    ({"deepspeed": "x.json"}, "--deepspeed x.json (is not a file|needs DeepSpeed)"),
    ({"fp16": True, "bf16": True}, "transformers rejects these settings: At most one of fp16"),
]


@pytest.mark.parametrize(("more", "message"), REFUSED, ids=lambda part: str(part)[:40])
def test_bad_input_is_refused_before_the_weights_are_loaded(
    more: dict[str, object],
    message: str,
    checkpoint: Path,
    texts: Path,
    tmp_path: Path,
    weights: None,
) -> None:
    with pytest.raises(RopeExtError, match=f"(?s){message}"):
        finetune.main(arguments(checkpoint, texts, tmp_path / "run", **more))
    assert not (tmp_path / "run").exists()


def test_every_mistake_is_reported_at_once(
    checkpoint: Path, texts: Path, tmp_path: Path, weights: None
) -> None:
    """Ranges, what does not go together, what transformers refuses, the folder and the model."""
    (tmp_path / "file").write_text("")
    bad = {
        "model": "nowhere/at-all",
        "output_dir": tmp_path / "file",
        "use_cpu": None,
        "bf16": True,
        "fp16": True,
        "lora_r": -4,
        "lora_dropout": 2,
        "per_device_train_batch_size": 0,
        "method": "yarm",
        "attn": "sdpaa",
        "rows": "books",
        "pose_chunks": 65,
        "deepspeed": "x.json",
        "learning_rat": 1,
    }
    with pytest.raises(SeveralErrors) as caught:
        finetune.main(arguments(checkpoint, texts, **{"output": tmp_path / "run", **bad}))
    lines = str(caught.value).split("\n")
    assert lines[0] == f"{len(lines) - 1} mistakes:"
    assert all(line.startswith("  - ") for line in lines[1:])
    for words in (
        *("nowhere/at-all", "is not a directory", "--lora_r -4", "--lora_dropout 2", "'yarm'"),
        *("--per_device_train_batch_size 0", "'sdpaa'", "'books'", "--pose_chunks 65", "x.json"),
        "'--learning_rat'",
    ):
        assert sum(words in line for line in lines) == 1, words


def test_what_depends_on_the_model_is_reported_with_the_rest(
    checkpoint: Path, texts: Path, tmp_path: Path, weights: None
) -> None:
    more = {"length": 600, "seed": -1, "pose_chunks": 0}
    with pytest.raises(
        SeveralErrors, match=r"(?s)2 mistakes.*--seed -1.*at most the target of 512"
    ):
        finetune.main(arguments(checkpoint, texts, tmp_path / "run", **more))
    more = {"length": 600, "lora_target": ["query"], "pose_chunks": 0}
    with pytest.raises(SeveralErrors, match=r"(?s)2 mistakes.*target of 512.*some of down_proj"):
        finetune.main(arguments(checkpoint, texts, tmp_path / "run", **more))


def test_bfloat16_without_a_gpu_is_told_with_everything_else(
    checkpoint: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks.training_args, "is_torch_bf16_gpu_available", lambda: False)
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    more = {"use_cpu": None, "bf16": True, "model": "nowhere/at-all", "deepspeed": "x.json"}
    with pytest.raises(SeveralErrors) as caught:
        finetune.main(arguments(checkpoint, texts, tmp_path / "run", **more))
    bf16, deepspeed, model = str(caught.value).split("\n")[1:]
    assert "--bf16 true needs a GPU" in bf16 and "--use_cpu true" in bf16
    assert "pip install deepspeed" in deepspeed
    assert "nowhere/at-all" in model


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"report_to": "wandb"}, "--report_to wandb needs a package"),
        ({"optim": "adamw_bnb_8bit"}, "pip install bitsandbytes"),
        ({"use_liger_kernel": True, "chunked_loss": False}, "pip install liger-kernel"),
    ],
)
def test_a_package_that_a_setting_needs_is_named_before_training(
    setting: dict[str, object], message: str, checkpoint: Path, texts: Path, tmp_path: Path,
    weights: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=message):
        finetune.main(arguments(checkpoint, texts, tmp_path / "run", **setting))


@pytest.mark.parametrize(
    "setting",
    [
        {"method_options": '{"beta_fast": 3, "beta_fast": 4}'},
        {"dataset": None, "datasets": '{"dataset": "a", "dataset": "b", "weight": 1}'},
    ],
)
def test_a_key_of_json_that_is_given_twice_is_refused(
    setting: dict[str, object], checkpoint: Path, texts: Path, tmp_path: Path, weights: None
) -> None:
    with pytest.raises(OptionError, match="is given twice"):
        finetune.main(arguments(checkpoint, texts, tmp_path / "run", **setting))


def test_an_output_folder_that_cannot_be_made_is_refused(
    checkpoint: Path, texts: Path, tmp_path: Path, weights: None
) -> None:
    (tmp_path / "file").write_text("what was there")
    for folder in ("file", "file/run"):
        with pytest.raises(OptionError, match=r"file is not a directory; give another --output"):
            finetune.main(arguments(checkpoint, texts, tmp_path / folder))
    assert (tmp_path / "file").read_text() == "what was there"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nfactor: 4\nseed: 2\n", "'seed' is given twice, in lines 1 and 3"),
        ("datasets:\n  - {weight: 1, weight: 2}\n", "'weight' is given twice, in lines 2 and"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(OptionError, match=message):
        settings.parse(["--config", str(tmp_path / "recipe.yaml")])


@pytest.mark.parametrize(
    ("use_cpu", "variable", "kind", "warned"),
    [
        (True, "ACCELERATE_USE_FSDP", "MULTI_CPU", "FSDP.*plain data parallelism"),
        (True, "ACCELERATE_USE_DEEPSPEED", "MULTI_CPU", "DeepSpeed.*plain data parallelism"),
        (True, "ACCELERATE_USE_SOMETHING", "MULTI_CPU", None),
        (False, "ACCELERATE_USE_FSDP", "MULTI_GPU", None),
    ],
)
def test_a_launch_that_does_not_shard_on_cpus_warns(
    use_cpu: bool,
    variable: str,
    kind: str,
    warned: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, "true")
    state = SimpleNamespace(distributed_type=DistributedType[kind])
    args = SimpleNamespace(use_cpu=use_cpu, distributed_state=state)
    with pytest.warns(UserWarning, match=warned) if warned else nullcontext():
        parallel.warn_of_launch(args)


def test_good_input_is_not_refused(
    checkpoint: Path, texts: Path, tmp_path: Path, weights: None
) -> None:
    for more in ({}, {"length": 256, "pose_chunks": 0}, {"method": "rerope"}):
        with pytest.raises(AssertionError, match="were loaded"):
            finetune.main(arguments(checkpoint, texts, tmp_path / "run", **more))


def test_quantize_needs_bitsandbytes(
    checkpoint: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    recipe, args = settings.parse(arguments(checkpoint, texts, tmp_path, quantize=True))
    with pytest.raises(OptionError, match="pip install bitsandbytes"):
        settings.check_together(recipe, args)


@pytest.mark.parametrize("line", ["learning_rat: 1", "- a", "a: [", "\x00"])
def test_bad_files_are_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(line)
    with pytest.raises(OptionError, match=r"a\.yaml"):
        settings.parse(["--config", str(file)])


def test_context_parallelism_is_asked(
    checkpoint: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "context_parallel_size", lambda config: 2)
    words = arguments(checkpoint, texts, tmp_path, method="rerope")
    with pytest.raises(OptionError, match="context parallelism"):
        finetune.main(words)
    with pytest.raises(OptionError, match="--restoration needs whole rows"):
        finetune.main(arguments(checkpoint, texts, tmp_path, restoration=5))


def test_processes_that_accelerate_has_not_joined_are_refused(
    checkpoint: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would train alone, on all of the data, and write into the same folder."""
    recipe, args = settings.parse(arguments(checkpoint, texts, tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match=r"2 processes.*process group has 1.*give --use_cpu true"):
        finetune.check(recipe, args)
    assert not list(tmp_path.iterdir())


# Runs


def test_a_run_and_what_it_leaves(
    checkpoint: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trains, saves with the patch, merges, refuses the folder; and another run goes on."""
    run, merged = tmp_path / "run", tmp_path / "merged"
    words = arguments(checkpoint, texts, run, train_embeddings_and_norms=True)
    finetune.main(words)
    adapter = rope_ext.from_pretrained(run)
    assert rope_ext.describe(adapter).target_length == 512
    assert AutoTokenizer.from_pretrained(run).model_max_length == 512
    for folder in (run, run / "checkpoint-2"):
        assert (folder / "rope_ext.json").exists()
    assert "differ by" in merge.merge(run, merged, "float32")
    ids = torch.randint(2, 400, (1, 300), generator=torch.Generator().manual_seed(0))
    plain = AutoModelForCausalLM.from_pretrained(merged)  # yarn is transformers' own
    with torch.no_grad():
        expected = adapter(ids).logits
        unpatched = AutoModelForCausalLM.from_pretrained(checkpoint)(ids).logits
        # float32: merged weights against two products
        torch.testing.assert_close(plain(ids).logits, expected, rtol=1e-3, atol=1e-3)
        assert (unpatched - expected).abs().max() > 0.1
    with pytest.raises(OptionError, match="not empty"):
        merge.merge(run, merged, "float32")
    with pytest.raises(OptionError, match=r"another --output_dir.*checkpoint-2"):
        finetune.main(words)
    with pytest.raises(OptionError, match=r"other settings \(learning_rate 0.01 -> 0.02\)"):
        finetune.main([*words, "--resume_from_checkpoint", "true", "--learning_rate", "0.02"])
    (run / "checkpoint-9").mkdir()  # begun when the run was killed
    with pytest.raises(OptionError, match="checkpoint-2"):
        finetune.main(words)


def test_a_run_without_a_change_of_rope(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    run, merged = tmp_path / "run", tmp_path / "merged"
    finetune.main(arguments(checkpoint, texts, run, method="none"))
    assert not (run / "rope_ext.json").exists()
    merge.merge(run, merged, "float32")
    config = AutoConfig.from_pretrained(merged)
    assert config.max_position_embeddings == 4 * TRAINED
    assert config.rope_parameters["rope_type"] == "default"
    full = tmp_path / "full"
    finetune.main(arguments(checkpoint, texts, full, method="none", lora_r=0))
    assert AutoConfig.from_pretrained(full).max_position_embeddings == 4 * TRAINED
    with pytest.raises(OptionError, match="contains no adapter"):
        merge.merge(full, tmp_path / "more", "float32")


@pytest.mark.parametrize("lora_r", [0, 4])
def test_a_run_on_packed_documents_with_a_position_method(
    lora_r: int, checkpoint: Path, texts: Path, tmp_path: Path, ids: torch.Tensor
) -> None:
    run = tmp_path / "run"
    more = {"method": "rerope", "length": 256, "pose_chunks": 0, "document_masking": True}
    more |= {"streaming": True, "gradient_checkpointing": True, "lora_r": lora_r}
    finetune.main(arguments(checkpoint, texts, run, **more))
    model = rope_ext.from_pretrained(run)
    assert rope_ext.describe(model).method == "rerope"
    assert torch.isfinite(model(ids).logits).all()


def test_documents_stay_apart_with_a_cache_asked_for(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    """With a cache, transformers would let them see each other without a word."""
    more = {"length": 256, "pose_chunks": 0, "document_masking": True, "max_steps": 1}
    for name, cache in (("with", True), ("without", False)):
        finetune.main(arguments(checkpoint, texts, tmp_path / name, use_cache=cache, **more))
    assert history(tmp_path / "with" / "checkpoint-1") == history(
        tmp_path / "without" / "checkpoint-1"
    )


def test_a_run_that_is_over_is_not_trained_on(
    checkpoint: Path, texts: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Killed between its last checkpoint and its final save, or not killed at all."""
    run = tmp_path / "run"
    words = [*arguments(checkpoint, texts, run), "--resume_from_checkpoint", "true"]
    finetune.main(words[:-2])
    request.getfixturevalue("weights")  # must not be loaded from here on
    assert len(history(run / "checkpoint-2")) == 2
    final = {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()}
    when = (run / "adapter_model.safetensors").stat().st_mtime_ns
    finetune.main(words)
    assert (run / "adapter_model.safetensors").stat().st_mtime_ns == when
    for name in final.keys() - {"recipe.json"}:
        (run / name).unlink()
    (run / "adapter_model.safetensors").write_bytes(final["adapter_model.safetensors"][:100])
    finetune.main(words)
    assert {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()} == final
    assert [file.name for file in run.iterdir() if file.is_dir()] == ["checkpoint-2"]


def test_checkpoints_that_are_not_whole_are_passed_over(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = arguments(checkpoint, texts, run, max_steps=5, save_steps=1)
    recipe, args = settings.parse([*words, "--resume_from_checkpoint", "true"])
    finetune.main(words)
    for wrong in ("checkpoint-abc", "checkpoint-", "checkpoint-1-2", "checkpoint-99"):
        (run / wrong).mkdir()
    (run / "checkpoint-5" / "trainer_state.json").write_text('{"global')
    weights = run / "checkpoint-4" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (run / "checkpoint-3" / "rng_state.pth").unlink()
    settings.check_output(recipe, args)
    assert Path(args.resume_from_checkpoint).name == "checkpoint-2"
    for wrong in ("checkpoint-3", "checkpoint-4", "checkpoint-5", "checkpoint-abc"):
        args.resume_from_checkpoint = str(run / wrong)
        with pytest.raises(OptionError, match=f"no checkpoint to resume from .*{wrong}"):
            settings.check_output(recipe, args)
    (run / "recipe.json").write_text("{")
    args.resume_from_checkpoint = "true"
    with pytest.raises(OptionError, match=r"cannot read .*recipe\.json.*another --output_dir"):
        settings.check_output(recipe, args)


def test_files_with_names_like_drafts_of_the_run_are_left_alone(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    saved, run = tmp_path / "checkpoint-1", tmp_path / "run"
    saved.mkdir()
    run.mkdir()
    (saved / "config.json").write_text("{}")
    for name in ("config.json.tmp", f"{settings.SETTINGS}.tmp"):
        (run / name).write_text("somebody else's")
    settings.save_from(saved, run)
    settings.write_settings(*settings.parse(arguments(checkpoint, texts, run)))
    assert {path.name for path in run.iterdir()} == {
        *("config.json", "config.json.tmp", settings.SETTINGS, f"{settings.SETTINGS}.tmp")
    }
    assert all(path.read_text() == "somebody else's" for path in run.glob("*.tmp"))


def test_a_run_killed_in_its_first_checkpoint_begins_again(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (run / "checkpoint-2").mkdir(parents=True)
    (run / "checkpoint-2" / "adapter_model.safetensors").write_bytes(b"begun")
    words = [*arguments(checkpoint, texts, run), "--resume_from_checkpoint", "true"]
    finetune.main(words)
    assert len(history(run / "checkpoint-2")) == 2
    assert isinstance(rope_ext.from_pretrained(run), peft.PeftModel)


def test_a_stopped_run_says_how_to_resume(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepared = finetune.prepare(arguments(checkpoint, texts, run))
    assert "no checkpoint yet; run the same command" in settings.how_to_resume(prepared[1])
    finetune.run(*prepared)
    (run / "checkpoint-99").mkdir()  # which the stopped process was writing
    said = settings.how_to_resume(prepared[1])
    assert said.endswith("with --resume_from_checkpoint true to continue from checkpoint-2")


def test_two_runs_do_not_train_in_one_directory(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    said = r"run is in use by another run .*; wait for it, or give another --output_dir"
    with lock(tmp_path, "run"), pytest.raises(MeasureError, match=said):
        finetune.main(arguments(checkpoint, texts, run))
    assert not run.exists()


def test_a_checkpoint_that_is_written_again_is_not_whole_meanwhile(
    checkpoint: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    words = arguments(checkpoint, texts, run, save_steps=1)
    finetune.main(words)
    words += ["--resume_from_checkpoint", str(run / "checkpoint-1")]
    state = run / "checkpoint-2" / "trainer_state.json"

    def save(self: transformers.Trainer, *args: object) -> None:
        assert not state.exists()
        raise KeyboardInterrupt

    assert state.exists()
    monkeypatch.setattr(transformers.Trainer, "save_model", save)
    with pytest.raises(KeyboardInterrupt):
        finetune.main(words)
    assert not state.exists()


def test_a_run_that_diverges_stops_and_keeps_what_was_good(
    checkpoint: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    words = arguments(checkpoint, texts, run, max_steps=6, save_steps=1, learning_rate=1e30)
    with pytest.raises(finetune.DivergedError, match=r"the loss is nan after .*--learning_rate"):
        finetune.main(words)
    saved = sorted(run.glob("checkpoint-*/adapter_model.safetensors"))
    assert saved
    for file in saved:
        assert all(torch.isfinite(weight).all() for weight in load_file(file).values())
    assert not (run / "adapter_model.safetensors").exists()

    class Broken(transformers.TrainerCallback):
        def on_step_end(
            self, args: object, state: object, control: object, model: torch.nn.Module, **_: object
        ) -> None:
            next(p for p in model.parameters() if p.requires_grad).data[0, 0] = float("nan")

    made = finetune.LongTrainer.__init__

    def broken(self: finetune.LongTrainer, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)
        self.add_callback(Broken())

    monkeypatch.setattr(finetune.LongTrainer, "__init__", broken)
    last = tmp_path / "last"
    with pytest.raises(finetune.DivergedError, match="weights are not finite after 1 steps"):
        finetune.main(arguments(checkpoint, texts, last, max_steps=1))
    assert not list(last.rglob("*.safetensors"))


def test_a_wrong_merge_is_told(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    found, expected = torch.ones(3), torch.tensor([1.0, 1.0, 2.0])
    assert merge.difference(expected, expected, 0.0, "logits") == 0
    for wrong in (found, found * float("nan")):
        with pytest.raises(MeasureError, match="do not use them"):
            merge.difference(wrong, expected, 0.1, "logits")


def test_what_cannot_be_merged_is_told_first(
    checkpoint: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, base = tmp_path / "run", shutil.copytree(checkpoint, tmp_path / "base")
    finetune.main(arguments(base, texts, run, method="none"))
    for file in run.glob("tokenizer*"):
        file.unlink()
    merge.merge(run, tmp_path / "merged", "float32")  # with that of the base
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == "</s>"
    (base / "config.json").rename(base / "away")
    with pytest.raises(OptionError, match="onto its base"):
        merge.merge(run, tmp_path / "more", "float32")
    monkeypatch.setattr(merge, "load", lambda adapter: pytest.fail("the weights were loaded"))
    (base / "away").rename(base / "config.json")
    with pytest.raises(OptionError, match=r"cannot create .*--output another directory"):
        merge.merge(run, texts / "below a file", "float32")
    for file in base.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(OptionError, match=r"neither .* nor its base .* has a tokenizer; copy"):
        merge.merge(run, tmp_path / "none", "float32")
    for broken in ("{", "[3]", ""):
        (run / "adapter_config.json").write_text(broken)
        with pytest.raises(OptionError, match=r"cannot read .*adapter_config\.json"):
            merge.merge(run, tmp_path / "none", "float32")
    with pytest.raises(OptionError, match="/nonexistent contains no adapter"):
        merge.merge(Path("/nonexistent"), tmp_path / "none", "float32")
    assert not (tmp_path / "none").exists()


def start(words: list[str], cache: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "HF_DATASETS_CACHE": str(cache),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    command = [sys.executable, "recipes/finetune.py", *words]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    """Dropout, epochs of 8 steps, and PoSE positions that are new in each of them."""
    more = {"max_steps": 24, "save_steps": 4, "lora_dropout": 0.1}
    more |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start(arguments(checkpoint, texts, killed, **more), tmp_path / "cache")
    while process.poll() is None and not (killed / "checkpoint-12").exists():
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "checkpoint-24").exists(), process.stderr.read().decode()
    words = [*arguments(checkpoint, texts, killed, **more), "--resume_from_checkpoint", "true"]
    finetune.main(words)
    finetune.main(arguments(checkpoint, texts, whole, **more))
    assert len(history(whole / "checkpoint-24")) == 24
    assert history(killed / "checkpoint-24") == history(whole / "checkpoint-24")
    weights = [load_file(run / "adapter_model.safetensors") for run in (whole, killed)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert isinstance(rope_ext.from_pretrained(killed), peft.PeftModel)
