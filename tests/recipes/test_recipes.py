"""recipes/finetune.py and merge.py, on a tiny Llama trained (so to say) on 128 tokens."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from pathlib import Path

import datasets
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import rope_ext
from recipes import data, finetune, merge, positions, settings
from recipes.loss import ChunkedLoss, WeightedLoss
from rope_ext import OptionError
from rope_ext.errors import MeasureError, UnsupportedModelError
from rope_ext.position.learned import learned
from tests.helpers.checkpoint import TRAINED, save_config
from tests.helpers.models import tiny_llama
from tests.helpers.recipe_runs import arguments

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


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
    rows, _ = data.rows(source, tokenizer, data.Pack(len(ids), masking=True), minimum=len(ids))
    found = list(islice(rows, 5))
    assert len(found) == (5 if streaming else 2)  # a stream begins again
    for index, row in enumerate(found):
        assert (list(row["input_ids"]), row["index"]) == (ids, index)
        assert list(row["position_ids"]) == list(range(len(ids)))


def test_data_without_text_are_refused(tmp_path: Path) -> None:
    for name, content, message in (
        ("a.jsonl", '{"text": 3}', r"no text column 'text'; .*none"),
        ("b.jsonl", "{", "cannot read the dataset"),
        ("d.csv", "text", "has no text files; supported suffixes"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(data.DataError, match=message):
            data.documents(str(tmp_path / name))


def test_files_of_several_kinds_have_one_column(tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (folder / "b.jsonl").write_text('{"content": "two"}')
    assert sorted(data.documents(str(folder), column="content")["text"]) == ["one", "two"]
    for streaming in (False, True):
        rows = list(data.documents(str(folder), streaming=streaming))
        assert [row["text"] for row in rows] == ["one", None]
        assert rows[1]["problem"] == f"{folder}/b.jsonl has no column 'text' but content"
    with pytest.raises(data.DataError, match=r"b.jsonl has no column 'text' .*--bad_files skip"):
        data.documents(str(folder), strict=True)
    (folder / "a.txt").unlink()  # all files are as b.jsonl
    with pytest.raises(data.DataError, match=r"no text column 'text'; .*Text columns: content"):
        data.documents(str(folder))


@given(
    length=st.integers(2, 40),
    room=st.integers(1, 200),
    chunks=st.integers(2, 8),
    seed=st.integers(0, 2**20),
)
def test_pose_positions(length: int, room: int, chunks: int, seed: int) -> None:
    target, chunks = length + room, min(chunks, length)
    starts, offsets = positions.skipped_positions(length, target, chunks, random.Random(seed))
    assert len(starts) == len(offsets) == chunks
    assert starts[0] == offsets[0] == 0
    assert starts == sorted(set(starts))
    assert max(starts) < length
    assert offsets == sorted(offsets)
    collator = data.Collator(positions.PoSE(target, chunks), seed)
    (found,) = collator([{"input_ids": list(range(length)), "index": 5}])["position_ids"].tolist()
    assert found[0] == 0
    assert found == sorted(set(found))
    assert found[-1] < target


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


@pytest.mark.parametrize("method", ["yarn", "rerope"])
def test_masked_documents_do_not_see_each_other(method: str) -> None:
    model = rope_ext.patch(tiny_llama(), method, factor=4)
    documents = [list(range(3, 83)), list(range(40, 60)), list(range(90, 120))]
    packed = data.Pack(130, masking=True)({"input_ids": documents})
    batch = data.Collator()([{name: value[0].tolist() for name, value in packed.items()}])
    labels = batch.pop("labels")[0].tolist()
    assert [at for at, label in enumerate(labels) if label == data.IGNORED] == [0, 80, 100]
    with torch.no_grad():
        together = model(**batch, use_cache=False).logits[0]
        alone = [model(torch.tensor([ids]), use_cache=False).logits[0] for ids in documents]
    # float32 sums in another order
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_lora_with_embeddings_and_norms(model: transformers.LlamaForCausalLM) -> None:
    recipe = settings.Recipe(train_embeddings_and_norms=True)
    whole = finetune.with_lora(model.to(torch.bfloat16), recipe)
    trained = {
        name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
        for name, parameter in whole.named_parameters()
        if parameter.requires_grad
    }
    parts = ["input_layernorm", "post_attention_layernorm"]
    parts += [f"self_attn.{name}_proj.lora_{half}.default" for name in "qkvo" for half in "AB"]
    expected = {f"model.layers.{i}.{part}.weight" for i in range(2) for part in parts}
    assert trained == expected | {"model.embed_tokens.weight", "model.norm.weight"}
    for parameter in whole.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)


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
    recipe, args, plan = finetune.prepare(words)
    model = finetune.build(recipe, plan.config)
    optimizer = finetune.LongTrainer(recipe, model, args, plan=plan).create_optimizer()
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
    words = arguments(checkpoint, texts, tmp_path / "run", **given)
    recipe, args, plan = finetune.prepare(words)
    model = finetune.build(recipe, plan.config)
    optimizer = finetune.LongTrainer(recipe, model, args, plan=plan).create_optimizer()
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(groups) == len(trained)
    for name, parameter in trained.items():
        group, scale = groups[id(parameter)], "rope_ext_temperature" in name
        assert (group["lr"] == 0.3) == scale and not (scale and group["weight_decay"])


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


@pytest.mark.parametrize("kind", [ChunkedLoss, WeightedLoss])
def test_a_weight_multiplies_the_loss_of_its_token(kind: type, ids: torch.Tensor) -> None:
    model, weights = tiny_llama(), torch.rand(ids.shape)
    plain = model(input_ids=ids, labels=ids).loss
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    kind(model)
    found = model(input_ids=ids, labels=ids, loss_weights=weights).loss
    counted = weights[:, 1:].flatten()
    torch.testing.assert_close(found, losses @ counted / counted.sum())
    found = model(input_ids=ids, labels=ids, loss_weights=weights, num_items_in_batch=50).loss
    torch.testing.assert_close(found, losses @ counted / 50)
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, plain)


def test_weights_of_labels_are_not_lost(ids: torch.Tensor) -> None:
    """By a model that computes its loss in another way."""
    model = tiny_llama()
    WeightedLoss(model)
    model.loss_function = lambda **given: torch.tensor(1.0)
    with pytest.raises(UnsupportedModelError, match="--retrieval_share 0"):
        model(input_ids=ids, labels=ids, loss_weights=torch.ones(ids.shape))


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
    assert (ROOT / text.partition("--config_file ")[2].split()[0]).exists()


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


def test_processes_wait_for_a_day_until_the_data_are_read(tmp_path: Path) -> None:
    for words, seconds in (([], 24 * 60 * 60), (["--ddp_timeout", "60"], 60)):
        _, args = settings.parse([*words, "--output_dir", str(tmp_path / "run")])
        assert args.ddp_timeout_delta == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [x]\nb: &b [*a, *a]\nlora_target: [*b, *b]\n", "alias"),
        ("lora_target: " + "[" * 3000 + "\n", "cannot read --config"),
        ("# " + "a" * 2**20 + "\n", "more than 1 MB"),
    ],
)
def test_a_file_that_grows_when_it_is_read_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(OptionError, match=said):
        settings.parse(["--config", str(file), "--output_dir", str(tmp_path / "run")])


WINDOWS = {"positions": "mixed_windows", "pose_chunks": 0, "length": 256, "method": "dynamic_yarn"}
REFUSED = [
    ({"model": "nowhere/at-all"}, "nowhere/at-all"),
    ({"model": None}, "--model is missing"),
    ({"dataset": "nowhere/at-all"}, "cannot read the dataset 'nowhere/at-all'.*python-library"),
    (
        {"eval_dataset": "./nothere.txt", "eval_strategy": "steps", "eval_length": 400},
        "give --eval_dataset an existing one",
    ),
    ({"text_column": "words"}, r"no text column 'words'; set --text_column.* text$"),
    ({"minimum_document": 5000}, "no document is long enough: the longest of all 12 has"),
    ({"factor": 80, "length": 9000, "pose_chunks": 0}, "not enough for one row of --length 9000"),
    ({"factor": 1}, "does not extend the trained length"),
    ({"length": 513, "pose_chunks": 0}, "at most the target of 512"),
    ({"length": 512}, "too long for --positions pose, since the target is 512"),
    ({"positions": "rando"}, "--positions 'rando' is not valid; did you mean 'random'"),
    ({"positions": "random_floats", "pose_chunks": 0, "method": "rerope"}, "rerope counts whole"),
    ({**WINDOWS, "short_share": 0}, "--short_share 0 is not valid.* above 0 and below 1"),
    ({**WINDOWS, "document_masking": True}, "--positions mixed_windows chang"),
    (
        {**WINDOWS, "attn": "flash_attention_2"},
        "--positions mixed_windows with --attn flash.*--per_device_train_batch_size 1",
    ),
    ({"rows": "books"}, "--rows 'books' is not valid.* packed, document, chunked, bookended"),
    ({"streaming": True, "length": 6000, "factor": 80}, "not enough for one row of --length 6000"),
    ({"pose_chunks": 1}, "0 .no PoSE., or from 2 to --length 64"),
    ({"document_masking": True}, "leave one of them out"),
    ({"method": "yarm"}, "did you mean 'yarn'"),
    ({"method_options": '{"beta": 3}'}, "yarn has no option 'beta'"),
    ({"method": "dynamic_ntk", "method_options": '{"mode": "growing"}'}, "mode 'fixed'"),
    (
        {"method": "dynamic_ntk", "document_masking": True, "length": 256, "pose_chunks": 0},
        "fixed 'length'",
    ),
    (
        {"document_masking": True, "length": 33000, "pose_chunks": 0, "factor": 400},
        "2.0 GiB.*--attn flex_attention.* at most 23170",
    ),
    ({"target_length": 1024}, "--factor and --target_length set the same"),
    ({"dataloader_persistent_workers": True, "dataloader_num_workers": 1}, "of the first epoch"),
    ({"lora_target": ["q_proj", "kproj"]}, "no layer kproj.; give --lora_target .*k_proj"),
    ({"lora_r": 0, "quantize": True}, "--quantize needs LoRA"),
    ({"lora_target": "none"}, "--method yarn learns nothing; give --method_options .*ssmax"),
    ({"dtype": "bfloat16"}, "--bf16 true"),
    ({"dtype": "bfloat16", "bf16": True, "lora_r": 0}, "trains all weights.*--dtype float32"),
    ({"streaming": True, "max_steps": None}, "set --max_steps"),
    ({"eval_strategy": "steps", "eval_length": 20}, r"passkey prompt needs \d+ tokens, and eval"),
    (
        {"eval_strategy": "steps", "eval_rows": 100, "eval_length": 400},
        "not enough for --eval_rows 100 of 400 tokens; lower --eval_rows",
    ),
    (
        {"learning_rat": 1, "output_dir": None},
        "^unknown setting '--learning_rat'; did you mean 'learning_rate'[^']*$",
    ),
    (
        {"retrieval_share": 0.5, "label_smoothing_factor": 0.1, "chunked_loss": False},
        "--label_smoothing_factor do not support",
    ),
    ({"lora_target": ["lm_head", "q_proj"]}, "--chunked_loss false, or leave it out of --lora_t"),
    ({"resume_from_checkpoint": "true"}, "no checkpoint to resume from"),
    ({"per_device_train_batch_size": 0}, "--per_device_train_batch_size 0 .* be 1 or more"),
    ({"max_steps": -3}, "--max_steps -3 .* 1 or more, or -1"),
]


@pytest.mark.parametrize(("more", "message"), REFUSED, ids=lambda part: str(part)[:40])
def test_bad_input_is_refused_before_the_weights_are_loaded(
    more: dict[str, object], message: str, refused: Callable[..., None]
) -> None:
    refused(message, **more)


def test_a_run_and_what_it_leaves(
    checkpoint: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trains, saves with the patch, merges, refuses the folder; and another run goes on."""
    run, merged = tmp_path / "run", tmp_path / "merged"
    more = {"train_embeddings_and_norms": True, "gradient_accumulation_steps": 2}
    words = arguments(checkpoint, texts, run, **more)
    finetune.main(words)
    told = capsys.readouterr().err
    assert "2 steps of 256 tokens\n" in told  # two times two rows of 64
    assert told.count(" in all, after the first batch") == 1
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
    resume = ["--resume_from_checkpoint", str(run / "checkpoint-2"), "--output_dir"]
    with pytest.raises(OptionError, match=r"run belongs to .* \(factor 4.0 -> 8.0\)"):
        finetune.main([*words, *resume, str(tmp_path / "other"), "--factor", "8"])
    finetune.main([*words, *resume, str(tmp_path / "other")])  # it is finished
    assert load_file(tmp_path / "other" / "adapter_model.safetensors").keys()
    with pytest.raises(OptionError, match="merged contains the results of a run or a model"):
        finetune.main([*words, "--output_dir", str(merged)])
    with pytest.raises(OptionError, match="no state of the optimizer"):
        finetune.main([*words, *resume[:2], "--max_steps", "9", "--save_only_model", "true"])
    (run / "checkpoint-9").mkdir()  # begun when the run was killed
    with pytest.raises(OptionError, match="checkpoint-2"):
        finetune.main(words)


def test_a_run_that_ended_meanwhile_is_not_written_over(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    words = arguments(checkpoint, texts, tmp_path / "run", save_steps=1)
    resume = [*words, "--resume_from_checkpoint", "true"]
    first, second = finetune.prepare(words), finetune.prepare(words)
    finetune.run(*first)
    with pytest.raises(OptionError, match=r"results of a run.*checkpoint-2"):
        finetune.run(*second)
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    first, second = finetune.prepare(resume), finetune.prepare(resume)
    finetune.run(*first)
    finetune.run(*second)
    assert second[1].resume_from_checkpoint == str(tmp_path / "run" / "checkpoint-2")


@pytest.mark.parametrize("place", ["beside", "read-only", "mounted"])
def test_one_run_at_a_time_is_in_a_directory(
    place: str,
    checkpoint: Path,
    texts: Path,
    tmp_path: Path,
    weights: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second one ends before it reads the data."""
    run = tmp_path / "run"
    run.mkdir()
    if place == "read-only":  # to root, nothing is
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    if place == "mounted":
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == run)
    settings = finetune.prepare(arguments(checkpoint, texts, run))
    tried = []

    def read(*given: object) -> None:
        tried.append(given)
        finetune.run(*settings)  # a second one

    monkeypatch.setattr(finetune, "read", read)
    with pytest.raises(MeasureError, match="run is in use by another run"):
        finetune.run(*settings)
    assert len(tried) == 1
    assert (run / ".rope-ext").exists() == (place != "beside")
    assert (tmp_path / ".rope-ext").exists() == (place == "beside")


@pytest.mark.parametrize("name", ["true", "checkpoint-1"])
def test_a_run_on_another_number_of_devices_is_not_begun_again(
    name: str, checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    finetune.main(arguments(checkpoint, texts, run, save_steps=1))
    # As two processes leave it.
    written = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps(written | {"world_size": 2}))
    for saved in run.glob("checkpoint-*"):
        state = saved / "rng_state.pth"
        (saved / "rng_state_1.pth").write_bytes(state.read_bytes())
        state.rename(saved / "rng_state_0.pth")
    resume = name if name == "true" else run / name
    with pytest.raises(OptionError, match=r"on 2 devices.*--num_processes 2"):
        finetune.main(arguments(checkpoint, texts, run, resume_from_checkpoint=resume))


@pytest.mark.parametrize("method", ["yarn", "self_extend"])
def test_a_model_that_is_extended_already_is_refused_in_the_words_of_the_recipe(
    method: str, checkpoint: Path, tmp_path: Path, refused: Callable[..., None]
) -> None:
    config = rope_ext.patch(tiny_llama(), method, factor=4).config
    folder = save_config(tmp_path / "extended", config, checkpoint)
    on_top = ", --compose true.* " if method == "yarn" else " "
    said = rf"already extended to \d+ tokens .*--model the original model{on_top}or --method none"
    refused(said, model=folder, method="yarn")


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_lora_on_a_tied_weight_is_refused(
    target: str, checkpoint: Path, tmp_path: Path, refused: Callable[..., None]
) -> None:
    """It could not be merged."""
    config = tiny_llama(tie_word_embeddings=True).config
    folder = save_config(tmp_path / "tied", config, checkpoint)
    said = f"adds LoRA to {target}.*some of down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, "
    more = {"model": folder, "chunked_loss": False}
    refused(said + "v_proj, and", lora_target=["q_proj", target], **more)
    refused(
        "--lora_target some of down_proj, gate_proj, k_proj, o_", lora_target=["x", "y"], **more
    )


def test_a_run_is_not_written_into_its_own_data(
    checkpoint: Path, texts: Path, tmp_path: Path, weights: None
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(texts.read_bytes())
    run = folder / "runs" / "first"
    with pytest.raises(OptionError, match=rf"--output_dir {run} is in --dataset {folder}"):
        finetune.prepare(arguments(checkpoint, folder, run))
    with pytest.raises(OptionError, match="is in --eval_dataset"):
        finetune.prepare(
            arguments(checkpoint, texts, run, eval_strategy="steps", eval_dataset=folder)
        )
    finetune.prepare(arguments(checkpoint, folder, folder / ".runs" / "first"))  # is not read
    finetune.prepare(arguments(checkpoint, folder, tmp_path / "data 2"))


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_tokenizer_is_not_written_over(
    name: str, checkpoint: Path, texts: Path, tmp_path: Path, weights: None
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("{}")
    with pytest.raises(OptionError, match=rf"\({name}\); give another --output_dir$"):
        finetune.prepare(arguments(checkpoint, texts, tmp_path / "run"))


@pytest.mark.parametrize(
    "more", [{"dataloader_drop_last": True}, {"train_sampling_strategy": "sequential"}], ids=str
)
def test_a_run_is_not_resumed_with_other_rows_in_a_step(
    more: dict[str, object], checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    finetune.main(arguments(checkpoint, texts, run, save_steps=1))
    again = arguments(checkpoint, texts, run, resume_from_checkpoint="true", **more)
    with pytest.raises(OptionError, match=f"other settings .{next(iter(more))} "):
        finetune.main(again)
    # A run of before these were recorded.
    recorded = json.loads((run / "recipe.json").read_text())
    del recorded[next(iter(more))]
    (run / "recipe.json").write_text(json.dumps(recorded))
    finetune.main(again)


def test_a_run_without_a_change_of_rope(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    run, merged = tmp_path / "run", tmp_path / "merged"
    finetune.main(arguments(checkpoint, texts, run, method="none"))
    assert not (run / "rope_ext.json").exists()
    merge.merge(run, merged, "float32")
    config = AutoConfig.from_pretrained(merged)
    assert config.max_position_embeddings == 4 * TRAINED
    assert config.rope_parameters["rope_type"] == "default"
    base, more, full = (tmp_path / name for name in ("base", "more", "full"))
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    rope_ext.patch(model, "rerope", factor=2).save_pretrained(base)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(base)
    finetune.main(arguments(base, texts, more, method="none"))
    merge.merge(more, tmp_path / "again", "float32")
    assert rope_ext.describe(rope_ext.from_pretrained(tmp_path / "again")).method == "rerope"
    finetune.main(arguments(checkpoint, texts, full, method="none", lora_r=0))
    assert AutoConfig.from_pretrained(full).max_position_embeddings == 4 * TRAINED
    with pytest.raises(OptionError, match="contains no adapter"):
        merge.merge(full, tmp_path / "last", "float32")


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


def test_a_run_that_diverges_stops_and_keeps_what_was_good(
    checkpoint: Path, texts: Path, tmp_path: Path
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
