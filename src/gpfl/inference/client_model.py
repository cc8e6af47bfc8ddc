"""The personal model of a client."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gpfl.core import tree
from gpfl.core.method import NET_PARTS, Method
from gpfl.core.net import InputSpec, Model, Net
from gpfl.core.options import option_values
from gpfl.core.precision import matmul_precision
from gpfl.core.tree import Tree
from gpfl.data.columns import RawColumns
from gpfl.data.encoders import ImageFormat, Tokenizer
from gpfl.data.files.raw_table import to_text
from gpfl.data.preprocessing import Preprocessor
from gpfl.data.table import ArrayLike, read_samples
from gpfl.errors import GpflError
from gpfl.inference.inputs import Encoder, Inputs, read_raw
from gpfl.inference.metrics import softmax
from gpfl.inference.threshold import Threshold, decide
from gpfl.io.tensors import write_tensors

PREDICT_BATCH_SIZE = 1024

ENCODER_KEYS: dict[type[Encoder], str] = {Preprocessor: "preprocessor", Tokenizer: "tokenizer", ImageFormat: "images"}
"""Key of each kind of encoder in the metadata of a model file."""


@dataclass(frozen=True)
class OutputSpec:
    """What a model predicts."""

    class_names: tuple[str, ...] = ()  # names of the classes, () if they are numbered
    label: str = ""  # name of the label, "" if unknown


class ClientModel:
    """One client's personal model, with the interface of a scikit-learn classifier.

    Samples are given as in training:

    - rows of columns as a data frame of pandas or polars, a dict of columns, a list of dicts, or the path of a file, in which
      columns are found by name and further ones are ignored;
    - rows of columns as a NumPy array or a list of lists, with the columns in the order of training;
    - images as paths or a folder, texts as strings or a table of them;
    - encoded samples as a tensor, such as `federation.table.x`, or, of a model that was not trained on columns, as an array or
      list of numbers: floats, or pixels, counts and tokens as whole numbers.

    Attributes:
        encoder: How rows, images or texts become inputs of the net: a `Preprocessor`, `ImageFormat` or `Tokenizer`; None for
            a model of arrays.
        threshold: The probability at which the second of two classes is predicted; None: the more probable class.

    """

    def __init__(
        self,
        method: Method,
        weights: Tree,
        name: str,
        input_spec: InputSpec,
        encoder: Encoder | None = None,
        output_spec: OutputSpec | None = None,
        threshold: Threshold | None = None,
    ) -> None:
        self.method, self.weights, self.name, self.input_spec = method, weights, name, input_spec
        self.encoder, self.output_spec, self.threshold = encoder, output_spec or OutputSpec(), threshold

    def __repr__(self) -> str:
        net = self.method.net
        return f"ClientModel '{self.name}' ({self.method.name}, {net.name}, {net.classes} classes)"

    @property
    def preprocessor(self) -> Preprocessor | None:
        """The encoding of columns; None for a model of anything else."""
        return self.encoder if isinstance(self.encoder, Preprocessor) else None

    @property
    def class_names(self) -> list[str]:
        """Name of each class as text."""
        return list(self.output_spec.class_names) or [str(index) for index in range(self.method.net.classes)]

    @cached_property
    def classes_(self) -> npt.NDArray[np.generic]:
        """The classes in the order of the probabilities: whole numbers if all are, else their names."""
        names = self.class_names
        try:
            numbers = [int(name) for name in names]
        except ValueError:
            return np.array(names)
        return np.array(numbers if [str(number) for number in numbers] == names else names)

    def logits(self, x: Inputs) -> npt.NDArray[np.float32]:
        """Return the logits of samples, (samples, classes)."""
        samples = read_samples(self._encode(x), self.input_spec, "x")
        device = next(tree.leaves(self.weights)).device
        model = Model(self.method.net, self.weights)
        with torch.no_grad(), matmul_precision("float32"):
            logits = [
                self.method.logits(model, self.input_spec.to_net(batch.to(device)))
                for batch in torch.split(samples, PREDICT_BATCH_SIZE)
            ]
        return torch.cat(logits).cpu().numpy()

    def predict_proba(self, x: Inputs) -> npt.NDArray[np.float64]:
        """Return the probability of each class, (samples, classes), in the order of `classes_`."""
        return softmax(self.logits(x))

    def predict(self, x: Inputs) -> npt.NDArray[np.generic]:
        """Return the predicted class of each sample, one of `classes_`: the most probable one, or by the threshold."""
        return self.classes_[self.decide(self.predict_proba(x))]

    def decide(self, probabilities: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return the index of the class that is predicted at these probabilities, (samples, classes)."""
        return decide(probabilities, None if self.threshold is None else self.threshold.value)

    def score(self, x: Inputs, y: ArrayLike) -> float:
        """Return the accuracy of `predict` on samples with labels, which are in `classes_`."""
        labels, predictions = self.encode_labels(y), self.decide(self.predict_proba(x))
        if labels.shape != predictions.shape:
            raise GpflError(f"x has {len(predictions)} samples, y has shape {labels.shape}; give one label per sample")
        return float((predictions == labels).mean())

    def encode_labels(self, y: ArrayLike) -> npt.NDArray[np.int64]:
        """Return the index of each label in `classes_`. Raise if one is not among them."""
        labels = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
        index = {name: i for i, name in enumerate(self.class_names)}
        names = to_text(labels.ravel()).tolist()
        unknown = next((name for name in names if name not in index), None)
        if unknown is not None:
            known = ", ".join(self.class_names[:12]) + (", …" if len(index) > 12 else "")
            raise GpflError(f"y holds '{unknown}', which is not a class of the model: its classes are {known}")
        return np.array([index[name] for name in names], dtype=np.int64).reshape(labels.shape)

    def _encode(self, x: Inputs) -> ArrayLike:
        """Return samples as the inputs that the model stores them as."""
        samples = read_raw(x, self.encoder, self.input_spec)
        if not isinstance(samples, RawColumns):
            return samples
        if self.preprocessor is None:
            raise GpflError(f"the model of client '{self.name}' was not trained on columns: give inputs as an array")
        return self.preprocessor.transform(samples)

    def module(self) -> nn.Module:
        """Return a plain module on the CPU with this client's weights, from net inputs to logits."""
        return PersonalModule(self.method, tree.to(self.weights, torch.device("cpu"))).eval()

    def probe_logits(self) -> list[list[float]]:
        """Return the logits of the input spec's probe, by which `load_model` recognises the net."""
        with torch.no_grad():
            logits: list[list[float]] = self.module()(self.input_spec.probe()).tolist()
        return logits

    def save(self, path: str | Path) -> None:
        """Write the model as a safetensors file for `gpfl.load_model`."""
        net = self.method.net
        metadata: dict[str, object] = {
            "client": self.name,
            "method": {"name": self.method.name, **option_values(self.method)},
            "net": {"name": net.name, **net.options},
            "classes": net.classes,
            "input_spec": dataclasses.asdict(self.input_spec),
            "branches": list(self.weights),  # an empty one leaves no tensor
            "probe_logits": self.probe_logits(),
        }
        if self.encoder is not None:
            metadata[ENCODER_KEYS[type(self.encoder)]] = self.encoder.to_dict()
        if self.output_spec != OutputSpec():
            metadata["output_spec"] = dataclasses.asdict(self.output_spec)
        if self.threshold is not None:
            metadata["threshold"] = dataclasses.asdict(self.threshold)
        write_tensors(Path(path), tree.flatten(self.weights), metadata)

    def export(self, folder: str | Path, format: str = "safetensors") -> list[Path]:
        """Write the model with its preprocessing, an example and a model card to a new folder for use without gpfl.

        Args:
            folder: The folder, which must not exist.
            format: "safetensors" for torch, or "onnx".

        Returns:
            The files.

        """
        from gpfl.inference.export import export_model  # imports torch.export, which takes a second

        return export_model(self, Path(folder), format)


def model_file_name(client: str) -> str:
    """Return the name of a client's model file, unique for each client name."""
    return f"client-{quote(client, safe='')}.safetensors"


def find_model_files(folder: Path) -> dict[str, Path]:
    """Return the model files in a folder by client, numbers in their order."""
    files = {unquote(path.stem.removeprefix("client-")): path for path in folder.glob("client-*.safetensors")}
    return {name: files[name] for name in sorted(files, key=lambda name: (int(name) if name.isdecimal() else -1, name))}


class PersonalModule(nn.Module):
    """A client's model: the parts of the net are submodules, the method's other tensors are buffers."""

    def __init__(self, method: Method, weights: Tree) -> None:
        super().__init__()
        if mismatch := method.net.describe_mismatch(weights):
            raise GpflError(f"the weights are not those of net '{method.net.name}': {mismatch}")
        stats = tree.branch(weights, "batch_norm_stats") if "batch_norm_stats" in weights else {}
        parts = {part: method.net.make_module(part) for part in NET_PARTS}
        for part, module in parts.items():
            state = {**tree.branch(weights, part), **(tree.branch(stats, part) if part in stats else {})}
            # Constants of the module are in no tree, so names may be missing; others were checked above.
            module.load_state_dict(cast(dict[str, Tensor], state), strict=False)
            self.add_module(part, module)
        self._method = method.replace(net=method.net.with_parts(parts))
        others = tree.drop(weights, (*NET_PARTS, "batch_norm_stats"))
        self._branches = tuple(others)
        self._buffer_names = {path: path.replace(tree.SEPARATOR, "_").replace(".", "_") for path in tree.flatten(others)}
        for path, value in tree.flatten(others).items():
            self.register_buffer(self._buffer_names[path], value.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (samples, classes)."""
        buffers = tree.unflatten({path: self.get_buffer(name) for path, name in self._buffer_names.items()})
        weights: Tree = {**{branch: {} for branch in self._branches}, **buffers}
        return self._method.logits(_ModuleModel(self._method.net, weights, self), x)


class _ModuleModel(Model):
    """A model that calls a module's own submodules, so that gradients, hooks and exporters see them."""

    def __init__(self, net: Net, weights: Tree, owner: nn.Module) -> None:
        super().__init__(net, weights)
        self._owner = owner

    def __call__(self, part: str, x: Tensor, weights: Tree | None = None) -> Tensor:
        if weights is not None:
            return super().__call__(part, x, weights)
        out: Tensor = self._owner.get_submodule(part)(x)
        return out
