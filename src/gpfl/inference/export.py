"""Export a client's model with its preprocessing to a folder that needs no gpfl."""

import json
from collections.abc import Mapping
from importlib.resources import files as resource_files
from pathlib import Path

from safetensors.torch import save

from gpfl.core.net import InputSpec
from gpfl.data.encoders import ImageFormat, Tokenizer
from gpfl.data.files.raw_table import MISSING
from gpfl.data.preprocessing import Preprocessor
from gpfl.errors import GpflError, did_you_mean
from gpfl.inference.client_model import ClientModel
from gpfl.inference.model_card import FILES, card_of_model
from gpfl.inference.onnx_export import import_onnx, to_onnx
from gpfl.inference.torch_program import STORED_TYPES, to_source, trace, weights_of
from gpfl.io import files

CARD = "README.md"
ENCODED: Mapping[type, str] = {Preprocessor: "columns", Tokenizer: "texts", ImageFormat: "images", type(None): "arrays"}
"""What models with each kind of encoder take."""

FORMAT_VERSION = 1  # version of preprocessing.json and of the metadata of ONNX files


def check_export(folder: Path, format: str) -> None:
    """Raise, before anything is computed, if a model cannot be exported to a folder in a format."""
    if format not in FILES:
        raise GpflError(f"--format is '{format}'; {did_you_mean(format, FILES)}")
    if folder.exists():
        raise GpflError(f"{folder} exists and nothing is overwritten: choose another -o, or remove it")
    if format == "onnx":
        import_onnx()


def export_model(model: ClientModel, folder: Path, format: str, card: str = "") -> list[Path]:
    """Write a model, its preprocessing, an example and its card to a new folder, and return the files.

    The card is by default that of what the model alone says.
    """
    check_export(folder, format)
    program = trace(model)
    kind = ENCODED[type(model.encoder)]
    content: dict[str, str | bytes] = {}
    if format == "onnx":
        metadata, inputs = describe_model(model), _describe_inputs(model)
        computed = ("columns", "names") if isinstance(model.encoder, Preprocessor) else ("words",)  # by the graph
        metadata["inputs"] = {key: value for key, value in inputs.items() if key not in computed}
        content["model.onnx"] = to_onnx(model, program, metadata)
    else:
        content["model.safetensors"] = save(weights_of(program), {"format": "pt", "client": model.name})
        content["preprocessing.json"] = json.dumps(describe_model(model), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        content["net.py"] = to_source(program, model)
    content["encode.py"] = _read_resource(f"encode_{kind}.py")
    content["example.py"] = _read_resource(f"example_{'onnx' if format == 'onnx' else 'torch'}.py")
    content[CARD] = card or card_of_model(model, format)
    files.write_folder(folder, {name: each.encode() if isinstance(each, str) else each for name, each in content.items()})
    return [folder / name for name in content]


def describe_model(model: ClientModel) -> dict[str, object]:
    """Return the content of preprocessing.json: how raw samples become inputs, and probabilities a class."""
    return {
        "format_version": FORMAT_VERSION,
        "client": model.name,
        "label": model.output_spec.label,
        "classes": model.class_names,
        "threshold": None if model.threshold is None else model.threshold.value,
        "inputs": _describe_inputs(model),
    }


def _describe_inputs(model: ClientModel) -> dict[str, object]:
    encoder, kind = model.encoder, ENCODED[type(model.encoder)]
    if isinstance(encoder, Preprocessor):
        return {
            "kind": kind,
            "names": encoder.input_names,
            "columns": _describe_columns(encoder),
            "missing": sorted(MISSING),
            "unseen": "error" if encoder.unseen == "error" else "missing" if encoder.schema.declared else "zeros",
        }
    return {"kind": kind, **(_describe_arrays(model.input_spec) if encoder is None else encoder.to_dict())}


def _describe_columns(encoder: Preprocessor) -> list[dict[str, object]]:
    columns, start = [], 0
    first_indicator = len(encoder.input_names) - len(encoder.indicators)
    indicators = {name: first_indicator + i for i, name in enumerate(encoder.indicators)}
    for column in encoder.schema.columns:
        content: dict[str, object] = {"name": column.name, "kind": column.kind, "input": start}
        if column.is_categorical:
            content["categories"] = list(column.categories)
        else:
            content["mean"], content["std"] = encoder.scaling[column.name]
            content["low"], content["high"] = (column.low, column.high) if encoder.schema.declared else (None, None)
        columns.append({**content, "fill": encoder.fill.get(column.name), "indicator": indicators.get(column.name)})
        start += len(column.categories) if column.is_categorical else 1
    return columns


def _describe_arrays(spec: InputSpec) -> dict[str, object]:
    largest = {"pixels": spec.pixel_max, "tokens": spec.vocabulary - 1}.get(spec.kind)
    dtype = str(STORED_TYPES[spec.kind]).removeprefix("torch.")
    return {"shape": list(spec.shape), "dtype": dtype, "range": None if spec.kind == "floats" else [0, largest]}


def _read_resource(name: str) -> str:
    return (resource_files("gpfl.inference") / "standalone" / name).read_text(encoding="utf-8")
