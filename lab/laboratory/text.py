"""Text with retrieval: bytes of Python's standard library, and a word to retrieve.

With plain text, training is too short for retrieval to emerge, and a head that looks up what
followed the previous token (an induction head) takes even longer. So the word consists of tokens
that do not occur in text, each from a separate alphabet, and can be found by content. This favors
no encoding, and every encoding has to bridge the distance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from lab.laboratory.model import Reading, read_with
from rope_eval.data.text import python_library

# Tokens in addition to bytes.
END = 256  # between documents
GIVEN = 257  # before the word
ASKED = 258  # before the question
PLACES = 3  # letters of a word
LETTERS = 26  # bytes from 128 on; text uses only lower ones
_ANSWER = 4.0  # loss weight of a token of an answer; text has 1
_HELD_OUT = 7919  # seed of the evaluated rows, for all models
_CHOOSING = 128  # rows for choosing rates
TIMES = (1, 2, 4, 8, 16)

Row = tuple[np.ndarray, np.ndarray]
"""Token ids, and the loss weight of each."""


@dataclass(frozen=True)
class Text:
    """Rows for training and evaluation.

    Args:
        length: length of a training row, tokens.
        batch: rows per step.
        rows: rows to evaluate at each length.
        steps: training steps.
        texts: documents, for ``"train"`` or ``"held_out"``.
    """

    length: int
    batch: int = 16
    rows: int = 32
    steps: int = 1200
    texts: Callable[[str], list[str]] = python_library

    @property
    def trained(self) -> int:
        """Trained length, tokens."""
        return self.length

    @cached_property
    def stream(self) -> np.ndarray:
        return _stream(self.texts("train"))

    @cached_property
    def held_out(self) -> np.ndarray:
        """Text to report on."""
        return self._unseen[len(self._unseen) // 4 :]

    @cached_property
    def _unseen(self) -> np.ndarray:
        return _stream(self.texts("held_out"))

    def rows_of(self, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights of a step, ``[batch, length]``; depends only on the seed and the step."""
        return self._rows(self.stream, (seed, step), self.batch)

    def _rows(
        self, stream: np.ndarray, seed: Sequence[int], count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [
            retrieval(np.random.default_rng((*seed, number)), stream, self.length)
            for number in range(count)
        ]
        ids, weights = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        return ids, weights

    def choosing(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights of unreported held-out rows, for choosing rates."""
        return self._rows(self._unseen[: len(self._unseen) // 4], (_HELD_OUT,), _CHOOSING)

    @torch.no_grad()
    def read(self, model: torch.nn.Module, make: Reading, device: torch.device) -> dict:
        """Loss and retrieval at 1 to 16 times the trained length.

        At every length, the loss is on the same last tokens of the same rows, so only the context
        changes. A word is found if each of its tokens is the most likely one.

        Returns:
            ``loss`` (nats) and ``retrieval`` (fraction) by length, and ``positions``: the loss of
            every segment of the trained length in the longest rows, from the first to the last.
            Errors of methods are in ``refused``, by length.
        """
        longest = self.length * TIMES[-1]
        scored = self.length // 2
        # The same rows for every model and seed.
        rng = np.random.default_rng(_HELD_OUT)
        rows = np.stack([_excerpt(rng, self.held_out, longest) for _ in range(self.rows)])
        found: dict = {"loss": {}, "retrieval": {}, "positions": [], "refused": {}}
        for times in TIMES:
            length = self.length * times
            rngs = [np.random.default_rng((_HELD_OUT, times, row)) for row in range(self.rows)]
            asked = np.stack(
                [
                    retrieval(rng, stream=self.held_out, length=length, questions=1)[0]
                    for rng in rngs
                ]
            )
            try:
                with read_with(model, make, times):
                    losses, _ = _forward(
                        model, rows=rows[:, -length:], trained=self.length, device=device
                    )
                    _, right = _forward(model, rows=asked, trained=self.length, device=device)
            except (ValueError, IndexError) as error:
                found["refused"][length] = str(error).splitlines()[0]
                continue
            found["loss"][length] = losses[:, -scored:].mean().item()
            found["retrieval"][length] = right[:, -PLACES:].all(-1).mean().item()
            if times == TIMES[-1]:
                padded = np.concatenate((losses[:, :1], losses), 1)  # the first has no loss
                stretches = padded.reshape(self.rows, times, self.length)
                found["positions"] = stretches.mean((0, 2)).tolist()
        return found


def retrieval(
    rng: np.random.Generator, stream: np.ndarray, length: int, questions: int | None = None
) -> Row:
    """Text with a word anywhere in its first part, and questions for it later and at the end.

    Args:
        rng: random number generator.
        stream: stream of text.
        length: length of the row, tokens.
        questions: number of questions; None: one to four.
    """
    count = int(rng.integers(1, 5)) if questions is None else questions
    word = 128 + LETTERS * np.arange(PLACES) + rng.integers(0, LETTERS, PLACES)
    text = _excerpt(rng, stream, length - (count + 1) * (1 + PLACES))
    given = int(rng.integers(0, len(text) + 1))
    later = np.sort(rng.integers(given, len(text) + 1, count - 1)).tolist()
    ids = []
    weights = []
    before = 0
    for number, place in enumerate([given, *later, len(text)]):
        ids += [text[before:place], [ASKED if number else GIVEN], word]
        weights += [np.ones(place - before), np.zeros(1), np.full(PLACES, _ANSWER * (number > 0))]
        before = place
    return np.concatenate(ids).astype(np.int64), np.concatenate(weights).astype(np.float32)


def _stream(texts: Sequence[str]) -> np.ndarray:
    """ASCII, with question marks for other characters, and an end token per document."""
    # Bytes from 128 on stay free for the letters of words.
    ended = [np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8) for text in texts]
    # int16, since the end token is no byte.
    return np.concatenate([part for text in ended for part in (text, [END])]).astype(np.int16)


def _excerpt(rng: np.random.Generator, stream: np.ndarray, tokens: int) -> np.ndarray:
    start = int(rng.integers(0, len(stream) - tokens))
    return stream[start : start + tokens].astype(np.int64)


def _forward(
    model: torch.nn.Module, rows: np.ndarray, trained: int, device: torch.device
) -> tuple[np.ndarray, np.ndarray]:
    """Loss of every token but the first of each row, and whether the token is the most likely."""
    losses = []
    right = []
    some = max(1, 16 * trained // rows.shape[1])  # as many tokens at a time as in training
    for part in torch.from_numpy(rows).split(some):
        ids = part.to(device)
        logits = model(input_ids=ids).logits[:, :-1].float()
        targets = ids[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        losses.append(loss.cpu())
        right.append((logits.argmax(-1) == targets).cpu())
    return torch.cat(losses).numpy(), torch.cat(right).numpy()
