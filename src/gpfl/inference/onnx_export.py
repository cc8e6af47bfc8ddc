"""A model as one ONNX graph: raw columns, words, pixels or numbers in; probabilities and predicted classes out.

Rows that gpfl refuses to predict, such as those with a missing value that is not filled, get NaN as probabilities and "" as
class, because a graph cannot raise.
"""

import itertools
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.export import ExportedProgram

from gpfl.core.net import InputSpec
from gpfl.data.columns import ColumnSchema
from gpfl.data.encoders import Tokenizer
from gpfl.data.files.raw_table import MISSING
from gpfl.data.preprocessing import Preprocessor
from gpfl.errors import GpflError
from gpfl.inference.client_model import ClientModel

INSTALL_COMMAND = "pip install 'gpfl[onnx]'"
OPSET, ML_OPSET = 18, 3
NET = "net/"  # prefix of the names in the net's graph
MAX_ONNX_BYTES = 2**31 - 1


def import_onnx() -> ModuleType:
    """Return the package onnx. Raise if it or onnxscript, which torch needs, is not installed."""
    try:
        import onnx
        import onnx.compose
        import onnxscript  # noqa: F401
    except ImportError as problem:
        raise GpflError(
            f"the format onnx needs the package {problem.name}, which is not installed: {INSTALL_COMMAND}"
        ) from None
    return onnx


def to_onnx(model: ClientModel, program: ExportedProgram, metadata: Mapping[str, object]) -> bytes:
    """Return a model, its net as a program and further metadata as the content of an ONNX file."""
    onnx = import_onnx()
    proto = _net_proto(program, onnx)
    net = onnx.compose.add_prefix_graph(proto.graph, NET)
    graph = _Graph(onnx)
    encoder = model.encoder
    if isinstance(encoder, Preprocessor):
        x = _add_columns(graph, encoder)
    elif isinstance(encoder, Tokenizer):
        x = _add_words(graph, encoder)
    else:
        kind = {"floats": "FLOAT", "pixels": "UINT8"}.get(model.input_spec.kind, "INT64")
        x = graph.input("x" if encoder is None else "pixels", kind, model.input_spec.shape)
    x, valid = _check_values(graph, x, model.input_spec)
    graph.node("Identity", [x], net.input[0].name)
    graph.nodes += net.node
    graph.initializers += net.initializer
    _add_outputs(graph, model, net.output[0].name, valid)
    proto.graph.CopyFrom(onnx.helper.make_graph(graph.nodes, "gpfl", graph.inputs, graph.outputs, graph.initializers))
    if all(opset.domain != "ai.onnx.ml" for opset in proto.opset_import):
        proto.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", ML_OPSET))
    proto.producer_name = "gpfl"
    proto.doc_string = str(metadata.get("description", ""))
    onnx.helper.set_model_props(proto, {"gpfl": json.dumps(metadata, ensure_ascii=False)})
    if proto.ByteSize() > MAX_ONNX_BYTES:
        raise GpflError("the model is larger than 2 GB, which one ONNX file cannot hold: use --format safetensors")
    onnx.checker.check_model(proto, full_check=True)
    content: bytes = proto.SerializeToString()
    return content


def _net_proto(program: ExportedProgram, onnx: ModuleType) -> Any:
    """Return the net's ONNX model, without torch's warnings about itself."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(action="ignore"):
        try:
            exported = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False, external_data=False)
        except Exception as problem:  # a user's module may fail in any way
            reason = str(problem).strip().splitlines()[-1]
            raise GpflError(
                f"this net cannot be exported as ONNX ({reason}): use --format safetensors, or a net of usual layers"
            ) from None
        finally:
            logging.disable(disabled)
    assert exported is not None
    return onnx.ModelProto.FromString(exported.model_proto.SerializeToString())


class _Graph:
    """The nodes, inputs, outputs and constants of a graph; adding one returns its name, which starts with gpfl/.

    Inputs and outputs have the shape (samples, *shape) and a name of their own.
    """

    def __init__(self, onnx: ModuleType) -> None:
        self.onnx = onnx
        self.nodes: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.initializers: list[Any] = []

    def input(self, name: str, kind: str, shape: Sequence[int | str] = ()) -> str:
        self.inputs.append(self._describe(name, kind, shape))
        return name

    def output(self, name: str, value: str, kind: str, shape: Sequence[int] = ()) -> None:
        while name in [each.name for each in self.inputs]:
            name += "_"
        self.node("Identity", [value], name)
        self.outputs.append(self._describe(name, kind, shape))

    def constant(self, value: npt.ArrayLike) -> str:
        name = f"gpfl/constant_{len(self.initializers)}"
        array = np.asarray(value)
        array = array.astype(object) if array.dtype.kind == "U" else array
        self.initializers.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def node(self, operator: str, inputs: Sequence[str], output: str = "", **attributes: object) -> str:
        output = output or f"gpfl/{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def look_up(self, texts: str, numbers: Mapping[str, int], default: int) -> str:
        """Return texts as numbers, the default for others."""
        keys, values = list(numbers), list(numbers.values())
        domain = "ai.onnx.ml"
        return self.node("LabelEncoder", [texts], domain=domain, default_int64=default, keys_strings=keys, values_int64s=values)

    def cast(self, value: str, kind: str) -> str:
        return self.node("Cast", [value], to=getattr(self.onnx.TensorProto, kind))

    def _describe(self, name: str, kind: str, shape: Sequence[int | str]) -> Any:
        return self.onnx.helper.make_tensor_value_info(name, getattr(self.onnx.TensorProto, kind), ["samples", *shape])


def _add_columns(graph: _Graph, encoder: Preprocessor) -> str:
    """Add an input for each column and return the encoded rows; NaN where gpfl raises."""
    inputs, missing = {}, {}
    for column in encoder.schema.columns:
        add = _add_categories if column.is_categorical else _add_numbers
        inputs[column.name], missing[column.name] = add(graph, column, encoder)
    return graph.node("Concat", [*inputs.values(), *(missing[name] for name in encoder.indicators)], axis=1)


def _add_numbers(graph: _Graph, column: ColumnSchema, encoder: Preprocessor) -> tuple[str, str]:
    """Add a column of numbers and return its inputs of the net and which are missing, both (samples, width)."""
    values = graph.input(_input_name(column), "DOUBLE")
    for end, operator in ((column.low, "Less"), (column.high, "Greater")):
        if encoder.schema.declared and end is not None:
            outside = graph.node(operator, [values, graph.constant(np.float64(end))])
            values = graph.node("Where", [outside, graph.constant(np.float64(np.nan)), values])
    missing = graph.node("IsNaN", [values])
    if column.name in encoder.fill:
        values = graph.node("Where", [missing, graph.constant(np.float64(encoder.fill[column.name])), values])
    mean, std = encoder.scaling[column.name]
    centred = graph.node("Sub", [values, graph.constant(np.float64(mean))])
    scaled = graph.cast(graph.node("Div", [centred, graph.constant(np.float64(std))]), "FLOAT")
    axis = graph.constant(np.array([1]))
    indicator = graph.node("Unsqueeze", [graph.cast(missing, "FLOAT"), axis])
    return graph.node("Unsqueeze", [scaled, axis]), indicator


def _add_categories(graph: _Graph, column: ColumnSchema, encoder: Preprocessor) -> tuple[str, str]:
    """Add a column of texts: its code selects a row of a table of inputs, the last ones for missing and unknown texts."""
    width = len(column.categories)
    missing_code, unknown_code = width, width + 1
    codes = {category: code for code, category in enumerate(column.categories) if category.lower() not in MISSING}
    for text in sorted(MISSING):  # in all spellings with upper and lower case
        spellings = itertools.product(*({letter, letter.upper()} for letter in text))
        codes |= dict.fromkeys(map("".join, spellings), missing_code)
    table = np.zeros((width + 2, width), dtype=np.float32)
    table[:width] = np.eye(width)
    fill = encoder.fill.get(column.name)
    table[missing_code] = np.nan if fill is None else table[column.categories.index(str(fill))]
    reads_as_missing = encoder.unseen == "ignore" and encoder.schema.declared
    if encoder.unseen == "error":
        table[unknown_code] = np.nan
    elif reads_as_missing:
        table[unknown_code] = table[missing_code]
    is_missing = np.zeros((width + 2, 1), dtype=np.float32)
    is_missing[missing_code], is_missing[unknown_code] = 1, reads_as_missing
    code = graph.look_up(graph.input(_input_name(column), "STRING"), codes, unknown_code)
    return graph.node("Gather", [graph.constant(table), code]), graph.node("Gather", [graph.constant(is_missing), code])


def _input_name(column: ColumnSchema) -> str:
    if not column.name or column.name.startswith(("gpfl/", NET)):
        raise GpflError(f"a column named '{column.name}' cannot be an input of an ONNX file: use --format safetensors")
    return column.name


def _add_words(graph: _Graph, encoder: Tokenizer) -> str:
    """Add an input of words (samples, words) and return their tokens, cut or padded."""
    tokens = graph.look_up(graph.input("words", "STRING", ["words"]), encoder.vocabulary, 0)
    end = graph.constant(np.array([encoder.length]))
    first, axis = graph.constant(np.array([0])), graph.constant(np.array([1]))
    padding = graph.constant(np.array([0, 0, 0, encoder.length]))
    return graph.node("Slice", [graph.node("Pad", [tokens, padding]), first, end, axis])


def _check_values(graph: _Graph, x: str, spec: InputSpec) -> tuple[str, str]:
    """Return samples with zeros in place of those that the net does not take, and which ones it takes, (samples, 1)."""
    axes = graph.constant(np.arange(1, 1 + len(spec.shape)))
    if spec.kind == "floats":
        zero: np.generic = np.float32(0)
        bad = graph.node("Or", [graph.node("IsNaN", [x]), graph.node("IsInf", [x])])
    else:
        zero = np.uint8(0) if spec.kind == "pixels" else np.int64(0)
        largest = {"pixels": spec.pixel_max, "tokens": spec.vocabulary - 1}.get(spec.kind, np.iinfo(np.int32).max)
        numbers, low, high = graph.cast(x, "INT64"), graph.constant(np.int64(0)), graph.constant(np.int64(largest))
        bad = graph.node("Or", [graph.node("Less", [numbers, low]), graph.node("Greater", [numbers, high])])
    usable = graph.node("Where", [bad, graph.constant(zero), x])
    worst = graph.node("ReduceMax", [graph.cast(bad, "FLOAT"), axes], keepdims=0)  # (samples,)
    valid = graph.node(
        "Unsqueeze", [graph.node("Equal", [worst, graph.constant(np.float32(0))]), graph.constant(np.array([1]))]
    )
    return usable, valid


def _add_outputs(graph: _Graph, model: ClientModel, logits: str, valid: str) -> None:
    """Add the probabilities, in double precision as gpfl has them, and the name of the predicted class."""
    names = model.class_names
    softmax = graph.node("Softmax", [graph.cast(logits, "DOUBLE")], axis=1)
    probabilities = graph.node("Where", [valid, softmax, graph.constant(np.float64(np.nan))])
    if model.threshold is None:
        index = graph.node("ArgMax", [softmax], axis=1, keepdims=1)
    else:
        second = graph.node("Gather", [softmax, graph.constant(np.array([1]))], axis=1)
        reached = graph.node("GreaterOrEqual", [second, graph.constant(np.float64(model.threshold.value))])
        index = graph.cast(reached, "INT64")
    known = graph.node("Where", [valid, index, graph.constant(np.int64(len(names)))])
    flat = graph.node("Squeeze", [known, graph.constant(np.array([1]))])
    graph.output("probabilities", probabilities, "DOUBLE", [len(names)])
    graph.output("prediction", graph.node("Gather", [graph.constant([*names, ""]), flat]), "STRING")
