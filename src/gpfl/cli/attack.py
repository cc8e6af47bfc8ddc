"""The command `gpfl attack`: what a curious server can rebuild or guess from the uploads of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import click
import torch

from gpfl.cli.command import Argument, Command
from gpfl.cli.options import CommaList, option, out_option
from gpfl.cli.terminal import print_line
from gpfl.defences import Defended
from gpfl.engine.distributed import require_single_process
from gpfl.errors import GpflError, pluralize
from gpfl.experiments.privacy_table import json_of
from gpfl.federation.federation import Federation
from gpfl.io import files
from gpfl.privacy import label_inference as label_leakage
from gpfl.privacy import membership as member_inference
from gpfl.privacy.attack import KINDS, AttackConfig, AttackRunner, Case, Kept, ceiling_of
from gpfl.privacy.gradient_targets import gradient_targets
from gpfl.privacy.server_view import view_of
from gpfl.privacy.victims import (
    ROUNDS,
    STEPS,
    Victim,
    choose_victims,
    refuse_idle,
    refuse_other_than_images,
    refuse_small_batch,
    state_at,
)
from gpfl.report import attack_tables as table
from gpfl.report import plotting
from gpfl.report.attack_images import draw_grid
from gpfl.training import api
from gpfl.training.result import Result


@click.command(cls=Command)
@click.argument("run", cls=Argument, metavar="RUN", type=click.Path(path_type=Path), help="Folder of a finished run.")
@option(
    "--kind",
    type=CommaList(str, KINDS),
    help="Attack: dlg (the paper's) or geiping (strong). [default: geiping]",
)
@option("--target", default="all", help="Views of the upload to attack: fe, model, sfe, sm, or all the method has.")
@option("--client", default="all", help="Indices or names of clients, or all.")
@option("--images", default=20, metavar="N", help="Images to reconstruct.")
@option("--batch", default="1", type=CommaList(int, min=1), help="Images in one upload of one step, such as 1 or 1,4.")
@option(
    "--steps",
    default="one",
    type=CommaList(str, STEPS),
    help="A step on these images only, a local epoch, or both.",
)
@option(
    "--round",
    "round_",
    default="0",
    type=CommaList(str, ROUNDS),
    help="Untrained weights, the round the run kept, or both.",
)
@option("--psnr", default="proper", type=click.Choice(table.PSNRS), help="Formula: pixels 0 to 1 with peak 1, or the authors'.")
@click.option("--labels", is_flag=True, help="Infer every client's label distribution.")
@click.option("--membership", is_flag=True, help="Infer from the personal models which samples were trained on.")
@option("--iterations", default=2000, metavar="N", help="Iterations of an attack.")
@option("--restarts", default=2, metavar="N", help="Random starts of an attack; the best gradient match is kept.")
@option("--seed", default=0, metavar="N", help="Seed of victims and starts.")
@click.option("--graph", is_flag=True, help="GPU: run the steps as a captured CUDA graph, which is faster.")
@out_option("Folder for results; finished cases in it are not run again. [default: RUN/attack]")
def attack(
    run: Path,
    kind: list[str] | None,
    target: str,
    client: str,
    images: int,
    batch: list[int],
    steps: list[str],
    round_: list[str],
    psnr: str,
    labels: bool,
    membership: bool,
    iterations: int,
    restarts: int,
    seed: int,
    graph: bool,
    out: str | None,
) -> None:
    """Attack the uploads of a run.

    The attacker is an honest-but-curious server that reconstructs training images. With --labels or --membership it infers
    those, and reconstructs images only if --kind is given too.
    """
    wanted = {"steps": steps, "round": round_, "kind": kind or ["geiping"]}
    effort = AttackConfig(iterations=iterations, restarts=restarts, seed=seed, graph=graph)
    require_single_process("gpfl attack")
    refuse_trials(run)
    result = api.load(run)
    clients = clients_of(result.federation, client)
    targets: list[str] = []
    victims: dict[int, list[Victim]] = {}
    if kind or not (labels or membership):
        targets = targets_of(result, target)
        victims = victims_of(result, clients, images, batch, wanted["steps"], effort)
    if labels:
        label_leakage.sending(result.engine, clients)
    folder = Path(out) if out and out.strip() else run / "attack"
    files.make_folder(folder)  # once nothing is left to refuse
    tell_round(result, wanted["round"])
    tell_graph(graph, result.engine.device)
    if labels:
        report_labels(result, clients, wanted["round"], folder)
    if membership:
        report_membership(result, clients, folder)
    if targets:
        rebuild_images(result, victims, batch, targets, wanted, psnr, effort, folder)


def refuse_trials(folder: Path) -> None:
    """Refuses a folder of several seeds, which is no run itself."""
    seeds = sorted(path.parent for path in folder.glob("seed-*/config.toml"))
    if seeds:
        raise GpflError(f"{folder} holds the trials of {pluralize(len(seeds), 'seed')}: name one of them, such as {seeds[0]}")


def targets_of(result: Result, words: str) -> list[str]:
    """Gives the targets that are named or all, of which the run's method must have some."""
    method = result.engine.method
    targets = list(gradient_targets(method)) if words == "all" else [word.strip() for word in words.split(",")]
    if not targets:
        raise GpflError(
            f"{method.name} has no target: nothing that it sends is the gradient of a net; ask --labels or --membership"
        )
    for target in targets:
        view_of(method, target)
    return targets


def victims_of(
    result: Result, clients: Sequence[int], images: int, batches: Sequence[int], steps: Sequence[str], effort: AttackConfig
) -> dict[int, list[Victim]]:
    """Gives the victims by size of batch; refuses a run that has not the images, and victims that the steps cannot be on."""
    engine = result.engine
    refuse_other_than_images(result.federation)
    victims = choose_victims(result.federation, clients, images, sorted({engine.method.net.min_batch, *batches}), effort.seed)
    if "one" in steps:
        refuse_small_batch(engine.method.net, min(batches))
    if "epoch" in steps:
        for victim in (victim for batch in batches for victim in victims[batch]):
            refuse_idle(engine, victim.client)
    return victims


def rebuild_images(
    result: Result,
    victims: Mapping[int, list[Victim]],
    batches: Sequence[int],
    targets: Sequence[str],
    wanted: dict[str, list[str]],
    psnr: str,
    effort: AttackConfig,
    folder: Path,
) -> None:
    """Attacks, prints and keeps all cases that were asked for."""
    method = result.engine.method
    states = {which: state_at(result, which) for which in wanted["round"]}
    bench = AttackRunner(result.engine, states, victims, effort)
    text, records = [], []
    for kind in wanted["kind"]:
        other, top = ceiling_of(result.engine, victims, kind, effort)
        # A defended fedavg has cases of the same name, each of which would write over the other.
        home = folder / "ceiling" if isinstance(method, Defended) else folder
        ceiling = (top, other.attack([top], home, partial(tell_ceiling, psnr=psnr))[top])
        cases = [
            Case(method.name, target, kind, which, step, batch)
            for target in targets
            for which in wanted["round"]
            for batch in batches
            for step in wanted["steps"]
        ]
        done = bench.attack(cases, folder, partial(tell_case, psnr=psnr))
        title = f"{method.name} on {result.federation.table.name}: what '{kind}' rebuilds from uploads"
        rows = [table.row_of("ceiling (fedavg)", ceiling[1])]
        rows += [
            table.row_of(f"{case.target}, round {case.round},\n{case.steps}, batch {case.batch}", kept)
            for case, kept in done.items()
        ]
        paths = draw_grid(ceiling[1].true, rows, f"{title}; PSNR in dB", folder / f"grid-{kind}")
        text.append(table.markdown(done, ceiling, psnr, title) + plotting.markdown_images(paths))
        records += [record for kept in done.values() for record in kept.records]
        records += [{**record, "ceiling": True} for record in ceiling[1].records]
        for note in table.notes(table.line_of(*ceiling, psnr), psnr, ceiling[1].records):
            print_line(note)
        print_line(f"Picture: {', '.join(str(path) for path in paths)}")
    files.write_text(folder / "table.md", "\n".join(text))
    files.write_text(folder / "results.json", json_of(records))
    print_line(f"Table: {folder / 'table.md'}. Each image: {folder / 'results.json'}")


def report_labels(result: Result, clients: Sequence[int], rounds: Sequence[str], folder: Path) -> None:
    """Prints and keeps the guesses of label distributions."""
    method, records = result.engine.method.name, []
    for which in rounds:
        leaks = label_leakage.label_leaks(result.engine, state_at(result, which), clients)
        print_line(f"Round {which}. {label_leakage.told(leaks, method, len(clients))}")
        records += [{"round": which, **record} for record in label_leakage.records(leaks)]
    files.write_text(folder / "labels.json", json_of(records))
    print_line(f"Each client: {folder / 'labels.json'}")


def report_membership(result: Result, clients: Sequence[int], folder: Path) -> None:
    """Prints and keeps the membership inference on the personal models that the run keeps."""
    found = member_inference.memberships(result.engine, state_at(result, "best"), clients)
    print_line(member_inference.told(found, result.engine.method.name))
    files.write_text(folder / "membership.json", json_of(member_inference.records(found)))
    print_line(f"Each client: {folder / 'membership.json'}")


def tell_round(result: Result, rounds: Sequence[str]) -> None:
    """Prints which round "best" is, where it is not the one with the best accuracy."""
    summary = result.summary
    if "best" in rounds and summary["selected_round"] != summary["best_round"]:
        print_line(
            f"The run keeps round {summary['selected_round']}, selected by '{summary['selected_by']}'; its best accuracy was "
            f"at round {summary['best_round']} (run it with --select test to keep that one)."
        )


def tell_graph(graph: bool, device: torch.device) -> None:
    """Prints that no graph can be captured where there is no GPU."""
    if graph and device.type != "cuda":
        print_line(f"--graph is for a GPU; on {device} attacks run without it.")


def tell_case(case: Case, kept: Kept, psnr: str = "proper") -> None:
    """Prints the outcome of a case, by one of table.PSNRS."""
    line = table.line_of(case, kept, psnr)
    print_line(
        f"{case.words}: {line.psnr:.2f} dB, SSIM {line.ssim:.3f} over {line.images} images "
        f"(start {line.start:.2f}, mean image {line.mean:.2f}): {table.verdict(line)}{turned_words(line)}"
    )


def turned_words(line: table.Line) -> str:
    """Gives what must be said of images that are nearer as their negatives, if any are."""
    return f" (nearer as negatives: {line.turned}; as found {line.psnr_as_found:.2f} dB)" if line.turned else ""


def tell_ceiling(case: Case, kept: Kept, psnr: str = "proper") -> None:
    """Prints the ceiling, by one of table.PSNRS."""
    line = table.line_of(case, kept, psnr)
    print_line(f"ceiling: {case.words}: {line.psnr:.2f} dB, SSIM {line.ssim:.3f} (floor {line.floor:.2f})")


def clients_of(federation: Federation, words: str) -> list[int]:
    """Gives the places of clients that are named, or numbered where no name is meant."""
    if words.strip() == "all":
        return list(range(len(federation)))
    names = {shard.name: place for place, shard in enumerate(federation.shards)}
    found = []
    for word in (word.strip() for word in words.split(",")):
        if word in names:
            found.append(names[word])
        elif word.isdigit() and int(word) < len(federation):
            found.append(int(word))
        else:
            raise GpflError(
                f"--client is '{words}'; there is no client '{word}': give names, or numbers 0 to {len(federation) - 1}"
            )
    return list(dict.fromkeys(found))
