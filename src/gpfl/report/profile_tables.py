"""Tables of a data profile: each column, each column by client, and each client."""

from __future__ import annotations

import numpy as np

from gpfl.data.columns import ColumnSchema
from gpfl.data.profile import ColumnProfile, DataProfile, ValueSummary
from gpfl.report.tables import ResultColumn, ResultTable

MANY_CLIENTS = 4  # up to this number of clients each has a column of its own in the table of columns by client
MAX_CLIENT_ROWS = 12  # largest number of clients in the table of clients
MAX_CLASS_COLUMNS = 4
NAME_WIDTH = 14
RANGE_WIDTH = 24
CELL_WIDTH = 14  # four clients and the name of a column fit on 80 characters
TYPES = {"numeric": "numbers", "categorical": "text", "date": "dates"}
DRIFT_NOTE = (
    "Drift: how far a client's mean is from that of all other clients, in standard deviations; for categories and labels the "
    "total variation distance, from 0 to 1. * Large, and more than chance explains."
)


def profile_tables(profile: DataProfile) -> list[ResultTable]:
    """Return the tables of a profile, which fit on 80 characters."""
    by_client = _client_columns if len(profile.clients) <= MANY_CLIENTS else _client_spread
    return [_column_table(profile), by_client(profile), _client_table(profile)]


def _column_table(profile: DataProfile) -> ResultTable:
    columns = [
        ResultColumn("column"),
        ResultColumn("type", align="left"),
        ResultColumn("range or categories", align="left"),
        ResultColumn("missing"),
        ResultColumn("largest drift", align="left"),
    ]
    rows = []
    for column in (*profile.columns, profile.label):
        kind = "label" if column is profile.label else TYPES[column.schema.kind]
        most = column.most_drifting
        drift = None if most is None else f"{_shorten(profile.clients[most], 12)} {_format_drift(column.clients[most], column)}"
        missing = _percent(column.total.missing_share)
        rows.append([_shorten(column.schema.name), kind, _format_range(column), missing, drift])
    return ResultTable(columns, rows, title="Columns", notes=[DRIFT_NOTE])


def _client_columns(profile: DataProfile) -> ResultTable:
    headers = ["column", *(_shorten(name) for name in profile.clients)]
    rows: list[list[str | None]] = [["rows", *(f"{client.rows:,}" for client in profile.label.clients)]]
    for column in (*profile.columns, profile.label):
        name = _shorten(column.schema.name)
        central = [_central_value(client, column) for client in column.clients]
        values = [None if value is None else _format_central(value, column) for value in central]
        ranges = [_range_text(client, column) for client in column.clients]
        both = [f"{value} {limits}" if value and limits else value for value, limits in zip(values, ranges, strict=True)]
        if all(len(cell or "") <= CELL_WIDTH for cell in both):
            rows.append([name, *both])
        else:
            rows += [[name, *values], ["  range", *ranges]]
        if column.total.missing:
            rows.append(["  missing", *(_percent(client.missing_share) for client in column.clients)])
    return ResultTable(
        [ResultColumn(header) for header in headers],
        rows,
        title="Columns by client",
        notes=["Numbers: mean [lowest, highest]. Dates: mean. Categories, labels: share of the most frequent one of all rows."],
    )


def _client_spread(profile: DataProfile) -> ResultTable:
    """Return a table with the clients at both ends for each column."""
    headers = ("column", "lowest client", "median", "highest client", "most missing")
    rows = []
    for column in (*profile.columns, profile.label):
        values = [_central_value(client, column) for client in column.clients]
        present = [index for index, value in enumerate(values) if value is not None]
        row: list[str | None] = [_shorten(column.schema.name), None, None, None, None]
        if present:
            ordered = sorted(present, key=lambda index: values[index] or 0.0)
            low, middle, high = ordered[0], ordered[len(ordered) // 2], ordered[-1]
            row[1:4] = [
                f"{_format_central(values[low], column)} ({_shorten(profile.clients[low], 8)})",
                _format_central(values[middle], column),
                f"{_format_central(values[high], column)} ({_shorten(profile.clients[high], 8)})",
            ]
        worst = max(range(len(column.clients)), key=lambda index: column.clients[index].missing_share)
        if column.clients[worst].missing:
            row[4] = f"{_percent(column.clients[worst].missing_share)} ({_shorten(profile.clients[worst], 8)})"
        rows.append(row)
    return ResultTable(
        [ResultColumn(header) for header in headers],
        rows,
        title="Columns by client",
        notes=["Numbers and dates: mean of a client. Categories and labels: share of the most frequent one of all rows."],
    )


def _client_table(profile: DataProfile) -> ResultTable:
    label, sizes = profile.label, [client.rows for client in profile.label.clients]
    drifts = [_largest_drift(profile, index) for index in range(len(profile.clients))]
    shown = list(range(len(profile.clients)))
    caption = ""
    if len(shown) > MAX_CLIENT_ROWS:
        shown = sorted(shown, key=lambda index: (not drifts[index][1].large, -abs(drifts[index][1].drift or 0.0)))[
            :MAX_CLIENT_ROWS
        ]
        caption = (
            f"{len(sizes):,} clients with {min(sizes):,} to {max(sizes):,} rows (median {int(np.median(sizes)):,}); "
            f"the {MAX_CLIENT_ROWS} that differ most:"
        )
    classes = label.schema.categories
    few = len(classes) <= MAX_CLASS_COLUMNS
    headers = ["client", "rows", "missing", *([_shorten(name, 10) for name in classes] if few else ["most frequent class"])]
    rows = []
    for index in shown:
        client = label.clients[index]
        cells = sum(column.clients[index].rows for column in profile.columns)
        missing = sum(column.clients[index].missing for column in profile.columns) / cells if cells else 0.0
        total = max(sum(client.counts), 1)
        shares = [_percent(count / total) for count in client.counts]
        most = int(np.argmax(client.counts))
        column, summary = drifts[index]
        drift = f"{_shorten(column.schema.name, 14)} {_format_drift(summary, column)}" if summary.drift else None
        balance = shares if few else [f"{_shorten(classes[most])} {shares[most]}"]
        rows.append([_shorten(profile.clients[index]), f"{client.rows:,}", _percent(missing), *balance, drift])
    columns = [*(ResultColumn(header) for header in headers), ResultColumn("largest drift", align="left")]
    return ResultTable(columns, rows, title="Clients", caption=caption)


def _largest_drift(profile: DataProfile, client: int) -> tuple[ColumnProfile, ValueSummary]:
    """Return the column that drifts most at a client; large drifts come first, as numbers and categories have other scales."""
    columns = (*profile.columns, profile.label)
    column = max(columns, key=lambda c: (c.clients[client].large, abs(c.clients[client].drift or 0.0)))
    return column, column.clients[client]


def _format_range(column: ColumnProfile) -> str:
    total = column.total
    if column.schema.is_categorical:
        present = max(sum(total.counts), 1)
        order = sorted(range(len(total.counts)), key=lambda index: -total.counts[index])
        text = ""
        for place, k in enumerate(order):
            entry = f"{', ' if text else ''}{_shorten(column.schema.categories[k], 9)} {_percent(total.counts[k] / present)}"
            if len(text) + len(entry) > RANGE_WIDTH - 3 * (place < len(order) - 1):
                return f"{text}, …"
            text += entry
        return text
    if total.low is None or total.high is None:
        return "no values"
    return f"{_format_number(total.low, column.schema)} to {_format_number(total.high, column.schema)}"


def _range_text(summary: ValueSummary, column: ColumnProfile) -> str | None:
    if column.schema.kind != "numeric" or summary.low is None or summary.high is None:
        return None
    low, high = (_compact(bound, 0 if abs(bound) >= 10 else 1) for bound in (summary.low, summary.high))
    return f"[{low}, {high}]"


def _central_value(summary: ValueSummary, column: ColumnProfile) -> float | None:
    """Return the mean, or the share of the category that is most frequent at all clients."""
    if not column.schema.is_categorical:
        return summary.mean
    return summary.counts[int(np.argmax(column.total.counts))] / sum(summary.counts) if sum(summary.counts) else None


def _format_central(value: float | None, column: ColumnProfile) -> str:
    if value is None:
        return ""
    if not column.schema.is_categorical:
        return _format_number(value, column.schema)
    return f"{_shorten(column.schema.categories[int(np.argmax(column.total.counts))], 9)} {_percent(value)}"


def _format_number(value: float, schema: ColumnSchema) -> str:
    if schema.kind == "date":
        return str(np.datetime64(int(np.floor(value)), "D"))
    return _compact(value)


def _compact(value: float, decimals: int | None = None) -> str:
    """Return a number with three digits, or rounded; thousands and millions as k and M."""
    for limit, unit in ((1e6, "M"), (1e4, "k")):
        if limit <= abs(value) < 1e9:
            return f"{value / (1e6 if unit == 'M' else 1e3):.3g}{unit}"
    if 1e3 <= abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.3g}" if decimals is None else f"{value:.{decimals}f}".removesuffix(".0")


def _format_drift(summary: ValueSummary, column: ColumnProfile) -> str:
    if summary.drift is None:
        return ""
    text = f"{summary.drift:.2f}" if column.schema.is_categorical else f"{summary.drift:+.2f}"
    return f"{text.replace('-', '−')}{' *' if summary.large else ''}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share in (0, 1) or 0.005 <= share <= 0.995 else "< 1 %" if share < 0.5 else "> 99 %"


def _shorten(text: str, width: int = NAME_WIDTH) -> str:
    """Return a name without its middle if it is too long: names of clients often differ at the end."""
    tail = width // 2
    return text if len(text) <= width else f"{text[: width - tail - 1]}…{text[-tail:]}"
