"""The model card of an exported model, with what its run says of data, training, metrics and privacy."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from gpfl.core.metrics import METRICS
from gpfl.data import DATASETS
from gpfl.data.published.dataset import PublishedDataset
from gpfl.data.table import SPLITS
from gpfl.defences.accounting import describe_guarantee
from gpfl.errors import pluralize
from gpfl.federation.federation import MANIFEST, read_manifest
from gpfl.inference.client_model import ClientModel
from gpfl.inference.model_card import card_of_model, describe_export, describe_method, list_limits, model_sections, render_card
from gpfl.io import files, toml
from gpfl.report.tables import Cell, ResultColumn, ResultTable
from gpfl.training.config import read_sections
from gpfl.training.run_dir import RunDir


def find_run(source: Path) -> Path | None:
    """Return the run that a folder of models or a model file belongs to, or None."""
    for folder in (source, *source.resolve().parents[:2]):
        if (folder / "config.toml").is_file() and (folder / "summary.json").is_file():
            return folder
    return None


def model_card(model: ClientModel, source: Path, format: str, command: str) -> str:
    """Return the card of a model in Markdown, with what the run that its source belongs to says of it."""
    run = find_run(source)
    if run is None:
        return card_of_model(model, format, command)
    summary, config = RunDir(run).read_summary(), read_sections(run / "config.toml")
    manifest = read_manifest(run / MANIFEST)
    metrics = files.read_json(run / "metrics.json", "train again") if (run / "metrics.json").is_file() else {}
    clients = {str(each["name"]): each for each in cast(list[Mapping[str, Any]], manifest.get("client", []))}
    client = clients.get(model.name)
    sections = [
        *model_sections(model, format),
        ("Data", _describe_data(model, config, manifest, clients)),
        ("Training", _describe_training(model, config, summary)),
        ("Metrics", _describe_metrics(model, metrics)),
        ("Privacy", _describe_privacy(config, summary)),
        ("Limits", list_limits(model, *((len(client.get(s, [])) for s in ("train", "test")) if client else ()))),
        ("Made by", _describe_origin(config, summary, command)),
    ]
    return render_card(model, format, sections)


def _describe_data(
    model: ClientModel, config: Mapping[str, Any], manifest: Mapping[str, Any], clients: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    table, source = manifest.get("table", {}), manifest.get("source", {})
    name = Path(str(table.get("name", config["data"]["name"]))).name
    dataset = DATASETS.get(name)
    about = f" ({dataset.description})" if dataset else ""
    total = {split: sum(len(each.get(split, [])) for each in clients.values()) for split in SPLITS}
    own = {split: len(clients.get(model.name, {}).get(split, [])) for split in SPLITS}
    facts = {
        "Source": f"{name}{about}, {pluralize(table.get('rows', 0), 'row')}",
        "Licence of the data": (
            dataset.licence if isinstance(dataset, PublishedDataset) else "not recorded; ask the owner of the data"
        ),
        "SHA-256 of the data": f"`{table['sha256']}`" if "sha256" in table else "",
        f"Samples of client {model.name}": _count(own)
        or "none in training; `gpfl personalize` made its model of its own samples",
        f"Samples of all {pluralize(len(clients), 'client')}": _count(total),
        "Clients by column": source.get("client"),
        "Label": source.get("label"),
        "Rows kept together by column": source.get("group"),
        "Split by column": source.get("split_column"),
        "Columns left out": ", ".join(source.get("ignore") or []),
        "Partition and split": _describe_options(config.get("partition", {})),
    }
    return [f"- {name}: {text}" for name, text in facts.items() if text]


def _count(samples: Mapping[str, int]) -> str:
    return ", ".join(f"{n:,} {split}" for split, n in samples.items() if n)


def _describe_options(section: Mapping[str, Any]) -> str:
    name = str(section.get("name", "from a manifest"))
    options = ", ".join(f"{key} = {toml.format_value(value)}" for key, value in section.items() if key not in ("name", "file"))
    return f"{name} ({options})" if options else name


def _describe_training(model: ClientModel, config: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    selection = {
        "validation": "the best on validation samples",
        "test": "the best on test samples, so that its test metrics are too good",
        "last": "the last one",
    }
    selected, by = summary.get("selected_round"), str(summary.get("selected_by"))
    metric = METRICS[str(summary.get("metric", "accuracy"))].label
    return [
        f"- {describe_method(model)}",
        f"- Training: {_describe_options({'name': 'all clients', **config.get('train', {})})}, seed {summary['seed']}",
        f"- Model of round {selected} of {summary['rounds']}: {selection.get(by, by)} ({metric})",
    ]


def _describe_metrics(model: ClientModel, metrics: Mapping[str, Any]) -> list[str]:
    test = metrics.get("test")
    if not isinstance(test, Mapping):
        return ["The run has no metrics of the model."]
    own, overall, over_clients = test["clients"].get(model.name), test["overall"], test["over_clients"]
    level = metrics.get("bootstrap", {}).get("level", 0.95)
    columns: Mapping[ResultColumn, Callable[[str], Cell]] = {
        ResultColumn("metric"): lambda name: METRICS[name].label,
        ResultColumn(f"client {model.name}"): lambda name: _number(name, own[name]) if own else "not measured",
        ResultColumn(f"{level:.0%} interval"): lambda name: _interval(name, own) if own else None,
        ResultColumn("all test samples"): lambda name: _number(name, overall[name]),
        ResultColumn("interval"): lambda name: _interval(name, overall),
        ResultColumn("mean over clients"): lambda name: _number(name, over_clients[name]["mean"]),
        ResultColumn("worst client"): lambda name: _number(name, over_clients[name]["worst"]),
    }
    n_own = f"{pluralize(own['samples'], 'test sample')} of client {model.name}, " if own else ""
    lines = [
        f"On {n_own}{pluralize(overall['samples'], 'test sample')} of all clients. Intervals are percentiles of a bootstrap.",
        ResultTable.from_items(columns, METRICS).to_markdown().strip(),
    ]
    if own and (reasons := own.get("undefined")):
        lines.append("Undefined: " + "; ".join(f"{METRICS[name].label} ({reason})" for name, reason in reasons.items()) + ".")
    decided = metrics.get("thresholds", {}).get("test", {}).get("clients", {}).get(model.name)
    if model.threshold is not None and decided:
        values = ", ".join(f"{METRICS[name].label} {_number(name, value)}" for name, value in decided.items())
        lines.append(f"The table takes the more probable class. With the decision threshold of this model: {values}.")
    if own and 0 < len(classes := own["confusion_matrix"]["classes"]) <= 10:
        headers = [ResultColumn("label"), *(ResultColumn(f"predicted {name}") for name in classes)]
        rows = [[name, *map(str, row)] for name, row in zip(classes, own["confusion_matrix"]["counts"], strict=True)]
        lines.append(ResultTable(headers, rows).to_markdown().strip())
    return lines


def _interval(name: str, metrics: Mapping[str, Any]) -> str | None:
    interval = (metrics.get("intervals") or {}).get(name)
    return None if interval is None else " to ".join(str(_number(name, end)) for end in interval)


def _number(name: str, value: float | None) -> str | None:
    if value is None:
        return None
    return f"{100 * value:.1f} %" if METRICS[name].is_percentage else f"{value:.3f}"


def _describe_privacy(config: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    defence = config.get("defence", {})
    if not defence:
        return ["The run had no defence, so no privacy is claimed: weights and preprocessing can reveal training samples."]
    lines = [f"Defence of the run: {_describe_options({'name': 'options', **defence})}."]
    guarantee = summary.get("privacy")
    if isinstance(guarantee, Mapping) and (described := describe_guarantee(guarantee)):
        scope = "It is about uploads, not about the private part of the model, which leaves the client with this export."
        return [*lines, *described, scope]
    return [*lines, "It adds no noise, so there is no guarantee of differential privacy."]


def _describe_origin(config: Mapping[str, Any], summary: Mapping[str, Any], command: str) -> list[str]:
    # Names of files in place of absolute paths, which say nothing to others.
    shown = {
        section: {
            key: Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
            for key, value in values.items()
        }
        for section, values in config.items()
    }
    return [
        *describe_export(
            command,
            f"Trained with gpfl {summary.get('gpfl', 'of an earlier version')}, torch {summary.get('torch', 'unknown')}. ",
        ),
        "`gpfl run FILE` repeats the run with this config file and the data:",
        f"```toml\n{toml.dump(shown).strip()}\n```",
    ]
