"""Secure sums: the coordinator learns the mean of uploads, and no single one.

Each pair of sites has a secret, from their X25519 keys. A site rounds its weighted upload to integers modulo 2⁶⁴ and adds
a mask for every other site of the cohort; masks of a pair cancel in the sum. Masks are new for each round, cohort and attempt.
If a site drops out, the masks of the others do not cancel, and the round is repeated by the others with newly trained uploads
and new masks: the same uploads are never summed twice, since the difference of two such sums would be the dropped one's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpfl.defences.aggregation import MAX_VALUE, MIN_COHORT, from_integers, to_integers
from gpfl.deploy import keys
from gpfl.deploy.messages import FlatTree
from gpfl.errors import GpflError


@dataclass(frozen=True)
class SumContext:
    """What the masks of a sum depend on: equal at all sites of the cohort, and never the same twice."""

    roster: str
    round: int
    attempt: int
    cohort: tuple[int, ...]

    def to_bytes(self) -> bytes:
        """Return the context as bytes."""
        return f"{self.roster} {self.round} {self.attempt} {','.join(map(str, self.cohort))}".encode()


class Masker:
    """Masks the uploads of one site.

    Args:
        key: File of the site's private mask key.
        public: Public mask keys of all sites by client.
        client: Index of the site.

    """

    def __init__(self, key: Path, public: Mapping[int, bytes], client: int) -> None:
        if public[client] != keys.public_mask_key(key):
            raise GpflError(f"the roster has another mask key for this site than {key}")
        self._secrets = {other: keys.shared_secret(key, value) for other, value in public.items() if other != client}
        self._client = client

    def mask(self, upload: Mapping[str, Tensor], weight: float, context: SumContext) -> FlatTree:
        """Return the weighted upload, masked. Raise if an entry is too large for it."""
        if self._client not in context.cohort or len(context.cohort) < MIN_COHORT:
            raise GpflError(f"a secure sum needs {MIN_COHORT} sites and this one among them: {context.cohort}")
        paths = sorted(upload)
        numbers = np.concatenate([_quantise(upload[path], weight, path) for path in paths])
        for other in context.cohort:
            if other != self._client:
                mask = np.frombuffer(keys.keystream(self._secrets[other], context.to_bytes(), 8 * len(numbers)), dtype="<u8")
                # Each pair adds and subtracts the same mask; the arithmetic is modulo 2⁶⁴.
                numbers = numbers + mask if self._client < other else numbers - mask
        return _split(numbers.view(np.int64), {path: upload[path] for path in paths})


def sum_masked(uploads: Sequence[Mapping[str, Tensor]], template: Mapping[str, Tensor]) -> FlatTree:
    """Return the sum of the masked uploads of a whole cohort, in which masks cancel."""
    sums = {}
    for path, like in template.items():
        total = np.zeros(like.shape, dtype=np.uint64)
        for upload in uploads:
            total += upload[path].numpy().view(np.uint64)
        sums[path] = torch.from_numpy(np.atleast_1d(total.view(np.int64))).reshape(like.shape)
    return sums


def sum_is_plausible(total: Tensor) -> bool:
    """Return whether a sum can be that of weighted entries; of masks that do not cancel, half the entries cannot."""
    return bool((from_integers(total).abs() < MAX_VALUE).all())


def find_masked_fault(upload: Mapping[str, Tensor], template: Mapping[str, Tensor]) -> str:
    """Return what is wrong with a masked upload, or "". Its values say nothing."""
    if upload.keys() != template.keys():
        return f"its tensors are not those of the method: {', '.join(sorted(upload.keys() ^ template.keys())[:3])}"
    for path, tensor in upload.items():
        if tensor.dtype != torch.int64:
            return f"'{path}' is not masked ({tensor.dtype})"
        if tensor.shape != template[path].shape:
            return f"'{path}' has shape {tuple(tensor.shape)}; it must be {tuple(template[path].shape)}"
    return ""


def _quantise(tensor: Tensor, weight: float, path: str) -> npt.NDArray[np.uint64]:
    numbers, faulty = to_integers(tensor.detach().cpu(), weight)
    if faulty:
        raise GpflError(f"'{path}' has an entry beyond {MAX_VALUE:.3g}, or NaN, which a secure sum cannot hold")
    return numbers.numpy().ravel().view(np.uint64)


def _split(numbers: npt.NDArray[np.int64], like: Mapping[str, Tensor]) -> FlatTree:
    parts, start = {}, 0
    for path, tensor in like.items():
        parts[path] = torch.from_numpy(numbers[start : start + tensor.numel()].copy()).reshape(tensor.shape)
        start += tensor.numel()
    return parts
