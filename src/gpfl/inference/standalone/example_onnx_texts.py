"""Predict texts with onnxruntime, without gpfl: python example.py new.csv > predictions.csv."""

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import onnxruntime


def split_words(text: str) -> list[str]:
    """Split a text into lower-case words and punctuation marks, without quotes."""
    spaced = re.sub(r"(['.,()!?])", r" \1 ", text.lower().replace('"', ""))
    return re.sub(r"<br />|[;:]", " ", spaced).split()


session = onnxruntime.InferenceSession(str(Path(__file__).parent / "model.onnx"))
spec = json.loads(session.get_modelmeta().custom_metadata_map["gpfl"])
with open(sys.argv[1], newline="", encoding="utf-8-sig") as file:
    texts = [split_words(" ".join(row[name].strip() for name in spec["inputs"]["columns"])) for row in csv.DictReader(file)]
longest = max(map(len, texts))
inputs = {"words": np.array([words + [""] * (longest - len(words)) for words in texts], dtype=object)}

probabilities, predictions = session.run(None, inputs)
writer = csv.writer(sys.stdout)
writer.writerow(["prediction", *(f"probability_{name}" for name in spec["classes"])])
for prediction, row in zip(predictions.tolist(), probabilities.tolist(), strict=True):
    writer.writerow([prediction, *row])
