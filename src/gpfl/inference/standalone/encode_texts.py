"""Read texts and turn their words into numbers, as in training."""

import csv
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def read(paths: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of CSV files."""
    rows = []
    for path in paths:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows += list(csv.DictReader(file))
    return rows


def encode(rows: Sequence[Mapping[str, str]], spec: Mapping[str, Any]) -> npt.NDArray[np.int64]:
    """Return the tokens of texts, (texts, length). Unknown words are 0, like the padding."""
    vocabulary = {word: number for number, word in enumerate(spec["words"], start=1)}
    x = np.zeros((len(rows), spec["length"]), dtype=np.int64)
    for tokens, row in zip(x, rows, strict=True):
        words = split_words(" ".join(row[name].strip() for name in spec["columns"]))[: len(tokens)]
        tokens[: len(words)] = [vocabulary.get(word, 0) for word in words]
    return x


def split_words(text: str) -> list[str]:
    """Split a text into lower-case words and punctuation marks, without quotes."""
    spaced = re.sub(r"(['.,()!?])", r" \1 ", text.lower().replace('"', ""))
    return re.sub(r"<br />|[;:]", " ", spaced).split()


def graph_inputs(rows: Sequence[Mapping[str, str]], spec: Mapping[str, Any], _: Sequence[Any]) -> dict[str, npt.NDArray[Any]]:
    """Return the input of the ONNX model, the words of each text, padded with empty ones."""
    texts = [split_words(" ".join(row[name].strip() for name in spec["columns"])) for row in rows]
    longest = max(map(len, texts))
    return {"words": np.array([words + [""] * (longest - len(words)) for words in texts], dtype=object)}
