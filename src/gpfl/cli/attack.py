"""The command `gpfl attack`: what a curious server can reconstruct or infer from the uploads of a run."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click
import torch

from gpfl.cli.command import Command
from gpfl.cli.options import attack_options, option, out_option, parse_options, run_argument
from gpfl.cli.terminal import print_line
from gpfl.core import options as core_options
from gpfl.defences import Defended
from gpfl.engine.distributed import require_single_process
from gpfl.errors import GpflError, pluralize
from gpfl.federation import Federation
from gpfl.io import files
from gpfl.privacy import attack_runner
from gpfl.privacy.attack_runner import AttackPlan, AttackRunner, Record, records_to_json
from gpfl.privacy.gradient_targets import gradient_targets, select_target
from gpfl.privacy.label_inference import infer_label_distributions, uploading_clients
from gpfl.privacy.membership import infer_memberships
from gpfl.privacy.uploads import AttackedBatch, check_can_train, state_at
from gpfl.report.privacy_figures import ImageRow, draw_grid
from gpfl.report.privacy_tables import attack_table, describe_label_inference, describe_membership_inference, describe_summary
from gpfl.report.tables import markdown_images, render_page, write_texts
from gpfl.training.execute import load
from gpfl.training.result import Result


@click.command(cls=Command)
@run_argument
@option("--target", default="all", metavar="NAME,…", help="Gradients to match: fe, model, sfe, sm, or all of the method.")
@option("--client", default="all", metavar="NAME,…", help="Names or indices of clients, or all.")
@click.option("--labels", is_flag=True, help="Infer the label distribution of each client.")
@click.option("--membership", is_flag=True, help="Infer from each personal model which samples it was trained on.")
@out_option("Folder for results; cases that it holds are not attacked again.  [default: RUN/attack]")
@attack_options(AttackPlan(), seed_flag="--seed")
def attack(run: Path, target: str, client: str, labels: bool, membership: bool, out: Path | None, **flags: object) -> None:
    """Attack the uploads of a run.

    The attacker is an honest-but-curious server that reconstructs training images. With --labels or --membership it infers
    those, and reconstructs images only if --kind is given too.
    """
    require_single_process("gpfl attack")
    plan = parse_attack(AttackPlan(), flags)
    if seeds := sorted(path.parent for path in run.glob("seed-*/config.toml")):
        raise GpflError(f"{run} holds the trials of {pluralize(len(seeds), 'seed')}: choose one of them, such as {seeds[0]}")
    result = load(run)
    clients = _parse_clients(result.federation, client)
    targets: list[str] = []
    batches: dict[int, list[AttackedBatch]] = {}
    if flags["attack__kind"] or not (labels or membership):
        targets = _parse_targets(result, target)
        batches = plan.choose_batches(result.federation, result.engine.method.net, clients)
        if "epoch" in plan.steps:
            for index in {batch.client for size in plan.batch for batch in batches[size]}:
                check_can_train(result.engine, index)
    if labels:
        uploading_clients(result.engine, clients)
    folder = out or run / "attack"
    files.make_folder(folder)  # after all checks
    _print_selected_round(result, plan)
    print_graph_note(plan.graph, result.engine.device)
    if labels:
        _infer_labels(result, clients, plan.round, folder)
    if membership:
        members = infer_memberships(result.engine, state_at(result, "best"), clients)
        print_line(describe_membership_inference(members, result.engine.method.name))
        _write_records(folder / "membership.json", [asdict(each) for each in members])
    if targets:
        _reconstruct_images(result, targets, batches, plan, folder)


def parse_attack(defaults: AttackPlan, flags: Mapping[str, object]) -> AttackPlan:
    """Return the attacks that the flags of `attack_options` describe."""
    return core_options.replace(defaults, parse_options(flags).get("attack", {}), "attack")


def print_case(case: attack_runner.AttackCase, result: attack_runner.CaseResult, formula: str, prefix: str = "") -> None:
    """Print the outcome of a case."""
    print_line(prefix + describe_summary(attack_runner.summarize_case(case, result, formula)))


def print_graph_note(graph: bool, device: torch.device) -> None:
    """Print that --graph has no effect without a GPU."""
    if graph and device.type != "cuda":
        print_line(f"--graph is for a GPU; on {device} attacks run without it.")


def _reconstruct_images(
    result: Result, targets: Sequence[str], batches: Mapping[int, list[AttackedBatch]], plan: AttackPlan, folder: Path
) -> None:
    method = result.engine.method
    runner = AttackRunner(result.engine, {round_: state_at(result, round_) for round_ in plan.round}, batches, plan)
    on_result = functools.partial(print_case, formula=plan.psnr)
    print_ceiling = functools.partial(on_result, prefix="ceiling: ")
    # A defended fedavg has a case of the same name.
    ceiling_folder = folder / "ceiling" if isinstance(method, Defended) else folder
    tables, grids = [], []
    records: list[Record] = []
    for kind in plan.kind:
        ceiling = attack_runner.attack_ceiling(result.engine, batches, kind, plan, ceiling_folder, print_ceiling)
        results = runner.run(plan.cases(method.name, targets, kind), folder, on_result)
        title = f"{method.name} on {result.federation.table.name}: images that {kind} reconstructs from uploads"
        table = attack_table(results, ceiling, plan.psnr, title)
        rows = [ImageRow.of_case("ceiling (fedavg)", ceiling[1])]
        for case, each in results.items():
            rows.append(ImageRow.of_case(f"{case.target}, round {case.round},\n{case.steps}, batch {case.batch}", each))
        paths = draw_grid(ceiling[1].true, rows, f"{title}; PSNR in dB", folder / f"grid-{kind}")
        grids += paths
        tables.append(table)
        records += [record for each in results.values() for record in each.records]
        records += [{**record, "ceiling": True} for record in ceiling[1].records]
        print_line("\n".join([*table.notes, f"Images: {', '.join(map(str, paths))}"]))
    page = render_page("Attacks on uploads", tables) + markdown_images(grids)
    saved, images = write_texts(folder, {"table.md": page, "results.json": records_to_json(records)})
    print_line(f"Table: {saved}. Each image: {images}")


def _infer_labels(result: Result, clients: Sequence[int], rounds: Sequence[str], folder: Path) -> None:
    records: list[Record] = []
    for round_ in rounds:
        labels = infer_label_distributions(result.engine, state_at(result, round_), clients)
        print_line(f"Round {round_}. {describe_label_inference(labels, result.engine.method.name, len(clients))}")
        records += [{"round": round_, **asdict(each)} for each in labels]
    _write_records(folder / "labels.json", records)


def _write_records(path: Path, records: Sequence[Record]) -> None:
    files.write_text(path, records_to_json(records))
    print_line(f"Each client: {path}")


def _print_selected_round(result: Result, plan: AttackPlan) -> None:
    summary = result.summary
    if "best" in plan.round and summary["selected_round"] != summary["best_round"]:
        print_line(
            f"The run keeps the models of round {summary['selected_round']}, selected by '{summary['selected_by']}'; the best "
            f"accuracy was at round {summary['best_round']} (--select test keeps that round)."
        )


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
    indices = {str(index): index for index in range(len(federation))}
    indices |= {shard.name: index for index, shard in enumerate(federation.shards)}
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in indices:
            last = len(federation) - 1
            raise GpflError(f"--client is '{text}'; there is no client '{name}': use names, or indices from 0 to {last}")
    return list(dict.fromkeys(indices[name] for name in names))
