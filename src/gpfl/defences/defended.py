"""A method under a defence, which transforms the gradients of its local steps and its uploads."""

import dataclasses
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.method import Batch, ClientInfo, LossTerms, Method, Phase
from gpfl.core.randomness import make_salt, random_key, secret_key
from gpfl.core.tree import Tree
from gpfl.defences.aggregation import INTEGER_BYTES
from gpfl.defences.config import FULL_BITS, NO_DEFENCE, DefenceConfig
from gpfl.defences.per_example import PerExampleGradient
from gpfl.defences.uploads import compressed_bytes, transform_upload
from gpfl.errors import GpflError
from gpfl.methods.factored_valve import FactoredGPFL, encoded_bytes
from gpfl.methods.gpfl import GPFL, GUIDANCE

_STATE = "defence"  # key in the local state of the number of steps done, which selects the noise of a step


def _delegate(name: str) -> Any:
    """Return a method of `Defended` that calls the one of the same name of the method without defence."""

    def call(self: "Defended", *arguments: object) -> object:
        return getattr(self.method, name)(*arguments)

    return call


@dataclass(frozen=True, kw_only=True)
class Defended(Method):
    """A bound method whose local gradients and uploads are transformed by a defence."""

    method: Method
    defence: DefenceConfig
    salt: float = 0.0  # selects the noise of the run; a float, so that trials with several seeds can run concurrently
    min_clients: int = 1  # the fewest clients of a round, whose noise adds up to that of the stated ε
    secret: bytes = field(
        default=b"", repr=False
    )  # selects the noise in place of the salt, which follows from the seed and so is for simulation only

    def replace(self, **values: object) -> Self:
        """Return the defended method with other values of the method's options, its setup or the defence."""
        defence = {name: values.pop(name) for name in ("defence", "salt", "min_clients", "secret") if name in values}
        method = self.method.replace(**values)
        return dataclasses.replace(self, method=method, setup=method.setup, **defence)  # type: ignore[arg-type]

    def values(self) -> dict[str, object]:
        """Return what `replace` can change, by name, without the net."""
        return {**self.method.values(), "defence": self.defence, "salt": self.salt, "min_clients": self.min_clients}

    # Gradients: each step has its own gradient function, since each has its own noise.

    def phases(self) -> tuple[Phase, ...]:
        """Return the method's phases, with per-example gradients if the defence clips them."""
        phases = self.method.phases()
        if not self.defence.example_clip:
            return phases
        return tuple(phase._replace(step=partial(self._per_example_step, index)) for index, phase in enumerate(phases))

    def download(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Return the state in which local training starts."""
        local_state = self.method.download(shared, private, client)
        return {**local_state, _STATE: {"step": torch.zeros_like(client.round)}} if self.defence.example_clip else local_state

    def _per_example_step(
        self, phase: int, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo
    ) -> tuple[Tree, LossTerms]:
        step = tree.leaf(tree.branch(local_state, _STATE), "step")
        bound = self.defence.example_clip
        gradient = PerExampleGradient(self._key(client, "example", step), bound, self.defence.example_noise * bound)
        train = self.method.replace(gradient=gradient).phases()[phase].step
        local_state, terms = train(shared, tree.drop(local_state, (_STATE,)), batch, client)
        return {**local_state, _STATE: {"step": step + 1}}, terms

    # Uploads.

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        """Return the method's upload, clipped, noisy or compressed, and the new private state."""
        sent, new_private = self.method.upload(shared, tree.drop(local_state, (_STATE,)), private, client)
        if self.defence.transforms_uploads and sent:
            sent = transform_upload(shared, sent, self.defence, self.noise_std, self._key(client, "upload"))
        return sent, new_private

    @property
    def noise_std(self) -> float:
        """Standard deviation of one client's noise; over `min_clients` clients it adds up to noise × clip."""
        return self.defence.noise * self.defence.clip / math.sqrt(self.min_clients)

    def aggregation_weight(self, client: ClientInfo) -> Tensor:
        """Return the same weight for all clients under noise, since a larger one would exceed the bound of a client."""
        return torch.ones_like(client.n_samples) if self.defence.noise else self.method.aggregation_weight(client)

    def _key(self, client: ClientInfo, purpose: str, *steps: Tensor) -> Tensor:
        if self.secret:
            return secret_key(self.secret, purpose, *(int(number) for number in (client.round, client.index, *steps)))
        salt = self.salt if isinstance(self.salt, Tensor) else torch.full_like(client.round, self.salt)
        return random_key(salt, purpose, client.round, client.index, *steps)

    # Everything else is that of the method.

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the method."""
        return self.method.name

    @property
    def shares(self) -> tuple[str, ...]:  # type: ignore[override]
        """The parts that clients upload."""
        return self.method.shares

    @property
    def shared_parts(self) -> tuple[str, ...]:
        """The parts that clients upload, with BatchNorm's running statistics if the server averages them."""
        return self.method.shared_parts

    init = _delegate("init")
    loss = _delegate("loss")
    decode_upload = _delegate("decode_upload")
    aggregate = _delegate("aggregate")
    final_phases = _delegate("final_phases")  # their result is not sent and so needs no defence
    start_final_phases = _delegate("start_final_phases")
    personal_weights = _delegate("personal_weights")
    features = _delegate("features")
    logits = _delegate("logits")


def defend(method: Method, defence: DefenceConfig, *, seed: int, min_clients: int) -> Method:
    """Return a bound method under a defence, or itself if there is none. Raise if the defence does not fit the method."""
    if not defence.enabled:
        return method
    _check_uploads_weights(method, defence)
    _check_batch_norm(method, defence)
    entries = defence.transforms_uploads or defence.example_clip
    if isinstance(method, FactoredGPFL) and method.sends_valve_as("low_rank") and entries:
        raise GpflError(
            "method.valve_upload is 'low_rank', but clipping, noise and compression act on the entries of V: set it to 'full'"
        )
    if defence.example_clip and isinstance(method, GPFL) and method.valve == "auto":
        method = method.replace(valve="full")  # the bound is on the gradient of V itself
    return Defended(setup=method.setup, method=method, defence=defence, salt=make_salt(seed), min_clients=max(1, min_clients))


def undefended(method: Method) -> Method:
    """Return the method without its defence."""
    return method.method if isinstance(method, Defended) else method


def upload_bytes(method: Method, upload: Tree, secure_sum: bool = False) -> int:
    """Return the bytes that an upload takes on the wire; `upload` is one, or a mean of several."""
    if secure_sum:
        return sum(INTEGER_BYTES * leaf.numel() for leaf in tree.leaves(upload))
    defence, plain = method.defence if isinstance(method, Defended) else NO_DEFENCE, undefended(method)
    if not isinstance(plain, FactoredGPFL) or not plain.sends_valve_as("factors") or defence.transforms_uploads:
        return compressed_bytes(upload, defence)
    return tree.count_bytes(tree.drop(upload, ("cov",))) + encoded_bytes(plain.net.width, plain.n_trained_contexts)


def defence_warnings(method: Method) -> list[str]:
    """Return warnings to show before a run: weight decay uses up the bound of clipped or sparse updates."""
    if not isinstance(method, Defended) or not (method.defence.clip or method.defence.top_k < 1):
        return []
    plain = method.method
    decays = isinstance(plain, GPFL) and plain.reg == "wd" and plain.mu
    decayed = [part for part in GUIDANCE if decays and part in plain.shared_parts]
    if not decayed:
        return []
    transform = "clipped" if method.defence.clip else "reduced to its largest entries"
    return [
        f"Weight decay changes {' and '.join(decayed)} in every step and is part of the update that is {transform}, so little "
        "of what the data contribute may be left. --mu 0 turns it off."
    ]


def _check_uploads_weights(method: Method, defence: DefenceConfig) -> None:
    if defence.transforms_uploads and method.shares and "base" not in method.shares:
        raise GpflError(
            f"{method.name} uploads {', '.join(method.shares)}, which is not an update of weights, so clipping, noise and "
            "compression do not apply: leave out --clip, --noise, --top-k and --bits"
        )


def _check_batch_norm(method: Method, defence: DefenceConfig) -> None:
    if not method.net.has_batch_norm:
        return
    if defence.example_clip:
        raise GpflError(
            f"defence.example_clip is {defence.example_clip:g}, but BatchNorm in net '{method.net.name}' mixes examples, so "
            "that clipping does not bound the influence of one: use another net"
        )
    if "batch_norm_stats" in method.shared_parts and (defence.noise or defence.bits < FULL_BITS):
        raise GpflError(
            "train.batch_norm is 'average', so clients upload BatchNorm's variances, which noise and quantisation could make "
            "negative: use --batch-norm local"
        )
