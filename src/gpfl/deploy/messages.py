"""The messages of a round between coordinator and site, and how they are packed."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self, cast

from torch import Tensor

from gpfl.errors import GpflError
from gpfl.io.tensors import pack_tensors, unpack_tensors

FlatTree = dict[str, Tensor]
"""Tensors by path."""


class Answer(NamedTuple):
    """What came back from a site: a packed reply, or the reason why there is none."""

    payload: bytes = b""
    error: str = ""


Transport = Callable[[Mapping[int, bytes]], Mapping[int, Answer]]
"""Sends each client its message and returns their answers; clients that are silent have none."""


REASONS = {
    "card": "the site has not accepted the data card",
    "version": "the site has another version of gpfl, torch or flwr",
    "roster": "the roster is not that of the data card the site accepted",
    "policy": "the site's policy refuses it",
    "sum": "the secure sum is not one that the site takes part in",
    "signature": "the request is not signed by the coordinator",
    "failed": "the site could not do it; the reason is in the site's log",
}
"""Why a site does not answer. Nothing else is said: the text of an exception may hold data."""


class RefusedError(GpflError):
    """A request that a site refuses.

    Attributes:
        code: One of `REASONS`.
        rule: The rule of the site's policy, if it is the reason.

    """

    def __init__(self, code: str, detail: str = "", rule: str = "") -> None:
        super().__init__(detail or REASONS[code])
        self.code, self.rule = code, rule


def pack_refusal(code: str, rule: str = "") -> bytes:
    """Return the message by which a site refuses."""
    return pack_tensors({}, {"refused": code, "rule": rule})


def check_refusal(header: Mapping[str, object]) -> None:
    """Raise if the header of a reply is that of a refusal."""
    if "refused" in header:
        reason = REASONS.get(str(header["refused"]), "the site refuses it for a reason that this version of gpfl does not know")
        rule = str(header.get("rule", ""))[:40]
        raise GpflError(f"{reason} ({rule})" if rule.replace("_", "").isalnum() else reason)


def pack_describe(card: str, versions: Mapping[str, str]) -> bytes:
    """Return the request for what a site says of its samples; `card` is the digest of the data card."""
    return pack_tensors({}, {"kind": "describe", "card": card, "versions": dict(versions)})


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a site says of its samples before a run.

    Attributes:
        sizes: Number of training, validation and test samples.
        statistics: Statistics of its columns; empty for other samples.
        mask_key: Its public key for secure sums, in hexadecimal digits; "" without one.

    """

    sizes: tuple[int, int, int]
    statistics: Mapping[str, object]
    mask_key: str = ""

    def pack(self) -> bytes:
        """Return the message."""
        return pack_tensors({}, {"sizes": list(self.sizes), "statistics": dict(self.statistics), "mask_key": self.mask_key})

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Return the description in a message. Raise if it is none."""
        _, header = unpack_tensors(payload, "the reply")
        check_refusal(header)
        sizes, statistics = header.get("sizes"), header.get("statistics")
        if not isinstance(sizes, list) or len(sizes) != 3 or not all(type(n) is int and n >= 0 for n in sizes):
            raise GpflError(f"the reply has sizes {sizes!r}; they must be three numbers of samples")
        mask_key = header.get("mask_key")
        if not isinstance(statistics, dict) or not isinstance(mask_key, str):
            raise GpflError("the reply has no statistics or no mask key")
        return cls(sizes=(sizes[0], sizes[1], sizes[2]), statistics=statistics, mask_key=mask_key)


@dataclass(frozen=True, kw_only=True)
class RoundRequest:
    """What the coordinator asks of a site: evaluate the state after `round` rounds, then train from it.

    Attributes:
        roster: Digest of the roster by which both sides work.
        client: Index of the site.
        round: Rounds done.
        accepted: Rounds after which the site's private state is the valid one: its last upload that was averaged; 0 = none.
        train: Whether to train and upload.
        splits: Splits to evaluate.
        final: Whether `shared` is the last one, of which the site keeps its personal model.
        agreement: The roster, for a site that may not have it yet.
        cohort: The clients that train in the round, if their uploads are summed securely.
        attempt: How often the round was repeated; each repetition trains on other batches.
        shared: The shared state.

    """

    roster: str
    client: int
    round: int
    accepted: int
    train: bool
    splits: tuple[str, ...]
    final: bool = False
    agreement: str = ""
    cohort: tuple[int, ...] = ()
    attempt: int = 0
    shared: FlatTree

    @property
    def upload_digest(self) -> str:
        """SHA-256 of all that the upload depends on."""
        header = {key: getattr(self, key) for key in ("roster", "client", "round", "accepted", "cohort", "attempt")}
        return hashlib.sha256(pack_tensors(self.shared, header)).hexdigest()

    def pack(self) -> bytes:
        """Return the message."""
        header = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "shared"}
        return pack_tensors(self.shared, {"kind": "round", **header})

    @classmethod
    def parse(cls, header: Mapping[str, object], shared: FlatTree) -> Self:
        """Return the request in a message. Raise if it is none."""
        kinds = {"roster": str, "client": int, "round": int, "accepted": int, "train": bool, "splits": list, "final": bool}
        kinds |= {"agreement": str, "cohort": list, "attempt": int}
        for key, kind in kinds.items():
            if type(header.get(key)) is not kind:
                raise GpflError(f"the request has {key} = {header.get(key)!r}: it is not of this version of gpfl")
        values = {key: header[key] for key in kinds}
        values["splits"] = tuple(map(str, cast(list[object], header["splits"])))
        values["cohort"] = tuple(int(str(client)) for client in cast(list[object], header["cohort"]))
        return cls(shared=shared, **values)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class RoundReply:
    """A site's reply: its upload and loss terms, if it trained, and its scores.

    Attributes:
        round: Rounds done when it was asked for, so that an earlier reply that comes again is not taken for this one.
        upload: The upload; empty without training.
        terms: Mean loss terms of its steps.
        scores: Correct predictions, summed loss and number of samples of each evaluated split.
        seconds: Time the site took.
        uploads: Uploads that the site has made, also of rounds that were lost.
        epsilon: ε of all of them against a coordinator that sees each; 0 without noise.

    """

    round: int
    upload: FlatTree
    terms: dict[str, float]
    scores: dict[str, tuple[float, float, int]]
    seconds: float = 0.0
    uploads: int = 0
    epsilon: float = 0.0

    def pack(self) -> bytes:
        """Return the message."""
        header = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "upload"}
        return pack_tensors(self.upload, header)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Return the reply in a message. Raise if it is none."""
        upload, header = unpack_tensors(payload, "the reply")
        check_refusal(header)
        number, terms, scores, seconds, uploads, epsilon = (
            header.get(key) for key in ("round", "terms", "scores", "seconds", "uploads", "epsilon")
        )
        if type(number) is not int:
            raise GpflError("the reply has no round")
        if not isinstance(terms, dict) or not all(isinstance(value, float) for value in terms.values()):
            raise GpflError("the reply has no loss terms")
        if not isinstance(scores, dict) or not isinstance(seconds, float):
            raise GpflError("the reply has no scores")
        if type(uploads) is not int or not isinstance(epsilon, float):
            raise GpflError("the reply does not say how many uploads the site has made")
        parsed = {}
        for split, score in scores.items():
            if not isinstance(score, list) or len(score) != 3 or not all(isinstance(value, (int, float)) for value in score):
                raise GpflError(f"the reply has {split} scores {score!r}; it must hold three numbers")
            parsed[split] = (float(score[0]), float(score[1]), int(score[2]))
        return cls(round=number, upload=upload, terms=terms, scores=parsed, seconds=seconds, uploads=uploads, epsilon=epsilon)
