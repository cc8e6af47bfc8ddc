"""What may leave a site: the rules of its policy file, which the site's worker enforces whatever the coordinator asks."""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpfl.core import options
from gpfl.core.options import option
from gpfl.deploy.card import DataCard
from gpfl.deploy.messages import Description, RefusedError, RoundReply, RoundRequest
from gpfl.deploy.site import Site
from gpfl.engine.guard import update_norm
from gpfl.errors import GpflError
from gpfl.io import toml


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The rules of `outbound.toml`. 0 and () set no limit; without a file nothing may leave."""

    card: str = option("", "SHA-256 of the only data card under which anything leaves; empty = the one that is accepted")
    methods: tuple[str, ...] = option((), "methods that may train here; () = any")
    keys: tuple[str, ...] = option((), "names of tensors that may leave, with * and ?; () = those of the method")
    max_shape: tuple[int, ...] = option((), "largest shape of a tensor that may leave; () = any", min=0)
    max_bytes: int = option(0, "most bytes of a reply", min=0)
    max_rounds: int = option(0, "most uploads, one for each round and each repetition of a round", min=0)
    max_norm: float = option(0.0, "largest L2 norm of an update", min=0)
    min_samples: int = option(0, "fewest training samples for statistics or training", min=0)
    statistics: bool = option(True, "whether statistics of columns may leave")
    scores: bool = option(True, "whether the number of correct predictions and the loss may leave")
    secure_sum: bool = option(False, "whether uploads may leave only as part of a secure sum")
    min_noise: float = option(0.0, "smallest noise of a defence at client level, in multiples of its clipping bound", min=0)
    max_clip: float = option(0.0, "largest clipping bound of the update", min=0)
    max_epsilon: float = option(0.0, "largest ε of all uploads of the site, also of lost rounds; needs noise", min=0)

    @classmethod
    def read(cls, path: Path) -> "Policy":
        """Return the policy of a file. Raise if there is none: nothing leaves a site that has not said what may."""
        if not path.exists():
            raise GpflError(f"{path} is missing, and without a policy nothing leaves the site: write one, see docs/deploy.md")
        return options.build(cls, toml.read(path), "outbound")

    def check_description(self, description: Description, card: DataCard) -> None:
        """Raise if what a site says of its samples must not leave."""
        self._check_card(card.digest)
        self._check_samples(description.sizes[0])
        if description.statistics and not self.statistics:
            _refuse("statistics", "statistics of columns are asked for, and outbound.statistics is false")

    def check_request(self, request: RoundRequest, site: Site, uploads: int = 0) -> None:
        """Raise if the policy refuses a request; `uploads` counts those made before."""
        method = site.spec.method
        if self.methods and method.name not in self.methods:
            _refuse("methods", f"the run trains {method.name}, and outbound.methods allows {', '.join(self.methods)}")
        if request.splits and not self.scores:
            _refuse("scores", "scores are asked for, and outbound.scores is false")
        if not request.train:
            return
        self._check_samples(len(site.spec.federation.shards[site.client].train))
        if self.max_rounds and uploads >= self.max_rounds:
            _refuse("max_rounds", f"upload {uploads + 1} is asked for, and outbound.max_rounds is {self.max_rounds}")
        if self.secure_sum and not site.roster.mask_keys:
            _refuse("secure_sum", "the run uploads plain updates, and outbound.secure_sum is true")
        defence = site.config.defence
        if self.max_clip and not 0 < defence.clip <= self.max_clip:
            _refuse("max_clip", f"the run clips updates at {defence.clip:g}, and outbound.max_clip is {self.max_clip:g}")
        if defence.noise < self.min_noise:
            _refuse("min_noise", f"the run has noise {defence.noise:g}, and outbound.min_noise is {self.min_noise:g}")
        if self.max_epsilon and (epsilon := site.epsilon(max(site.planned_uploads, uploads + 1))) > self.max_epsilon:
            _refuse(
                "max_epsilon",
                f"{max(site.planned_uploads, uploads + 1)} uploads, of which {uploads} were made, have ε = {epsilon:.3g}, and "
                f"outbound.max_epsilon is {self.max_epsilon:g}",
            )

    def check_reply(self, reply: RoundReply, n_bytes: int, site: Site, request: RoundRequest) -> None:
        """Raise if a reply must not leave."""
        self.check_size(n_bytes)
        for path, tensor in reply.upload.items():
            if self.keys and not _matches(path, self.keys):
                _refuse("keys", f"'{path}' would leave, and outbound.keys allows {', '.join(self.keys)}")
            if self.max_shape and not _fits(tuple(tensor.shape), self.max_shape):
                _refuse("max_shape", f"'{path}' has shape {tuple(tensor.shape)}, and outbound.max_shape is {self.max_shape}")
        if self.max_norm and (norm := update_norm(reply.upload, request.shared, site.spec.method)) > self.max_norm:
            _refuse("max_norm", f"the update has norm {norm:.4g}, and outbound.max_norm is {self.max_norm:g}")

    def check_size(self, n_bytes: int) -> None:
        """Raise if a reply is too large to leave."""
        if self.max_bytes and n_bytes > self.max_bytes:
            _refuse("max_bytes", f"the reply has {n_bytes:,} bytes, and outbound.max_bytes is {self.max_bytes:,}")

    def _check_card(self, digest: str) -> None:
        if self.card and self.card != digest:
            _refuse("card", f"the data card has SHA-256 {digest}, and outbound.card is {self.card}")

    def _check_samples(self, n_train: int) -> None:
        if n_train < self.min_samples:
            _refuse("min_samples", f"there are {n_train} training samples, and outbound.min_samples is {self.min_samples}")


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _fits(shape: tuple[int, ...], largest: tuple[int, ...]) -> bool:
    return len(shape) <= len(largest) and all(a <= b for a, b in zip(reversed(shape), reversed(largest), strict=False))


def _refuse(rule: str, detail: str) -> None:
    raise RefusedError("policy", f"policy: {detail}", rule)
