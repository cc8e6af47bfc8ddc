"""Predict new samples with torch and safetensors, without gpfl: python example.py FILE > predictions.csv."""

import csv
import json
import sys
from pathlib import Path

import torch
from encode import encode, read
from net import logits
from safetensors.torch import load_file

folder = Path(__file__).parent
spec = json.loads((folder / "preprocessing.json").read_text(encoding="utf-8"))
x = torch.from_numpy(encode(read(sys.argv[1:]), spec["inputs"]))
with torch.no_grad():
    probabilities = logits(load_file(folder / "model.safetensors"), x).double().softmax(1)
threshold = spec["threshold"]
decisions = probabilities.argmax(1) if threshold is None else (probabilities[:, 1] >= threshold).long()

writer = csv.writer(sys.stdout)
writer.writerow(["prediction", *(f"probability_{name}" for name in spec["classes"])])
for decision, row in zip(decisions.tolist(), probabilities.tolist(), strict=True):
    writer.writerow([spec["classes"][decision], *row])
