"""Predict images with onnxruntime, without gpfl: python example.py a.png b.png > predictions.csv."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(str(Path(__file__).parent / "model.onnx"))
spec = json.loads(session.get_modelmeta().custom_metadata_map["gpfl"])
size, images = (spec["inputs"]["width"], spec["inputs"]["height"]), []
for path in sys.argv[1:]:
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file).convert("L" if spec["inputs"]["channels"] == 1 else "RGB")
    if image.size != size and not spec["inputs"]["resize"]:
        sys.exit(f"{path} is {image.size[0]}×{image.size[1]}; the model takes {size[0]}×{size[1]}")
    resized = image if image.size == size else image.resize(size, Image.Resampling.BILINEAR)
    images.append(np.asarray(resized).reshape(*size[::-1], -1).transpose(2, 0, 1))
inputs = {"pixels": np.stack(images)}

probabilities, predictions = session.run(None, inputs)
writer = csv.writer(sys.stdout)
writer.writerow(["prediction", *(f"probability_{name}" for name in spec["classes"])])
for prediction, row in zip(predictions.tolist(), probabilities.tolist(), strict=True):
    writer.writerow([prediction, *row])
