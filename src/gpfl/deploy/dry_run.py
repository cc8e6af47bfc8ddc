"""What would leave a site: its part of a round, done here, with nothing sent."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpfl.core import tree
from gpfl.deploy.card import DataCard, describe_site
from gpfl.deploy.messages import Description, RefusedError, RoundRequest
from gpfl.deploy.policy import Policy
from gpfl.deploy.roster import SiteData
from gpfl.deploy.site import Site
from gpfl.engine.guard import update_norm
from gpfl.privacy.label_inference import LabelInference, infer_label_distributions
from gpfl.privacy.uploads import initial_state


@dataclass(frozen=True)
class DryRun:
    """What would leave a site.

    Attributes:
        description: What it says of its samples before round 0, with its bytes.
        description_bytes: Size of that message.
        tensors: Shape and bytes of each uploaded tensor.
        scores: Correct predictions, loss and samples of each split, which leave with every round.
        reply_bytes: Size of a round's message.
        norm: L2 norm of the update.
        refused: What the site's policy refuses, with the reason.
        labels: How well the coordinator could guess the site's label proportions from the upload; None without an attack.

    """

    description: Description
    description_bytes: int
    tensors: Mapping[str, tuple[tuple[int, ...], int]]
    scores: Mapping[str, tuple[float, float, int]]
    reply_bytes: int
    norm: float
    refused: list[str]
    labels: LabelInference | None


def dry_run(card: DataCard, name: str, data: SiteData, policy: Policy) -> DryRun:
    """Return what would leave the site, as if all sites had its samples' statistics. Nothing is sent or kept."""
    description = describe_site(data)
    roster = card.roster(dict.fromkeys(card.sites, description))
    refused = []
    with tempfile.TemporaryDirectory() as folder:
        site = Site(roster, name, data, Path(folder))
        shared = tree.flatten(site.spec.method.init(site.config.run.seed)[0])
        request = RoundRequest(
            roster=roster.digest, client=site.client, round=0, accepted=0, train=True, splits=("test",), shared=shared
        )
        reply = site.run_round(request)
        content = reply.pack()
        checks: tuple[Callable[[], None], ...] = (
            lambda: policy.check_description(description, card),
            lambda: policy.check_request(request, site),
            lambda: policy.check_reply(reply, len(content), site, request),
        )
        for check in checks:
            try:
                check()
            except RefusedError as error:
                refused.append(str(error))
        labels = _guess_labels(site) if reply.upload else None
    return DryRun(
        description,
        len(description.pack()),
        {path: (tuple(each.shape), each.numel() * each.element_size()) for path, each in reply.upload.items()},
        reply.scores,
        len(content),
        update_norm(reply.upload, request.shared, site.spec.method),
        refused,
        labels,
    )


def _guess_labels(site: Site) -> LabelInference | None:
    (found,) = infer_label_distributions(site.engine, initial_state(site.engine), [site.client])
    return found if found.guess is not None else None
