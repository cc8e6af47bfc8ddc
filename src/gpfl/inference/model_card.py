"""What a model card says of a model itself: its inputs, preprocessing, output and limits."""

import gpfl
from gpfl.core.net import InputSpec
from gpfl.core.options import option_values
from gpfl.core.tree import leaves
from gpfl.data.columns import ColumnSchema
from gpfl.data.encoders import ImageFormat, Tokenizer
from gpfl.data.preprocessing import Preprocessor
from gpfl.errors import pluralize
from gpfl.inference.client_model import ClientModel

NO_RUN = (
    "A model alone does not record its data, rounds and metrics. `gpfl export RUN --client NAME` writes them into the card."
)

MIN_TEST_SAMPLES = 30  # test samples of a client below which a card warns that its metrics say little

FILES = {
    "safetensors": (
        "`model.safetensors`: the weights",
        "`net.py`: the net, as a function of weights and encoded samples",
        "`preprocessing.json`: how raw samples are encoded, the classes and the decision threshold",
        "`encode.py`: reads and encodes samples as `preprocessing.json` says",
        "`example.py`: predicts the samples of a file with torch, safetensors and numpy",
    ),
    "onnx": (
        "`model.onnx`: the model from raw samples to probabilities",
        "`encode.py`: reads samples as the inputs of the model",
        "`example.py`: predicts the samples of a file with onnxruntime and numpy",
    ),
}
"""Formats of an exported model, and the files next to the card."""

Section = tuple[str, list[str]]  # title and paragraphs or list items (with a leading "- ")


def render_card(model: ClientModel, format: str, sections: list[Section]) -> str:
    """Return the model card in Markdown: what the model is, and the sections."""
    net, method = model.method.net, model.method
    weights = sum(leaf.numel() for leaf in leaves(model.weights))
    label = f" `{model.output_spec.label}`" if model.output_spec.label else ""
    first = (
        f"Predicts the label{label}, one of {pluralize(len(model.class_names), 'class')}. A personal model of one client of a "
        f"federation: method {method.name}, net {net.name}, {weights:,} weights. Made with gpfl; it works without gpfl."
    )
    lines = [f"# Model of client {model.name}", "", first, ""]
    for title, items in [("Files", [f"- {line}" for line in FILES[format]]), *sections]:
        lines += [f"## {title}", ""]
        for item in items:
            lines += [item] if item.startswith("- ") else [item, ""]
        lines += [] if lines[-1] == "" else [""]
    return "\n".join(lines).rstrip("\n") + "\n"


def card_of_model(model: ClientModel, format: str, command: str = "") -> str:
    """Return the card of a model without a run."""
    sections = [("Data, training and metrics", [describe_method(model), NO_RUN]), ("Limits", list_limits(model))]
    return render_card(model, format, [*model_sections(model, format), *sections, ("Made by", describe_export(command))])


def model_sections(model: ClientModel, format: str) -> list[Section]:
    """Return the sections that the model alone gives."""
    return [("Inputs", _describe_inputs(model, format)), ("Output", _describe_output(model, format))]


def list_limits(model: ClientModel, n_train: int | None = None, n_test: int | None = None) -> list[str]:
    """Return what a model must not be used for. The numbers are those of the client's samples, if known."""
    name = model.name
    lines = [
        f"- It is for new samples of client {name}, collected and coded as its training data, and for no other client.",
        "- Its probabilities are estimates. Measure them on labelled samples before use, and again when anything changes.",
        "- It is not a certified device and must not decide alone about a person, such as on treatment, credit or employment.",
        "- It may be worse for groups that are rare in the training data. Its metrics are not broken down by group.",
    ]
    if model.preprocessor is not None:
        lines.append("- Numbers far outside the training data are extrapolated without warning.")
    if n_train is not None:
        lines.insert(
            0, f"- It was trained on {pluralize(n_train, 'sample')} of client {name} and on what its federation shared."
        )
    if n_test is not None and n_test < MIN_TEST_SAMPLES:
        lines.append(f"- Its own metrics come from {pluralize(n_test, 'test sample')}: read the intervals, not the values.")
    return lines


def describe_export(command: str = "", trained: str = "") -> list[str]:
    """Return which version exported a model, and by which command."""
    return [f"{trained}Exported with gpfl {gpfl.__version__}.", *([f"```sh\n{command}\n```"] if command else [])]


def describe_method(model: ClientModel) -> str:
    """Return the method and the net with their options."""
    method, net = model.method, model.method.net
    options = [f"{key} = {value}" for key, value in option_values(method).items()]
    layers = [f"{key} = {value}" for key, value in net.options.items()]
    return f"Method {method.name} ({', '.join(options) or 'no options'}); net {net.name} ({', '.join(layers) or 'no options'})."


def _describe_inputs(model: ClientModel, format: str) -> list[str]:
    encoder = model.encoder
    if isinstance(encoder, Preprocessor):
        return _describe_columns(encoder, format)
    if isinstance(encoder, Tokenizer):
        words = "Input `words`: the words of each text, padded with empty ones; `encode.py` splits texts. "
        return [
            f"Texts of the columns {', '.join(encoder.columns)}. {words if format == 'onnx' else ''}Words are looked up in a "
            f"vocabulary of {len(encoder.words):,}, others are left out; {encoder.length} words count, the rest of a text is "
            "cut."
        ]
    if isinstance(encoder, ImageFormat):
        other = "resized, which distorts them if their proportions differ" if encoder.resize else "an error"
        return [f"Images as bytes (images, {encoder.channels}, {encoder.height}, {encoder.width}); other sizes are {other}."]
    return [_describe_arrays(model.input_spec)]


def _describe_columns(encoder: Preprocessor, format: str) -> list[str]:
    error = "NaN as probabilities and an empty class" if format == "onnx" else "an error"
    unseen = f"A category that is not listed gives {error}."
    if encoder.unseen == "ignore":
        unseen = f"A category that is not listed is {'read as missing' if encoder.schema.declared else 'encoded as zeros'}."
    missing = f"Missing values are filled as the table says; in other columns they give {error}."
    types = "Numbers and dates are float64, NaN where missing; categories are texts, empty where missing. "
    count = f"{pluralize(len(encoder.schema), 'column')} by name. {types if format == 'onnx' else ''}"
    cells = [
        (column.name, column.kind, _describe_values(column, encoder), _describe_fill(column, encoder))
        for column in encoder.schema.columns
    ]
    rows = [("column", "kind", "values", "missing values"), ("---",) * 4, *cells]
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    table = "\n".join(f"| {' | '.join(row)} |" for row in escaped)
    return [f"{count}A date is its number of days since 1970-01-01.", table, f"{missing} {unseen}"]


def _describe_values(column: ColumnSchema, encoder: Preprocessor) -> str:
    if column.is_categorical:
        return ", ".join(column.categories)
    mean, std = encoder.scaling[column.name]
    scaled = "not scaled" if (mean, std) == (0.0, 1.0) else f"scaled by mean {mean:.6g}, standard deviation {std:.6g}"
    declared = encoder.schema.declared and (column.low is not None or column.high is not None)
    return f"{column.limits}; others count as missing; {scaled}" if declared else scaled


def _describe_fill(column: ColumnSchema, encoder: Preprocessor) -> str:
    fill = encoder.fill.get(column.name)
    text = "an error" if fill is None else fill if isinstance(fill, str) else f"{fill:.6g}"
    return f"{text}, with an indicator" if column.name in encoder.indicators else text


def _describe_arrays(spec: InputSpec) -> str:
    kinds = {"floats": "float32, finite", "counts": "whole numbers from 0 (int64)"}
    kinds["pixels"] = f"bytes from 0 to {spec.pixel_max}"
    kinds["tokens"] = f"whole numbers from 0 to {spec.vocabulary - 1} (int64)"
    return f"An array of {kinds[spec.kind]} of shape (samples, {', '.join(map(str, spec.shape))})."


def _describe_output(model: ClientModel, format: str) -> list[str]:
    names = model.class_names
    classes = f"Classes in the order of the probabilities: {', '.join(names[:50])}{', …' if len(names) > 50 else ''}."
    if model.threshold is None:
        return [classes, "The predicted class is the most probable one."]
    threshold = model.threshold
    return [
        classes,
        f"`{names[1]}` is predicted at a probability of {threshold.value:.6g} or more. This decision threshold is the best for "
        f"{threshold.metric.replace('_', ' ')} on {pluralize(threshold.n_samples, 'validation sample')} of the client "
        f"({threshold.score:.3f}, at 0.5 {threshold.score_at_half:.3f}).",
    ]
