"""Predict samples with onnxruntime, without gpfl: python example.py new.npz > predictions.csv."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(str(Path(__file__).parent / "model.onnx"))
spec = json.loads(session.get_modelmeta().custom_metadata_map["gpfl"])
samples = np.load(sys.argv[1], allow_pickle=False)
x = samples["x"] if hasattr(samples, "files") else samples
inputs = {"x": x.astype(spec["inputs"]["dtype"])}

probabilities, predictions = session.run(None, inputs)
writer = csv.writer(sys.stdout)
writer.writerow(["prediction", *(f"probability_{name}" for name in spec["classes"])])
for prediction, row in zip(predictions.tolist(), probabilities.tolist(), strict=True):
    writer.writerow([prediction, *row])
