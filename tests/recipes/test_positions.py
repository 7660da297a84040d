"""recipes/positions.py: positions that are random or skip, and what is trained on them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import rope_ext
from recipes import data, finetune, settings
from recipes.positions import CREAM, MixedWindows, PoSE, RandomFloats, ReleasedPoSE, Scattered
from tests.helpers.models import LENGTH, tiny_llama
from tests.helpers.recipe_runs import arguments, history


@given(length=st.integers(1, 40), room=st.integers(0, 200), seed=st.integers(0, 2**20))
def test_random_positions_are_sorted_distinct_and_below_the_target(
    length: int, room: int, seed: int
) -> None:
    row = {"input_ids": list(range(length)), "index": 3}
    for scheme, dtype in ((Scattered, torch.int64), (RandomFloats, torch.float32)):
        batch = data.Collator(scheme(length + room), seed)([row])
        assert batch["position_ids"].dtype == dtype
        (found,) = batch["position_ids"].tolist()
        assert found == sorted(set(found)) and len(found) == length
        assert found[0] >= 0 and found[-1] < length + room
        assert batch["input_ids"].tolist() == batch["labels"].tolist() == [row["input_ids"]]
        assert batch["attention_mask"].tolist() == [[1] * length]


class Drawn:
    """Numbers that are drawn: which ends, the normal number, and where the middle ends."""

    def __init__(self, ends: float, normal: float, share: float) -> None:
        self.ends, self.normal, self.share = ends, normal, share

    def random(self) -> float:
        return self.ends

    def gauss(self, mean: float, sigma: float) -> float:
        return mean + sigma * self.normal

    def randint(self, low: int, high: int) -> int:
        return low + round(self.share * (high - low))


@pytest.mark.parametrize("ends", [0.2, 0.7])
@pytest.mark.parametrize("normal", [-9.0, -1.0, 0.4, 9.0])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_middle_of_cream_is_where_the_formula_puts_it(ends, normal, share) -> None:
    """Of 512 tokens for 4096: ends of a third or of 4 s, a normal about 1 + s, of deviation 3."""
    length, scale = 512, 8
    size = 170 if ends < 0.5 else 32
    a = int(min(max(9 + 3 * normal, 2), 2 * scale))
    first = int(size + (length - 2 * size - 1) * a / 2)
    last = a * length // 2 - size - 1
    found = CREAM(8 * length)(range(length), Drawn(ends, normal, share))[1].tolist()
    middle = found[size : length - size]
    assert middle[-1] == first + round(share * (last - first))
    assert middle == list(range(middle[0], middle[-1] + 1))
    assert found[:size] == list(range(size)) and found[-size:] == list(range(4096 - size, 4096))


def test_real_positions_are_rotated_without_rounding() -> None:
    """Beside angles in float64; positions rounded to whole numbers or bfloat16 are far off."""
    model = rope_ext.patch(tiny_llama(), "yarn", factor=4)
    rows = [{"input_ids": list(range(3 + i, 67 + i)), "index": i} for i in range(2)]
    batch = data.Collator(RandomFloats(4 * LENGTH), seed=1)(rows)
    labels, positions = batch.pop("labels"), batch.pop("position_ids")

    @torch.no_grad()
    def logits(model: Any, positions: torch.Tensor) -> torch.Tensor:
        return model(**batch, position_ids=positions, use_cache=False).logits.double()

    precise = rope_ext.patch(tiny_llama(), "yarn", factor=4).double()
    rotary = precise.model.rotary_emb
    inv_freq = rope_ext.describe(model).sites[0].inv_freq_after

    def rotation(x: object, position_ids: torch.Tensor) -> Any:
        angles = position_ids.double()[..., None] * torch.tensor(inv_freq, dtype=torch.float64)
        angles = torch.cat((angles, angles), -1)
        return [f(angles) * rotary.attention_scaling for f in (torch.cos, torch.sin)]

    rotary.forward = rotation
    expected, found = logits(precise, positions), logits(model, positions)
    assert labels.shape == positions.shape
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    for rounded in (positions.round(), positions.bfloat16().float()):
        assert (logits(model, rounded) - expected).abs().max() > 0.1

    # Cosines in bfloat16 are off by half a unit in the last place, but their angles are not.
    half = rope_ext.patch(tiny_llama().bfloat16(), "yarn", factor=4).model.rotary_emb
    cosines, (exact, _) = half(torch.zeros(1).bfloat16(), positions)[0], rotation(None, positions)
    assert cosines.dtype == torch.bfloat16
    torch.testing.assert_close(cosines.double(), exact, atol=2**-8, rtol=0)


def summed(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of the summed loss."""
    model.zero_grad()
    given = {name: values for name, values in batch.items() if name != "labels"}
    logits = model(**given, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )
    losses.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_short_windows_train_under_the_trained_frequencies() -> None:
    """Beside a long row, whose gradients are those of the row by itself under the method."""
    rows = [{"input_ids": list(range(3 + i, 99)) * 3, "index": i} for i in range(2)]
    rows = [{**row, "input_ids": row["input_ids"][: 4 * LENGTH]} for row in rows]
    collator = data.Collator(MixedWindows(LENGTH, 0.5), seed=3)
    batch = collator(rows)
    long, short = batch["position_ids"]
    assert long.tolist() == list(range(4 * LENGTH))
    assert short.tolist() == 4 * list(range(LENGTH))
    assert "attention_mask" not in batch
    assert (batch["labels"][1] == data.IGNORED).nonzero().flatten().tolist() == [0, 64, 128, 192]

    model = rope_ext.patch(tiny_llama(), "dynamic_yarn", factor=4)
    ids = batch["input_ids"]
    windows = {"input_ids": ids[1].view(4, LENGTH), "labels": ids[1].view(4, LENGTH)}
    alone = {"input_ids": ids[:1], "labels": ids[:1]}
    by_window, by_row = summed(tiny_llama(), windows), summed(model, alone)
    of_short = {name: values[1:] for name, values in batch.items()}
    tolerance = {"rtol": 1e-4, "atol": 1e-4}  # float32 sums in another order
    torch.testing.assert_close(summed(model, of_short), by_window, **tolerance)
    expected = {name: by_window[name] + by_row[name] for name in by_window}
    torch.testing.assert_close(summed(model, batch), expected, **tolerance)
    scaled = summed(rope_ext.patch(tiny_llama(), "yarn", factor=4), of_short)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (scaled[name] - by_window[name]).abs().max() > 100 * tolerance["atol"]


@pytest.mark.parametrize(
    "scheme",
    [Scattered(256), PoSE(256), ReleasedPoSE(256, 32), CREAM(256), RandomFloats(256)],
    ids=["random", "pose", "pose_released", "cream", "random_floats"],
)
def test_every_token_sees_all_before_it(scheme: Any) -> None:
    """With the collator's mask of ones, and not without it: the mask code sees documents."""
    model = rope_ext.patch(tiny_llama(), "yarn", factor=4)
    batch = data.Collator(scheme, seed=3)([{"input_ids": list(range(3, 35)), "index": 0}])
    assert (batch["position_ids"].diff() > 1).any()
    ids = batch.pop("input_ids")
    del batch["labels"]

    def seen(**inputs: torch.Tensor) -> torch.Tensor:
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        model(inputs_embeds=embeds, use_cache=False, **inputs).logits[0, -1].sum().backward()
        return embeds.grad[0].abs().amax(-1)

    assert (seen(**batch) > 0).all()
    del batch["attention_mask"]
    assert seen(**batch)[0] == 0


def test_schemes_are_named_and_one_runs(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    """LoRA and YaRN on rows shorter than the trained length."""
    given: dict[str, Any] = {"pose_chunks": None, "max_steps": 1}
    for name, made in {
        "random": Scattered(512),
        "pose": PoSE(512, 2),
        "pose_released": ReleasedPoSE(512, 64),
        "cream": CREAM(512),
    }.items():
        words = arguments(checkpoint, texts, tmp_path / "run", positions=name, **given)
        recipe, _ = settings.parse(words)
        assert finetune.scheme(recipe, trained=128, target=512) == made
    finetune.main(words)
    ((_, loss, norm),) = history(tmp_path / "run" / "checkpoint-1")
    assert loss > 0 and norm > 0


@pytest.fixture
def rotated(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Position ids that reached the rotary module."""
    found: list[torch.Tensor] = []
    forward = LlamaRotaryEmbedding.forward

    def seen(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        if x.device.type != "meta" and torch.is_grad_enabled():  # not in checks before it
            found.append(position_ids)
        return forward(self, x, position_ids)

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", seen)
    return found


def test_a_run_on_mixed_windows(
    checkpoint: Path, texts: Path, tmp_path: Path, rotated: list[torch.Tensor]
) -> None:
    """And what it saves switches by length, as in training."""
    more = {"pose_chunks": None, "positions": "mixed_windows", "length": 320, "max_steps": 3}
    more |= {"method": "dynamic_yarn", "short_share": 0.5}
    finetune.main(arguments(checkpoint, texts, tmp_path / "run", **more))
    rows = {tuple(row) for positions in rotated for row in positions.tolist()}
    assert rows == {tuple(range(320)), tuple(i % 128 for i in range(320))}
    model = rope_ext.from_pretrained(tmp_path / "run")
    ids = torch.arange(3, 131)[None] % 100
    with torch.no_grad():
        short = model(ids).logits
        with rope_ext.unpatched(model):
            assert torch.equal(model(ids).logits, short)
            long = model(ids.repeat(1, 2)).logits
        assert not torch.equal(model(ids.repeat(1, 2)).logits, long)


def test_windows_have_the_trained_length_for_any_factor(
    checkpoint: Path, texts: Path, tmp_path: Path, weights: None
) -> None:
    """Also where the target divided by the factor is less in floating point: 112 / 1.12."""
    more = {"original_max_position_embeddings": 100, "factor": 1.12, "length": 110}
    more |= {"method": "dynamic_yarn", "pose_chunks": None, "positions": "mixed_windows"}
    recipe, args, plan = finetune.prepare(arguments(checkpoint, texts, tmp_path, **more))
    collator = finetune.collator_of(recipe, args, plan)
    rows = [{"input_ids": range(110), "index": index} for index in range(40)]
    drawn = collator(rows)["position_ids"]
    starts = {int(row.diff().argmin()) + 1 for row in drawn if row[-1] < 100}
    assert starts == {100}
    assert "100,112" in finetune.next_command(recipe, args, plan)


def test_the_rows_of_released_pose_are_documents(checkpoint: Path, texts: Path) -> None:
    """Of at least a row, and of five rows at most, as the authors' code cuts them."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    whole = [row["text"] for row in data.documents(str(texts))]
    ids = data.Tokenize(tokenizer)({"text": whole})["input_ids"]
    for length in (50, 200):
        for streaming in (False, True):
            source = data.documents(str(texts), streaming=streaming)
            pack = data.packer("document", tokenizer, length, False, 5 * length)
            rows, _ = data.rows(source, tokenizer, pack, minimum=length)
            found = [list(row["input_ids"]) for row in itertools.islice(rows, len(ids))]
            assert sorted(found) == sorted(row[: 5 * length] for row in ids)
