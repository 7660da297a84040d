"""Synthetic rows in the schemas of published benchmarks: one small data set for each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

NOLIMA: list[Row] = [
    {
        "id": "0401",
        "reasoning_type": "world_knowledge",
        "system_prompt": "You are a helpful assistant.",
        "needle": "Actually, {CHAR} lives next to {1}.",
        "questions": {"onehop": "Which character has been to {2}?", "twohop": "Who saw {3}?"},
        "character_set": ["Yuki", "Stuart"],
        "tests": {
            "T01": {"input_args": ["the Semper Opera House", "Dresden", "Saxony"]},
            "T02": {"input_args": ["the Kiasma museum", "Helsinki", "Uusimaa"]},
        },
    },
    {
        "id": "0402",
        "system_prompt": "You are a helpful assistant.",
        "needle": "Then Mandy said that {1} would be too hot for her.",
        "questions": {"direct": "Who could not drink {1}?"},
        "distractors": {"direct": "There was a sign about {1} on the wall."},
        "tests": {"T01": {"input_args": ["tea"], "gold_answers": ["Mandy"]}},
    },
]


def _documents(*titles: str) -> list[Row]:
    return [{"title": title, "text": f"{title} is a place. " * 3, "id": title} for title in titles]


def _question(number: int, answers: Any, **more: Any) -> Row:
    question = f"Where is number {number}?"
    ctxs = _documents(f"Ulm {number}", f"Bonn {number}", f"Kiel {number}")
    return {"id": f"q{number}", "question": question, "answers": answers, "ctxs": ctxs, **more}


_GRADES = (("11", 0), ("12", 3), ("13", 1), ("14", 0))


def _ranked(number: int) -> Row:
    ctxs = [
        {"id": f"{name}{number}", "text": f"Text {name} of {number}.", "label": grade}
        for name, grade in _GRADES
    ]
    return {"qid": f"9{number}", "query": f"what is {number}", "ctxs": ctxs}


def _labelled(field: str, labels: int) -> list[Row]:
    return [{"text": f"Text {n} of {n % labels}?", field: n % labels} for n in range(12)]


def _needle(kind: str, answers: Sequence[str]) -> Row:
    return {
        "index": 0,
        "context": "Grass. " * 30 + f"One of the special magic {kind} for ape is: {answers[0]}.",
        "query": "ape",
        "type_needle_v": kind,
        "answer": list(answers),
    }


HELMET: dict[str, list[Row]] = {
    "ruler_niah_mk_2": [_needle("number", ["1234567"])],
    "ruler_niah_mk_3": [_needle("uuid", ["ab-cd"])],
    "ruler_niah_mv": [_needle("numbers", ["1234567", "7654321"])],
    "json_kv": [
        {
            "context": 'JSON data:\n{"k1": "v1", "k2": "v2"}',
            "question": "k1",
            "answer": "v1",
            "demos": [["k8", "v8"], ["k9", "v9"], ["k7", "v7"]],
            "num_kvs": 2,
            "depth": 0.5,
        }
    ],
    "kilt_nq": [_question(n, ["Ulm", "the city of Ulm"]) for n in range(3)],
    "kilt_triviaqa": [_question(n, ["Ulm"]) for n in range(3)],
    "kilt_hotpotqa": [_question(n, ["Ulm"]) for n in range(3)],
    "kilt_popqa_3": [_question(n, ["Ulm"], s_pop=10**n) for n in range(5)],
    "msmarco_rerank_psg": [_ranked(n) for n in range(3)],
    "icl_trec_coarse": _labelled("coarse_label", 6),
    "icl_trec_fine": _labelled("fine_label", 50),
    "icl_banking77": _labelled("label", 77),
    "icl_clinic150": _labelled("intent", 151),
    "icl_nlu": _labelled("label", 68),
}

HELMET_DEMOS: dict[str, list[Row]] = {
    **{
        name: [_question(n, ["Bonn"]) for n in range(10, 16)]
        for name in ("kilt_nq", "kilt_triviaqa", "kilt_hotpotqa")
    },
    "kilt_popqa_3": HELMET["kilt_popqa_3"],
    "msmarco_rerank_psg": [_ranked(n) for n in range(1, 9)],
    **{name: rows for name, rows in HELMET.items() if name.startswith("icl")},
}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write ``.jsonl``, or a list in ``.json``; returns the path."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    text = f"[{', '.join(lines)}]" if path.suffix == ".json" else "\n".join(lines) + "\n"
    path.write_text(text, encoding="utf-8")
    return str(path)
