"""Predict rows with onnxruntime, without gpfl: python example.py new.csv > predictions.csv."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime


def number(cell: str) -> float:
    """Return a number, or a date (2024-01-31) as days since 1970-01-01."""
    try:
        return float(cell)
    except ValueError:
        return float((np.datetime64(cell) - np.datetime64(0, "D")) / np.timedelta64(1, "D"))


session = onnxruntime.InferenceSession(str(Path(__file__).parent / "model.onnx"))
spec = json.loads(session.get_modelmeta().custom_metadata_map["gpfl"])
with open(sys.argv[1], newline="", encoding="utf-8-sig") as file:
    rows = list(csv.DictReader(file))
inputs = {}
for column in session.get_inputs():
    cells = [row[column.name].strip() for row in rows]
    if column.type == "tensor(string)":
        inputs[column.name] = np.array(cells, dtype=object)
    else:
        inputs[column.name] = np.array(
            [np.nan if cell.lower() in spec["inputs"]["missing"] else number(cell) for cell in cells]
        )

probabilities, predictions = session.run(None, inputs)
writer = csv.writer(sys.stdout)
writer.writerow(["prediction", *(f"probability_{name}" for name in spec["classes"])])
for prediction, row in zip(predictions.tolist(), probabilities.tolist(), strict=True):
    writer.writerow([prediction, *row])
