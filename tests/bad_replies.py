"""Replies of a site that is broken or lies, and why the coordinator does not take them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from gpfl.deploy.messages import RoundReply


def first_matrix(reply: RoundReply) -> str:
    """Return the path of an uploaded matrix."""
    return next(path for path, tensor in reply.upload.items() if tensor.dim() == 2)


def change_upload(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[RoundReply], bytes]:
    """Change one tensor of an upload, or leave it out."""

    def apply(reply: RoundReply) -> bytes:
        path = first_matrix(reply)
        changed = change(reply.upload[path])
        upload = {key: tensor for key, tensor in reply.upload.items() if key != path}
        return dataclasses.replace(reply, upload=upload if changed is None else {**upload, path: changed}).pack()

    return apply


BAD_REPLIES: dict[str, tuple[Callable[[RoundReply], bytes], str]] = {
    "NaN": (change_upload(lambda tensor: tensor * torch.nan), "NaN"),
    "wrong shape": (change_upload(lambda tensor: torch.ones(1, 1)), "shape"),
    "missing key": (change_upload(lambda tensor: None), "missing"),
    "float64": (change_upload(lambda tensor: tensor.double()), "float64"),
    "norm": (change_upload(lambda tensor: tensor + 1e6), "median"),
    "loss": (lambda reply: dataclasses.replace(reply, terms={}).pack(), "loss terms"),
    "garbage": (lambda reply: b"not tensors", "damaged"),
    "replayed reply": (lambda reply: dataclasses.replace(reply, round=reply.round - 1).pack(), "its reply is that of round"),
}
"""By fault: what becomes of the honest reply, and a part of the reason for which it is dropped."""


def claim_samples(reply: RoundReply) -> bytes:
    """Return a reply with scores on 1e9 samples."""
    return dataclasses.replace(reply, scores={"test": (1e9, 0.0, 10**9)}).pack()
