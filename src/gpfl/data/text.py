"""Texts as tokens: words of a vocabulary, numbered."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gpfl.errors import GpflError

PUNCTUATION = re.compile(r"(['.,()!?])")
SEPARATORS = re.compile(r"<br />|[;:]")
RULE = "basic_english"
"""How `tokenize` splits texts, saved with every tokenizer so that models of a later rule are recognised."""


def tokenize(text: str) -> list[str]:
    """Split a text into lower-case words and punctuation marks, without quotes."""
    spaced = PUNCTUATION.sub(r" \1 ", text.lower().replace('"', ""))
    return SEPARATORS.sub(" ", spaced).split()


def build_vocabulary(texts: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the index of each word, from 1, ordered by frequency and then alphabet; 0 is padding."""
    counts = Counter(word for words in texts for word in words)
    order = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(order, start=1)}


@dataclass(frozen=True)
class Tokenizer:
    """Turns texts into tokens as in training. Words that are not in the vocabulary become 0, which is also the padding."""

    words: tuple[str, ...]  # the vocabulary; the first word is token 1
    length: int  # number of tokens of a text, which is cut or padded
    columns: tuple[str, ...] = ("text",)  # columns of a table that make up a text, joined by a space

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        """Token of each word."""
        return {word: number for number, word in enumerate(self.words, start=1)}

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.int32]:
        """Return the tokens of texts, (texts, length)."""
        return self.encode_words([tokenize(text) for text in texts])

    def encode_words(self, texts: Sequence[Sequence[str]]) -> npt.NDArray[np.int32]:
        """Return the tokens of texts that are split into words already."""
        x = np.zeros((len(texts), self.length), dtype=np.int32)
        for row, words in enumerate(texts):
            tokens = [self.vocabulary.get(word, 0) for word in words[: self.length]]
            x[row, : len(tokens)] = tokens
        return x

    def count_unknown(self, texts: Sequence[str]) -> tuple[int, int]:
        """Return how many words of texts are not in the vocabulary, and how many there are."""
        words = [word for text in texts for word in tokenize(text)[: self.length]]
        return sum(word not in self.vocabulary for word in words), len(words)

    def to_dict(self) -> dict[str, object]:
        """Return the content as JSON holds it."""
        return {"rule": RULE, "words": list(self.words), "length": self.length, "columns": list(self.columns)}

    @classmethod
    def from_dict(cls, content: Mapping[str, object]) -> Tokenizer:
        """Return the tokenizer that `to_dict` wrote. Raise GpflError if it is invalid."""
        words, length, columns = (content.get(key) for key in ("words", "length", "columns"))
        lists = all(isinstance(each, list) and all(isinstance(entry, str) for entry in each) for each in (words, columns))
        if content.get("rule") != RULE or not lists or not isinstance(length, int) or length < 1:
            raise GpflError(f"this is not a tokenizer of gpfl with the rule {RULE}")
        return cls(tuple(words), length, tuple(columns))  # type: ignore[arg-type]
