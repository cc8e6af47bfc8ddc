"""The guard: checks of uploads before they are averaged, in simulation and in deployment alike."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.method import Method

UNENCODED = Method()
"""Uploads in the form of the shared state."""
MIN_COHORT = 3  # fewest clients whose median norm says anything about one of them


@dataclass(frozen=True)
class Guard:
    """Limits for the uploads of a round."""

    template: Mapping[str, Tensor]  # an upload of the method, by path: names, shapes and types
    method: Method = UNENCODED
    max_norm_ratio: float = 0.0  # largest norm of an update in multiples of the cohort's median; 0 = no limit

    def find_faults(self, uploads: Mapping[int, Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> dict[int, str]:
        """Return why uploads must not be averaged, by client; the state `shared` was sent to all of them."""
        faults = {client: find_fault(upload, self.template) for client, upload in uploads.items()}
        norms = {client: update_norm(uploads[client], shared, self.method) for client in uploads if not faults[client]}
        if self.max_norm_ratio and len(norms) >= MIN_COHORT:
            limit = self.max_norm_ratio * statistics.median(norms.values())
            for client, norm in norms.items():
                if norm > limit > 0:
                    faults[client] = (
                        f"its update has norm {norm:.3g}, more than {self.max_norm_ratio:g} times the cohort's median "
                        f"{limit / self.max_norm_ratio:.3g}"
                    )
        return {client: fault for client, fault in faults.items() if fault}


def find_fault(upload: Mapping[str, Tensor], template: Mapping[str, Tensor] | None = None) -> str:
    """Return what is wrong with one upload, compared with `template` if it is given, or ""."""
    if template is not None:
        for path in sorted(template.keys() | upload.keys()):
            if path not in upload:
                return f"'{path}' is missing"
            if path not in template:
                return f"the method does not upload '{path}'"
            sent, expected = upload[path], template[path]
            if sent.shape != expected.shape:
                return f"'{path}' has shape {tuple(sent.shape)}; it must be {tuple(expected.shape)}"
            if sent.dtype != expected.dtype:
                return f"'{path}' is {_name(sent.dtype)}; it must be {_name(expected.dtype)}"
    for path, tensor in upload.items():
        if not bool(torch.isfinite(tensor).all()):
            return f"'{path}' has NaN or infinity"
    return ""


def update_norm(upload: Mapping[str, Tensor], shared: Mapping[str, Tensor], method: Method = UNENCODED) -> float:
    """Return the L2 norm of the difference between an upload, decoded, and the state it was computed from."""
    decoded = tree.flatten(method.decode_upload(tree.unflatten(dict(shared)), tree.unflatten(dict(upload))))
    parts = [tensor - shared[path] if path in shared else tensor for path, tensor in decoded.items()]
    return float(torch.linalg.vector_norm(torch.cat([part.flatten().double() for part in parts]))) if parts else 0.0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
