"""The coordinator's run: the round loop over sites, in an ordinary run folder."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpfl.core.precision import matmul_precision
from gpfl.data.preprocessing import ClientStatistics
from gpfl.deploy.messages import Transport
from gpfl.deploy.remote import Remote
from gpfl.deploy.roster import Roster
from gpfl.errors import GpflError
from gpfl.training.callbacks import Callback
from gpfl.training.execute import PreparedRun, make_loop
from gpfl.training.prepare import run_guarantee
from gpfl.training.round_loop import RunOutcome
from gpfl.training.run_dir import RunDir


def coordinate(
    roster: Roster,
    transport: Transport,
    folder: Path,
    *,
    statistics: Mapping[str, ClientStatistics] | None = None,
    min_clients: int = 1,
    callbacks: Sequence[Callback] = (),
    log: Callable[[str], None] = lambda line: None,
) -> RunOutcome:
    """Run to the end, from the last checkpoint in `folder` if there is one, and return the outcome.

    Args:
        roster: The run and its sites.
        transport: Sends messages to sites.
        folder: Folder of the run.
        statistics: What each site sent before round 0.
        min_clients: Uploads that a round needs.
        callbacks: Callbacks of the run.
        log: Called with a line for each event.

    """
    federation = roster.federation(statistics=statistics)
    if min_clients > len(federation):
        raise GpflError(
            f"min_clients is {min_clients}; run '{roster.run}' has {len(federation)} sites: lower it in deployment.toml"
        )
    config, spec = roster.prepare(federation)
    known = (folder / "config.toml").exists()
    run_dir = RunDir.open(folder) if known else RunDir.create(folder, config.to_toml(), federation)
    run_dir.replace_federation(federation)
    engine = Remote(spec, roster, transport, folder, min_clients=min_clients, log=log)
    loop = make_loop(PreparedRun(config, spec, run_dir, callbacks), engine)
    if run_dir.finished:
        return loop.reopen()
    with matmul_precision(spec.precision):
        outcome = loop.run()
    for site, error in engine.finish(outcome.selected.shared, outcome.selected.round).items():
        log(f"site '{site}' did not confirm its model ({error}): it makes one from its last state with gpfl deploy model")
    if guarantee := run_guarantee(spec.method, spec.federation, spec.schedule, engine.most_uploads):
        outcome.summary["privacy"] = {**guarantee, "noise_source": engine.noise_source}
    run_dir.write_summary(outcome.summary)
    for callback in callbacks:
        callback.on_run_end(outcome.summary)
    return outcome
