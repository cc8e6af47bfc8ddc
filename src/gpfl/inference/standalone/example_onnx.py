"""Predict new samples with onnxruntime, without gpfl: python example.py FILE > predictions.csv."""

import csv
import json
import sys
from pathlib import Path

import onnxruntime
from encode import graph_inputs, read

session = onnxruntime.InferenceSession(str(Path(__file__).parent / "model.onnx"))
spec = json.loads(session.get_modelmeta().custom_metadata_map["gpfl"])
inputs = graph_inputs(read(sys.argv[1:]), spec["inputs"], session.get_inputs())
probabilities, predictions = session.run(None, inputs)

writer = csv.writer(sys.stdout)
writer.writerow(["prediction", *(f"probability_{name}" for name in spec["classes"])])
for prediction, row in zip(predictions.tolist(), probabilities.tolist(), strict=True):
    writer.writerow([prediction, *row])
