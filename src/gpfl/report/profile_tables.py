"""Tables of a data profile: each column, each column by client, and each client. They fit on 80 characters."""

from collections.abc import Callable, Mapping

import numpy as np

from gpfl.data.columns import ColumnSchema
from gpfl.data.profile import ColumnProfile, DataProfile, ValueSummary
from gpfl.report.tables import Cell, ResultColumn, ResultTable, format_share, format_value, shorten

MANY_CLIENTS = 4  # up to this number of clients each has a column of its own in the table of columns by client
MAX_CLIENT_ROWS = 12  # largest number of clients in the table of clients
MAX_CLASS_COLUMNS = 4
NAME_WIDTH = 14
RANGE_WIDTH = 24
TYPES = {"numeric": "numbers", "categorical": "text", "date": "dates"}
DRIFT_NOTE = (
    "Drift: how far a client's mean is from that of all other clients, in standard deviations; for categories and labels the "
    "total variation distance, from 0 to 1. * Large, and more than chance explains."
)


def profile_tables(profile: DataProfile) -> list[ResultTable]:
    """Return the tables of a profile."""
    by_client = _client_columns if len(profile.clients) <= MANY_CLIENTS else _client_spread
    return [_column_table(profile), by_client(profile), _client_table(profile)]


def _column_table(profile: DataProfile) -> ResultTable:
    def drift(column: ColumnProfile) -> str | None:
        most = column.most_drifting
        return None if most is None else f"{shorten(profile.clients[most], 12)} {_format_drift(column.clients[most], column)}"

    columns: Mapping[ResultColumn, Callable[[ColumnProfile], Cell]] = {
        ResultColumn("column"): lambda each: shorten(each.schema.name, NAME_WIDTH),
        ResultColumn("type", align="left"): lambda each: "label" if each is profile.label else TYPES[each.schema.kind],
        ResultColumn("range or categories", align="left"): _format_range,
        ResultColumn("missing"): lambda each: format_share(each.total.missing_share),
        ResultColumn("largest drift", align="left"): drift,
    }
    return ResultTable.from_items(columns, (*profile.columns, profile.label), "Columns", notes=[DRIFT_NOTE])


def _client_columns(profile: DataProfile) -> ResultTable:
    rows: list[list[Cell]] = [["rows", *(f"{client.rows:,}" for client in profile.label.clients)]]
    for column in (*profile.columns, profile.label):
        rows.append([shorten(column.schema.name, NAME_WIDTH), *(_format_central(each, column) for each in column.clients)])
        if column.schema.kind == "numeric":
            rows.append(["  range", *(f"[{_range_text(client, column.schema, ', ')}]" for client in column.clients)])
        if column.total.missing:
            rows.append(["  missing", *(format_share(client.missing_share) for client in column.clients)])
    columns = [ResultColumn("column"), *(ResultColumn(shorten(name, NAME_WIDTH)) for name in profile.clients)]
    note = "Numbers: mean and range. Dates: mean. Categories, labels: share of the most frequent one of all rows."
    return ResultTable(columns, rows, title="Columns by client", notes=[note])


def _client_spread(profile: DataProfile) -> ResultTable:
    names = [shorten(name, 8) for name in profile.clients]
    rows: list[list[Cell]] = []
    for column in (*profile.columns, profile.label):
        values = [_central_value(client, column) for client in column.clients]
        order = sorted((k for k, value in enumerate(values) if value is not None), key=lambda k: values[k] or 0.0)
        spread: list[Cell] = [None, None, None]
        if order:
            low, middle, high = order[0], order[len(order) // 2], order[-1]
            texts = [_format_central(client, column) for client in column.clients]
            spread = [f"{texts[low]} ({names[low]})", texts[middle], f"{texts[high]} ({names[high]})"]
        worst = max(range(len(names)), key=lambda k: column.clients[k].missing_share)
        missing = column.clients[worst].missing_share
        most_missing = f"{format_share(missing)} ({names[worst]})" if missing else None
        rows.append([shorten(column.schema.name, NAME_WIDTH), *spread, most_missing])
    headers = ("column", "lowest client", "median", "highest client", "most missing")
    note = "Numbers and dates: mean of a client. Categories and labels: share of the most frequent one of all rows."
    return ResultTable([ResultColumn(header) for header in headers], rows, title="Columns by client", notes=[note])


def _client_table(profile: DataProfile) -> ResultTable:
    label, sizes = profile.label, [client.rows for client in profile.label.clients]
    drifts = [_largest_drift(profile, k) for k in range(len(sizes))]
    shown, caption = list(range(len(sizes))), ""
    if len(shown) > MAX_CLIENT_ROWS:
        shown = sorted(shown, key=lambda k: (drifts[k][1].large, abs(drifts[k][1].drift or 0.0)), reverse=True)[
            :MAX_CLIENT_ROWS
        ]
        caption = (
            f"{len(sizes):,} clients with {min(sizes):,} to {max(sizes):,} rows (median {int(np.median(sizes)):,}); "
            f"the {MAX_CLIENT_ROWS} that differ most:"
        )
    classes = label.schema.categories
    few = len(classes) <= MAX_CLASS_COLUMNS
    rows: list[list[Cell]] = []
    for k in shown:
        counts = np.array(label.clients[k].counts)
        shares = [format_share(share) for share in counts / max(counts.sum(), 1)]
        most = int(counts.argmax())
        balance = shares if few else [f"{shorten(classes[most], NAME_WIDTH)} {shares[most]}"]
        missing = float(np.mean([column.clients[k].missing_share for column in profile.columns] or [0.0]))
        column, summary = drifts[k]
        drift = f"{shorten(column.schema.name, 14)} {_format_drift(summary, column)}" if summary.drift else None
        rows.append([shorten(profile.clients[k], NAME_WIDTH), f"{sizes[k]:,}", format_share(missing), *balance, drift])
    headers = ["client", "rows", "missing", *([shorten(name, 10) for name in classes] if few else ["most frequent class"])]
    columns = [*(ResultColumn(header) for header in headers), ResultColumn("largest drift", align="left")]
    return ResultTable(columns, rows, title="Clients", caption=caption)


def _largest_drift(profile: DataProfile, client: int) -> tuple[ColumnProfile, ValueSummary]:
    """Return the column that drifts most at a client; large drifts come first, as numbers and categories have other scales."""
    columns = (*profile.columns, profile.label)
    column = max(columns, key=lambda c: (c.clients[client].large, abs(c.clients[client].drift or 0.0)))
    return column, column.clients[client]


def _format_range(column: ColumnProfile) -> str:
    total, schema = column.total, column.schema
    if not schema.is_categorical:
        return _range_text(total, schema, " to ") or "no values"
    shares = np.array(total.counts) / max(sum(total.counts), 1)
    text = ""
    for place, k in enumerate(np.argsort(-shares, kind="stable")):
        entry = f"{', ' if text else ''}{shorten(schema.categories[k], 9)} {format_share(shares[k])}"
        if len(text) + len(entry) > RANGE_WIDTH - 3 * (place < len(shares) - 1):
            return f"{text}, …"
        text += entry
    return text


def _range_text(summary: ValueSummary, schema: ColumnSchema, between: str) -> str:
    return between.join(_format_number(end, schema) for end in (summary.low, summary.high) if end is not None)


def _central_value(summary: ValueSummary, column: ColumnProfile) -> float | None:
    """Return the mean, or the share of the category that is most frequent at all clients."""
    if not column.schema.is_categorical:
        return summary.mean
    return summary.counts[int(np.argmax(column.total.counts))] / sum(summary.counts) if sum(summary.counts) else None


def _format_central(summary: ValueSummary, column: ColumnProfile) -> str | None:
    value = _central_value(summary, column)
    if value is None or not column.schema.is_categorical:
        return None if value is None else _format_number(value, column.schema)
    return f"{shorten(column.schema.categories[int(np.argmax(column.total.counts))], 9)} {format_share(value)}"


def _format_number(value: float, schema: ColumnSchema) -> str:
    if schema.kind == "date":
        return str(np.datetime64(int(np.floor(value)), "D"))
    for limit, factor, unit in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if limit <= abs(value) < 1e9:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.3g}"


def _format_drift(summary: ValueSummary, column: ColumnProfile) -> str:
    text = format_value(summary.drift or 0.0, ".2f" if column.schema.is_categorical else "+.2f")
    return f"{text}{' *' if summary.large else ''}"
