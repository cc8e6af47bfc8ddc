"""The personal model of a client."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gpfl.core import tree
from gpfl.core.method import Method
from gpfl.core.net import InputSpec, Model
from gpfl.core.options import option_values
from gpfl.core.precision import matmul_precision
from gpfl.core.tree import Tree
from gpfl.data.arrays import ArrayLike, read_samples
from gpfl.data.columns import RawColumns
from gpfl.data.preprocessing import Preprocessor
from gpfl.errors import GpflError
from gpfl.inference.module import PersonalModule
from gpfl.io.tensors import write_tensors

PREDICT_BATCH_SIZE = 1024


class ClientModel:
    """One client's personal model. Inputs have the kind of its training data: floats, or pixels as whole numbers.

    A model of columns also takes raw columns, which its `preprocessor` encodes as in training.
    """

    def __init__(
        self,
        method: Method,
        weights: Tree,
        name: str,
        input_spec: InputSpec,
        preprocessor: Preprocessor | None = None,
    ) -> None:
        self.method, self.weights, self.name, self.input_spec = method, weights, name, input_spec
        self.preprocessor = preprocessor

    def __repr__(self) -> str:
        net = self.method.net
        return f"ClientModel '{self.name}' ({self.method.name}, {net.name}, {net.classes} classes)"

    def logits(self, x: ArrayLike | RawColumns) -> npt.NDArray[np.float32]:
        """Return the logits of samples, (samples, classes)."""
        if isinstance(x, RawColumns):
            if self.preprocessor is None:
                raise GpflError(f"the model of client '{self.name}' was not trained on columns: give inputs as an array")
            x = self.preprocessor.transform(x)
        samples = read_samples(x, self.input_spec, "x")
        device = next(tree.leaves(self.weights)).device
        model = Model(self.method.net, self.weights)
        with torch.no_grad(), matmul_precision("float32"):
            logits = [
                self.method.logits(model, self.input_spec.to_net(batch.to(device)))
                for batch in torch.split(samples, PREDICT_BATCH_SIZE)
            ]
        return torch.cat(logits).cpu().numpy()

    def predict(self, x: ArrayLike | RawColumns) -> npt.NDArray[np.int64]:
        """Return the predicted class of each sample."""
        classes: npt.NDArray[np.int64] = np.argmax(self.logits(x), axis=1)
        return classes

    def accuracy(self, x: ArrayLike | RawColumns, y: ArrayLike) -> float:
        """Return the accuracy on samples with labels."""
        labels, predictions = np.asarray(y), self.predict(x)
        if labels.shape != predictions.shape:
            raise GpflError(f"x has {len(predictions)} samples, y has shape {labels.shape}; give one label per sample")
        return float((predictions == labels).mean())

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
        if self.preprocessor is not None:
            metadata["preprocessor"] = self.preprocessor.to_dict()
        write_tensors(Path(path), tree.flatten(self.weights), metadata)


def model_file_name(client: str) -> str:
    """Return the name of a client's model file, unique for each client name."""
    return f"client-{quote(client, safe='')}.safetensors"
