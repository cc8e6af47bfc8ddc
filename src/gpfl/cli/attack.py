"""The command `gpfl attack`: what a curious server can reconstruct or infer from the uploads of a run."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from gpfl.cli.command import Argument, Command
from gpfl.cli.options import CommaList, Decorator, Function, compose, option, out_option
from gpfl.cli.terminal import print_line
from gpfl.core.randomness import MAX_SEED
from gpfl.defences import Defended
from gpfl.engine.distributed import require_single_process
from gpfl.errors import GpflError, pluralize
from gpfl.federation import Federation
from gpfl.io import files
from gpfl.privacy.attack_runner import AttackCase, AttackRunner, CaseResult, Record, ceiling_runner, list_cases, records_to_json
from gpfl.privacy.case_summary import PSNR_FORMULAS, summarize_case
from gpfl.privacy.gradient_targets import gradient_targets, select_target
from gpfl.privacy.label_inference import infer_label_distributions, uploading_clients
from gpfl.privacy.membership import infer_memberships
from gpfl.privacy.reconstruction import ATTACKS, AttackConfig
from gpfl.privacy.uploads import (
    ROUNDS,
    STEPS,
    AttackedBatch,
    check_batch_size,
    check_can_train,
    check_images,
    choose_batches,
    state_at,
)
from gpfl.report.pages import markdown_images, render_page, write_texts
from gpfl.report.privacy_figures import ImageRow, draw_grid
from gpfl.report.privacy_tables import (
    attack_notes,
    attack_table,
    describe_label_inference,
    describe_membership_inference,
    describe_summary,
)
from gpfl.training import api
from gpfl.training.result import Result

POSITIVE, SEED = click.IntRange(1), click.IntRange(0, MAX_SEED)


# Options of all commands that attack.


def case_options(kind: str | None, *, batch: str, steps: str, round: str) -> Decorator:
    """Add the options that select attack cases, with these defaults, and the formula of PSNR."""
    default = "" if kind else "  [default: geiping]"  # None tells the command that --kind was not set
    return compose(
        option("--kind", default=kind, type=CommaList(str, ATTACKS), help=f"dlg (the paper's) or geiping (stronger).{default}"),
        option("--batch", default=batch, type=CommaList(int, min=1), help="Images in one upload, such as 1 or 1,4."),
        option("--steps", default=steps, type=CommaList(str, STEPS), help="one: a step on these images; epoch: a local epoch."),
        option("--round", "round_", default=round, type=CommaList(str, ROUNDS), help="0: untrained; best: the selected round."),
        option(
            "--psnr",
            "formula",
            default="proper",
            type=click.Choice(PSNR_FORMULAS),
            help="proper: peak 1; reference: the authors'.",
        ),
    )


def effort_options(defaults: Mapping[str, object], seed_flag: str) -> Decorator:
    """Add --images, and the options of `AttackConfig`, which the command gets as `config`, with these defaults."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def command(*, iterations: int, restarts: int, attack_seed: int, graph: bool, **values: Any) -> None:
            config = AttackConfig(iterations=iterations, restarts=restarts, seed=attack_seed, graph=graph)
            function(config=config, **values)

        return compose(
            option("--images", default=20, metavar="N", help="Images to reconstruct."),
            option("--iterations", default=defaults["iterations"], type=POSITIVE, metavar="N", help="Iterations of an attack."),
            option(
                "--restarts",
                default=defaults["restarts"],
                type=POSITIVE,
                metavar="N",
                help="Random starts; the best match is kept.",
            ),
            option(
                seed_flag,
                "attack_seed",
                default=defaults["seed"],
                type=SEED,
                metavar="N",
                help="Seed of images and random starts.",
            ),
            click.option("--graph", is_flag=True, help="On a GPU, run attacks as a CUDA graph, which is faster."),
        )(command)

    return decorate


# The command.


@click.command(cls=Command)
@click.argument("run", cls=Argument, metavar="RUN", type=click.Path(path_type=Path), help="Folder of a finished run.")
@option("--target", default="all", metavar="NAME,…", help="Gradients to match: fe, model, sfe, sm, or all of the method.")
@option("--client", default="all", metavar="NAME,…", help="Names or indices of clients, or all.")
@case_options(None, batch="1", steps="one", round="0")
@effort_options({"iterations": 2000, "restarts": 2, "seed": 0}, "--seed")
@click.option("--labels", is_flag=True, help="Infer the label distribution of each client.")
@click.option("--membership", is_flag=True, help="Infer from each personal model which samples it was trained on.")
@out_option("Folder for results; cases that it holds are not attacked again.  [default: RUN/attack]")
def attack(
    run: Path,
    target: str,
    client: str,
    kind: list[str] | None,
    batch: list[int],
    steps: list[str],
    round_: list[str],
    formula: str,
    images: int,
    config: AttackConfig,
    labels: bool,
    membership: bool,
    out: Path | None,
) -> None:
    """Attack the uploads of a run.

    The attacker is an honest-but-curious server that reconstructs training images. With --labels or --membership it infers
    those, and reconstructs images only if --kind is given too.
    """
    require_single_process("gpfl attack")
    _check_single_run(run)
    result = api.load(run)
    clients = _parse_clients(result.federation, client)
    targets: list[str] = []
    batches: dict[int, list[AttackedBatch]] = {}
    if kind or not (labels or membership):
        targets = _parse_targets(result, target)
        batches = _choose_batches(result, clients, images, batch, steps, config.seed)
    if labels:
        uploading_clients(result.engine, clients)
    folder = out or run / "attack"
    files.make_folder(folder)  # after all checks
    _print_selected_round(result, round_)
    print_graph_note(config.graph, result.engine.device)
    if labels:
        _infer_labels(result, clients, round_, folder)
    if membership:
        _infer_memberships(result, clients, folder)
    if targets:
        cases = list_cases(result.engine.method.name, targets, kind or ["geiping"], round_, batch, steps)
        _reconstruct_images(result, cases, batches, formula, config, folder)


def _reconstruct_images(
    result: Result,
    cases: Sequence[AttackCase],
    batches: dict[int, list[AttackedBatch]],
    formula: str,
    config: AttackConfig,
    folder: Path,
) -> None:
    method = result.engine.method
    rounds = dict.fromkeys(case.round for case in cases)
    runner = AttackRunner(result.engine, {round_: state_at(result, round_) for round_ in rounds}, batches, config)
    on_result = functools.partial(print_case, formula=formula)
    tables, grids = [], []
    records: list[Record] = []
    for attack in dict.fromkeys(case.kind for case in cases):
        other, top = ceiling_runner(result.engine, batches, attack, config)
        # A defended fedavg has a case of the same name.
        ceiling_folder = folder / "ceiling" if isinstance(method, Defended) else folder
        ceiling = (
            top,
            other.run([top], ceiling_folder, functools.partial(on_result, prefix="ceiling: "))[top],
        )
        results = runner.run([case for case in cases if case.kind == attack], folder, on_result)
        title = f"{method.name} on {result.federation.table.name}: images that {attack} reconstructs from uploads"
        rows = [ImageRow.of_case("ceiling (fedavg)", ceiling[1])]
        rows += [
            ImageRow.of_case(f"{case.target}, round {case.round},\n{case.steps}, batch {case.batch}", each)
            for case, each in results.items()
        ]
        paths = draw_grid(ceiling[1].true, rows, f"{title}; PSNR in dB", folder / f"grid-{attack}")
        grids += paths
        tables.append(attack_table(results, ceiling, formula, title))
        records += [record for each in results.values() for record in each.records]
        records += [{**record, "ceiling": True} for record in ceiling[1].records]
        for note in attack_notes(ceiling, formula):
            print_line(note)
        print_line(f"Images: {', '.join(str(path) for path in paths)}")
    page = render_page("Attacks on uploads", tables) + markdown_images(grids)
    table, images = write_texts(folder, {"table.md": page, "results.json": records_to_json(records)})
    print_line(f"Table: {table}. Each image: {images}")


def _infer_labels(result: Result, clients: Sequence[int], rounds: Sequence[str], folder: Path) -> None:
    records: list[Record] = []
    for round_ in rounds:
        labels = infer_label_distributions(result.engine, state_at(result, round_), clients)
        print_line(f"Round {round_}. {describe_label_inference(labels, result.engine.method.name, len(clients))}")
        records += [{"round": round_, **asdict(each)} for each in labels]
    files.write_text(folder / "labels.json", records_to_json(records))
    print_line(f"Each client: {folder / 'labels.json'}")


def _infer_memberships(result: Result, clients: Sequence[int], folder: Path) -> None:
    members = infer_memberships(result.engine, state_at(result, "best"), clients)
    print_line(describe_membership_inference(members, result.engine.method.name))
    files.write_text(folder / "membership.json", records_to_json([asdict(each) for each in members]))
    print_line(f"Each client: {folder / 'membership.json'}")


def print_case(case: AttackCase, result: CaseResult, formula: str, prefix: str = "") -> None:
    """Print the outcome of a case."""
    print_line(prefix + describe_summary(summarize_case(case, result, formula)))


def print_graph_note(graph: bool, device: torch.device) -> None:
    """Print that --graph has no effect without a GPU."""
    if graph and device.type != "cuda":
        print_line(f"--graph is for a GPU; on {device} attacks run without it.")


def _print_selected_round(result: Result, rounds: Sequence[str]) -> None:
    summary = result.summary
    if "best" in rounds and summary["selected_round"] != summary["best_round"]:
        print_line(
            f"The run keeps the models of round {summary['selected_round']}, selected by '{summary['selected_by']}'; the best "
            f"accuracy was at round {summary['best_round']} (--select test keeps that round)."
        )


def _check_single_run(folder: Path) -> None:
    seeds = sorted(path.parent for path in folder.glob("seed-*/config.toml"))
    if seeds:
        raise GpflError(f"{folder} holds the trials of {pluralize(len(seeds), 'seed')}: choose one of them, such as {seeds[0]}")


def _choose_batches(
    result: Result, clients: Sequence[int], images: int, batch_sizes: Sequence[int], training: Sequence[str], seed: int
) -> dict[int, list[AttackedBatch]]:
    """Return the batches to attack by size. Raise if the steps cannot train on them."""
    engine, net = result.engine, result.engine.method.net
    check_images(result.federation)
    batches = choose_batches(result.federation, clients, images, sorted({net.min_batch, *batch_sizes}), seed)
    if "one" in training:
        check_batch_size(net, min(batch_sizes))
    if "epoch" in training:
        for client in {batch.client for size in batch_sizes for batch in batches[size]}:
            check_can_train(engine, client)
    return batches


def _parse_targets(result: Result, text: str) -> list[str]:
    method = result.engine.method
    targets = list(gradient_targets(method)) if text == "all" else [name.strip() for name in text.split(",")]
    if not targets:
        raise GpflError(
            f"{method.name} has no target: nothing it uploads is the gradient of a net; use --labels or --membership"
        )
    for target in targets:
        select_target(method, target)
    return targets


def _parse_clients(federation: Federation, text: str) -> list[int]:
    """Return the indices of clients; a name takes precedence over an index."""
    if text.strip() == "all":
        return list(range(len(federation)))
    indices = {shard.name: index for index, shard in enumerate(federation.shards)}
    clients = []
    for name in (name.strip() for name in text.split(",")):
        if name in indices:
            clients.append(indices[name])
        elif name.isdigit() and int(name) < len(federation):
            clients.append(int(name))
        else:
            last = len(federation) - 1
            raise GpflError(f"--client is '{text}'; there is no client '{name}': use names, or indices from 0 to {last}")
    return list(dict.fromkeys(clients))
