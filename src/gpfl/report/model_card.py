"""The model card of an exported model, with what its run says of data, training, metrics and privacy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from gpfl.core.metrics import METRICS
from gpfl.data import DATASETS
from gpfl.data.published.dataset import PublishedDataset
from gpfl.defences.accounting import describe_guarantee
from gpfl.errors import pluralize
from gpfl.federation.manifest import MANIFEST, read_manifest
from gpfl.inference.client_model import ClientModel
from gpfl.inference.model_card import card_of_model, describe_export, describe_method, list_limits, model_sections, render_card
from gpfl.io import files, toml
from gpfl.report.tables import ResultColumn, ResultTable
from gpfl.training.config import read_sections
from gpfl.training.run_dir import RunDir

SPLITS = ("train", "validation", "test")


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
    licence = dataset.licence if isinstance(dataset, PublishedDataset) else "not recorded; ask the owner of the data"
    total = {split: sum(len(each.get(split, [])) for each in clients.values()) for split in SPLITS}
    lines = [
        f"- Source: {name}" + (f" ({dataset.description})" if dataset else "") + f", {pluralize(table.get('rows', 0), 'row')}"
    ]
    lines += [f"- Licence of the data: {licence}", f"- SHA-256 of the data: `{table['sha256']}`" if "sha256" in table else ""]
    if client := clients.get(model.name):
        lines.append(f"- Samples of client {model.name}: {_count(client)}")
    else:
        lines.append(f"- Client {model.name} was not in training; `gpfl personalize` made its model of its own samples")
    lines.append(
        f"- Samples of all {pluralize(len(clients), 'client')}: {', '.join(f'{total[s]:,} {s}' for s in SPLITS if total[s])}"
    )
    roles = {
        "client": "clients by column",
        "label": "label",
        "group": "rows kept together by column",
        "split_column": "split by column",
    }
    lines += [f"- {text.capitalize()}: {source[key]}" for key, text in roles.items() if source.get(key)]
    if source.get("ignore"):
        lines.append(f"- Columns left out: {', '.join(source['ignore'])}")
    partition = config.get("partition", {})
    lines.append(f"- Partition and split: {_describe_options(partition)}")
    return [line for line in lines if line]


def _count(client: Mapping[str, Any]) -> str:
    return ", ".join(f"{len(client[split]):,} {split}" for split in SPLITS if client.get(split))


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
    client_metrics, overall, over_clients = test["clients"].get(model.name), test["overall"], test["over_clients"]
    level = metrics.get("bootstrap", {}).get("level", 0.95)
    columns = [ResultColumn("metric"), ResultColumn(f"client {model.name}"), ResultColumn(f"{level:.0%} interval")]
    columns += [
        ResultColumn("all test samples"),
        ResultColumn("interval"),
        ResultColumn("mean over clients"),
        ResultColumn("worst client"),
    ]
    rows = [
        [
            metric.label,
            *(_cells(client_metrics, name) if client_metrics else ["not measured", None]),
            *_cells(overall, name),
            _number(name, over_clients[name]["mean"]),
            _number(name, over_clients[name]["worst"]),
        ]
        for name, metric in METRICS.items()
    ]
    n_own = f"{pluralize(client_metrics['samples'], 'test sample')} of client {model.name}, " if client_metrics else ""
    lines = [
        f"On {n_own}{pluralize(overall['samples'], 'test sample')} of all clients. Intervals are percentiles of a bootstrap."
    ]
    lines.append(ResultTable(columns, rows).to_markdown().strip())
    if client_metrics and (reasons := client_metrics.get("undefined")):
        lines.append("Undefined: " + "; ".join(f"{METRICS[name].label} ({reason})" for name, reason in reasons.items()) + ".")
    lines += _describe_decisions(model, metrics, client_metrics)
    return lines


def _describe_decisions(model: ClientModel, metrics: Mapping[str, Any], client_metrics: Mapping[str, Any] | None) -> list[str]:
    lines = []
    decided = metrics.get("thresholds", {}).get("test", {}).get("clients", {}).get(model.name)
    if model.threshold is not None and decided:
        values = ", ".join(f"{METRICS[name].label} {_number(name, value)}" for name, value in decided.items())
        lines.append(f"The table takes the more probable class. With the decision threshold of this model: {values}.")
    if client_metrics and 0 < len(client_metrics["confusion_matrix"]["classes"]) <= 10:
        classes, counts = client_metrics["confusion_matrix"]["classes"], client_metrics["confusion_matrix"]["counts"]
        columns = [ResultColumn("label"), *(ResultColumn(f"predicted {name}") for name in classes)]
        rows = [[name, *map(str, row)] for name, row in zip(classes, counts, strict=True)]
        lines.append(ResultTable(columns, rows).to_markdown().strip())
    return lines


def _cells(metrics: Mapping[str, Any], name: str) -> list[str | None]:
    interval = (metrics.get("intervals") or {}).get(name)
    ends = None if interval is None else " to ".join(str(_number(name, end)) for end in interval)
    return [_number(name, metrics[name]), ends]


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
        scope = (
            "It is about uploads. It does not cover the private part of the model, which leaves the client with this export."
        )
        return [*lines, *described, scope]
    return [*lines, "It adds no noise, so there is no guarantee of differential privacy."]


def _describe_origin(config: Mapping[str, Any], summary: Mapping[str, Any], command: str) -> list[str]:
    trained = f"Trained with gpfl {summary.get('gpfl', 'of an earlier version')}, torch {summary.get('torch', 'unknown')}. "
    shown = {section: _without_paths(values) for section, values in config.items()}
    repeat = [
        "`gpfl run FILE` repeats the run with this config file and the data:",
        f"```toml\n{toml.dump(shown).strip()}\n```",
    ]
    return [*describe_export(command, trained), *repeat]


def _without_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section with the names of files in place of absolute paths, which say nothing to others."""
    return {
        key: Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
        for key, value in values.items()
    }
