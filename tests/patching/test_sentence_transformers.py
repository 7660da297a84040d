"""SentenceTransformer and CrossEncoder: encoding, lengths, saving, pools and ONNX under patches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import rope_ext
from tests.helpers.checkpoint import TRAINED, save_checkpoint

package = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.slow

FAMILIES = {"EuroBert": {}, "ModernBert": {"local_attention": 32}, "Llama": {}}
METHODS = ("yarn", "ntk", "dynamic_ntk", "dynamic_yarn", "self_extend", "rerope", "lm_infinite")
CLOSE = {"atol": 2e-5, "rtol": 0}
TEXTS = ["The grass is green. The sky is blue. " * 25, "The sun is yellow.", "Here we go. " * 30]
TARGET = 2 * TRAINED


def save_model(folder: Path, family: str, head: str = "Model") -> Path:
    """Save a tiny model of a family with a tokenizer, as transformers does."""
    save_checkpoint(folder)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TRAINED,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        num_labels=1,
        **FAMILIES[family],
    )
    torch.manual_seed(0)
    getattr(transformers, f"{family}{head}")(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[str, ...], Path] = {}

    def get(*which: str) -> Path:
        if which not in made:
            made[which] = save_model(tmp_path_factory.mktemp("model"), *which)
        return made[which]

    return get


def embedder(folder: Path) -> Any:
    return package.SentenceTransformer(str(folder), device="cpu")


def by_hand(folder: Path, method: str | None, texts: list[str], limit: int = TARGET) -> Any:
    """Mean pooling over the tokens of each text alone, by a patched transformers model."""
    model = AutoModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if method is not None:
        rope_ext.patch(model, method, factor=2)
    rows = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            rows.append(model(ids, attention_mask=torch.ones_like(ids))[0][0].mean(0))
    return torch.stack(rows)


def encode(model: Any, texts: list[str] = TEXTS, **more: Any) -> torch.Tensor:
    return torch.as_tensor(model.encode(texts, **more))


EVERY = [
    one.name
    for one in rope_ext.methods()
    if all(value is not ... for name, value in one.options.items() if name != "factor")
]
"""Methods and encodings that need no options but a factor."""


@pytest.mark.parametrize(
    ("family", "method"),
    [*product(FAMILIES, METHODS), *(("EuroBert", one) for one in EVERY if one not in METHODS)],
)
def test_encode_pools_the_states_of_the_patched_model(
    family: str, method: str, folder: Callable[..., Path]
) -> None:
    place = folder(family)
    try:
        by_hand(place, method, TEXTS[:1])
    except rope_ext.RopeExtError as error:  # causal ones, for example
        with pytest.raises(type(error), match=str(error)[:20]):
            rope_ext.patch(embedder(place), method, factor=2)
        return
    model = embedder(place)
    before = encode(model)
    torch.testing.assert_close(before, by_hand(place, None, TEXTS, TRAINED), **CLOSE)
    assert rope_ext.patch(model, method, factor=2) is model
    torch.testing.assert_close(encode(model), by_hand(place, method, TEXTS), **CLOSE)
    assert method in str(rope_ext.describe(model))
    rope_ext.unpatch(model)
    assert torch.equal(encode(model), before)


def test_a_long_text_is_cut_at_the_length_that_the_patch_reaches(
    folder: Callable[..., Path],
) -> None:
    model = embedder(folder("EuroBert"))
    assert model.max_seq_length == TRAINED
    with rope_ext.patched(model, "self_extend", factor=2):
        assert model.max_seq_length == model.tokenizer.model_max_length == TARGET
        assert str(TARGET) in str(rope_ext.describe(model))
        tokens = model.preprocess(TEXTS[:1])["input_ids"]
        assert tokens.shape[1] > TRAINED
    assert model.max_seq_length == model.tokenizer.model_max_length == TRAINED
    assert model.preprocess(TEXTS[:1])["input_ids"].shape[1] == TRAINED
    model.max_seq_length = 50  # a choice of the user is raised by the factor
    with rope_ext.patched(model, "yarn", factor=2):
        assert model.max_seq_length == 100
    model.max_seq_length = 10**9  # without a limit
    with rope_ext.patched(model, "yarn", factor=2):
        assert model.max_seq_length == 10**9
    model.max_seq_length = TRAINED
    rope_ext.patch(model, "yarn", factor=2)
    rope_ext.patch(model, "self_extend", factor=4, replace=True)
    assert model.max_seq_length == 4 * TRAINED
    rope_ext.unpatch(model)
    assert model.max_seq_length == TRAINED


def test_the_model_inside_may_be_patched_instead(folder: Callable[..., Path]) -> None:
    model, place = embedder(folder("EuroBert")), folder("EuroBert")
    rope_ext.patch(model.transformers_model, "self_extend", factor=2, tokenizer=model.tokenizer)
    torch.testing.assert_close(encode(model), by_hand(place, "self_extend", TEXTS), **CLOSE)


@pytest.mark.parametrize("method", ["yarn", "ntk", "self_extend", "rerope"])
def test_a_saved_model_gives_equal_embeddings(
    method: str, folder: Callable[..., Path], tmp_path: Path
) -> None:
    model = embedder(folder("EuroBert"))
    rope_ext.patch(model, method, factor=2)
    want = encode(model)
    model.save(str(tmp_path / "saved"))
    if method in ("yarn", "ntk"):
        again = embedder(tmp_path / "saved")
    else:
        with pytest.raises(KeyError, match=r"rope_ext\.from_pretrained"):
            embedder(tmp_path / "saved")
        again = rope_ext.from_pretrained(tmp_path / "saved", device="cpu")
        assert method in str(rope_ext.describe(again))
    assert type(again) is type(model) and again.max_seq_length == TARGET
    torch.testing.assert_close(encode(again), want, **CLOSE)


def test_a_saved_model_keeps_what_its_patch_learned_and_a_shorter_length(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    model = embedder(folder("EuroBert"))
    model.max_seq_length = 40
    rope_ext.patch(model, "self_extend", factor=2, bias="t5")
    for name, parameter in model.named_parameters():
        if "rope_ext" in name:
            parameter.data.normal_()
    want = encode(model)
    model.save_pretrained(str(tmp_path / "saved"))
    again = rope_ext.from_pretrained(tmp_path / "saved")
    assert again.max_seq_length == 80
    torch.testing.assert_close(encode(again), want, **CLOSE)


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "self_extend"])
def test_a_cross_encoder_scores_pairs_as_its_model(
    method: str, folder: Callable[..., Path], tmp_path: Path
) -> None:
    place = folder("EuroBert", "ForSequenceClassification")
    model = package.CrossEncoder(str(place), device="cpu")
    rope_ext.patch(model, method, factor=2)
    assert model.max_seq_length == TARGET
    pairs = [(TEXTS[1], TEXTS[0]), (TEXTS[1], TEXTS[2])]
    found = torch.as_tensor(model.predict(pairs, activation_fn=torch.nn.Identity()))
    plain = AutoModelForSequenceClassification.from_pretrained(place).eval()
    rope_ext.patch(plain, method, factor=2)
    tokenizer = AutoTokenizer.from_pretrained(place)
    for pair, score in zip(pairs, found, strict=True):
        ids = tokenizer(*pair, truncation=True, max_length=TARGET, return_tensors="pt")
        with torch.no_grad():
            want = plain(ids["input_ids"], attention_mask=ids["attention_mask"]).logits[0, 0]
        torch.testing.assert_close(score, want, **CLOSE)
    model.save_pretrained(str(tmp_path / "saved"))
    load = package.CrossEncoder if method == "yarn" else rope_ext.from_pretrained
    again = load(str(tmp_path / "saved"))
    assert isinstance(again, package.CrossEncoder)
    said = torch.as_tensor(again.predict(pairs, activation_fn=torch.nn.Identity()))
    torch.testing.assert_close(said, found, **CLOSE)


@pytest.mark.parametrize("kind", ["SentenceTransformer", "CrossEncoder"])
@pytest.mark.parametrize("method", ["yarn", "self_extend", "t5"])
def test_training_resumes_and_ends_with_the_best_model(
    method: str, kind: str, folder: Callable[..., Path], tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    scores = kind == "CrossEncoder"
    place = folder("EuroBert", "ForSequenceClassification" if scores else "Model")
    data = datasets.Dataset.from_dict(
        {"one": TEXTS * 4, "other": TEXTS[::-1] * 4, "label": [1.0, 0.0, 0.5] * 4}
    )

    def trained(steps: int, resume: bool = False) -> Any:
        model = getattr(package, kind)(str(place), device="cpu")
        rope_ext.patch(model, method, factor=2)
        arguments = getattr(package, f"{kind}TrainingArguments")(
            output_dir=str(tmp_path / "run"),
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            save_steps=2,
            eval_steps=2,
            eval_strategy="steps",
            load_best_model_at_end=not resume,
            greater_is_better=True,  # by loss, so that it is not the last one
            use_cpu=True,
            report_to="none",
        )
        trainer = getattr(package, f"{kind}Trainer")(
            model=model, args=arguments, train_dataset=data, eval_dataset=data
        )
        trainer.train(resume_from_checkpoint=resume or None)
        return model, trainer.state

    model, state = trained(4)
    assert Path(state.best_model_checkpoint).name == "checkpoint-2"
    if method == "yarn":
        best = getattr(package, kind)(state.best_model_checkpoint, device="cpu")
    else:
        best = rope_ext.from_pretrained(state.best_model_checkpoint, device="cpu")
    for name, value in best.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, atol=0, rtol=0)
    _, state = trained(6, resume=True)
    assert state.global_step == 6


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "self_extend"])
def test_processes_of_a_pool_are_patched(method: str, folder: Callable[..., Path]) -> None:
    model = embedder(folder("EuroBert"))
    rope_ext.patch(model, method, factor=2)
    want = encode(model)
    pool = model.start_multi_process_pool(["cpu"])
    try:
        found = torch.as_tensor(model.encode(TEXTS, pool=pool, chunk_size=2))
    finally:
        model.stop_multi_process_pool(pool)
    torch.testing.assert_close(found, want, **CLOSE)


def test_onnx_under_a_frequency_method(folder: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = embedder(folder("EuroBert"))
    rope_ext.patch(model, "yarn", factor=2)
    given = {name: model.preprocess(TEXTS[:1])[name] for name in ("input_ids", "attention_mask")}
    free = {name: {1: torch.export.Dim("tokens", max=TARGET)} for name in given}
    with torch.no_grad():
        torch.onnx.export(
            model.transformers_model,
            (),
            tmp_path / "model.onnx",
            kwargs=given,
            dynamo=True,
            dynamic_shapes=free,
        )
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for text in TEXTS:
        inputs = {name: model.preprocess([text])[name].numpy() for name in given}
        said, *_ = session.run(None, inputs)
        torch.testing.assert_close(torch.from_numpy(said).mean(1), encode(model, [text]), **CLOSE)


@pytest.mark.parametrize("order", ["before", "after"])
def test_add_adapter_before_or_after_the_patch_and_patch_again_when_loaded(
    order: str, folder: Callable[..., Path], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    model = embedder(folder("EuroBert"))
    adapter = peft.LoraConfig(task_type="FEATURE_EXTRACTION", target_modules=["q_proj", "v_proj"])
    if order == "before":
        rope_ext.patch(model, "self_extend", factor=2)
    try:
        model.add_adapter(adapter)
    except ValueError as error:  # transformers 5.24 wants a peft that is not released
        pytest.skip(str(error))
    if order == "after":
        rope_ext.patch(model, "self_extend", factor=2)
    plain = encode(model)
    torch.testing.assert_close(plain, by_hand(folder("EuroBert"), "self_extend", TEXTS), **CLOSE)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    want = encode(model)
    assert not torch.allclose(want, plain, atol=0.1)
    model.save_pretrained(str(tmp_path / "saved"))
    again = embedder(tmp_path / "saved")
    rope_ext.patch(again, "self_extend", factor=2)
    torch.testing.assert_close(encode(again), want, **CLOSE)
