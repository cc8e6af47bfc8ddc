"""The report of `gpfl advise`: a sentence, tables, a figure, one page and one JSON file."""

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import gpfl
from gpfl.core.metrics import METRICS
from gpfl.errors import pluralize
from gpfl.experiments.advice import ALONE, CLEAR, GLOBAL_METHODS, Gain, Verdict
from gpfl.experiments.advise import AdviceResult, MethodCost
from gpfl.experiments.learning_curve import SampleEstimate
from gpfl.models.custom import net_name
from gpfl.report import tables
from gpfl.report.plotting import annotate, figure_style, new_figure, printable
from gpfl.report.tables import Bold, Cell, MetricUnit, ResultColumn, ResultTable, enumerate_names, format_share

AVERAGE = "average"  # name of the row and of the interval of the average

UNCLEAR = {"noise": "cannot tell", "no signal": "no signal", "undefined": "undefined"}
"""Why an answer is unclear, in the table."""

ANSWER_COLORS = {"yes": "#0072b2", "no": "#d55e00", "unclear": "#7f7f7f"}
PROBABILITY_COLORS = {"better": "#0072b2", "same": "#c8c8c8", "worse": "#d55e00"}

MAX_DRAWN = 40  # clients that the figure shows; of more it shows those with the smallest and the largest gains


class AdviceReport:
    """The report on an advice, in the unit of its metric: percent and points, or the metric itself."""

    def __init__(self, result: AdviceResult) -> None:
        self.result, self.advice, self.scores = result, result.advice, result.scores
        self.metric, self.unit = METRICS[self.scores.metric], MetricUnit(self.scores.metric)

    @property
    def title(self) -> str:
        """The data, the number of clients and of repeats."""
        n_clients, repeats = len(self.scores.clients), pluralize(self.scores.n_repeats, "repeat")
        return f"{self.result.config.data}, {pluralize(n_clients, 'client')}, {repeats}"

    @property
    def recommendation(self) -> str:
        """The recommendation in a few words."""
        method = self.advice.method
        return {
            "alone": "stay alone",
            "global": f"train one global model ({method})",
            "personalised": f"federate with {method}, which gives every client a model of its own",
            "unclear": "these data are inconclusive",
        }[self.advice.choice]

    @property
    def reason(self) -> str:
        """Why, as a clause."""
        average, rope = self.advice.average, self._amount(self.result.rope)
        if average.gain is None:
            return f"{self.metric.label} is undefined in too many repeats"
        unit = " points" if self.metric.is_percentage else ""
        change = (
            f"joining changes {self.metric.label} by {self.unit.difference(average.gain.mean)}{unit} on average (95 % interval "
            f"{self._interval(average.gain)})"
        )
        if average.reason == "no signal":
            return f"no model is clearly better than always predicting the class frequencies, and {change}"
        text = f"{change} and gains more than {rope} with a probability of {format_share(average.gain.better)}"
        if average.reason == "noise":
            return f"{text}; {self.describe_more(average)}"
        versus = self.advice.personal_gain
        if versus is not None and self.advice.choice in ("global", "personalised"):
            also = f"gain more than {rope} over one global model with a probability of {format_share(versus.better)}"
            text += f", and personalised models {also}"
        return text

    @property
    def exceptions(self) -> str:
        """The clause on clients with a clear answer that differs from the recommendation; "" if there is none."""
        texts = {"yes": "joining is clearly better for", "no": "joining is clearly not better for"}
        names = {answer: [each.name for each in self.advice.exceptions if each.answer == answer] for answer in texts}
        return ", and ".join(f"{texts[answer]} {enumerate_names(clients)}" for answer, clients in names.items() if clients)

    @property
    def sentence(self) -> str:
        """Recommendation, reason and exceptions in one sentence."""
        but = f"; but {self.exceptions}" if self.exceptions else ""
        if self.advice.choice == "unclear":
            return f"These data are inconclusive: {self.reason}{but}."
        return f"Recommendation: {self.recommendation}, since {self.reason}{but}."

    @property
    def notes(self) -> list[str]:
        """Sentences on what to distrust in this advice."""
        notes = [f"{name} diverged in a repeat and is left out: {text}." for name, text in self.result.diverged.items()]
        late = [
            name
            for name, cost in self.result.costs.items()
            if name in (ALONE, self.advice.method, *self.advice.average.methods) and cost.selected_round > 0.9 * cost.rounds
        ]
        if late:
            notes.append(
                f"The best round of {enumerate_names(late)} is among the last ones: longer training may change the answer "
                f"(--rounds {2 * self.result.config.train.rounds})."
            )
        few = [name for name, enough in zip(self.scores.clients, self.scores.has_enough_repeats, strict=True) if not enough]
        if few:
            notes.append(
                f"{self._label} is undefined in most repeats for {enumerate_names(few)}, whose test samples often have one "
                "class: left out of the average."
            )
        return notes

    def describe_more(self, verdict: Verdict) -> str:
        """Return the sentence on how many samples would make an answer clear."""
        more = verdict.more_samples
        if more is None:
            why = f" ({self.result.no_curves})" if self.result.curves is None else ""
            return f"how many more samples would make it clear cannot be estimated{why}"
        count, low, high = _extra_samples(verdict.n_samples, more)
        return (
            f"about {count} more samples, {more.factor:.1f} times as many at every client, are expected to make it clear "
            f"({low} to {high} more in the middle half of resamples)"
        )

    def client_table(self, max_clients: int | None = None) -> ResultTable:
        """Return the table of clients and their average; of more than `max_clients` those with extreme gains."""
        columns: Mapping[ResultColumn, Callable[[Verdict], Cell]] = {
            ResultColumn("client"): lambda each: each.name or Bold(AVERAGE),
            ResultColumn("samples", "d", hide=2): lambda each: each.n_samples,
            ResultColumn(f"alone{self.unit.suffix}", self.unit.spec, hide=3): lambda each: self._score(each.alone),
            ResultColumn(f"joining{self.unit.suffix}", self.unit.spec, hide=3): lambda each: self._score(each.joined),
            ResultColumn(f"gain{self.unit.points}", f"+{self.unit.spec}"): lambda each: (
                self.unit.scale * each.gain.mean if each.gain else None
            ),
            ResultColumn("95 % interval"): lambda each: self._interval(each.gain) if each.gain else None,
            ResultColumn("probability\nof a gain"): lambda each: format_share(each.gain.better) if each.gain else None,
            ResultColumn("of no\ndifference", hide=4): lambda each: format_share(each.gain.same) if each.gain else None,
            ResultColumn("join?"): lambda each: Bold(UNCLEAR.get(each.reason, each.answer)),
            ResultColumn("best methods\nwithin noise", hide=5): self._methods_cell,
            ResultColumn("more samples for\na clear answer", hide=1): self._more_cell,
        }
        clients = self._extremes(max_clients) if max_clients else self.advice.clients
        notes = [
            f"Gain: {self.metric.label} of joining minus that of staying alone on test samples, mean over repeats"
            f"{', so that a lower ' + self.metric.label + ' is a gain' if self.metric.lower_is_better else ''}. A gain or loss "
            f"counts if it is larger than {self._amount(self.result.rope)} (--rope), otherwise there is no difference. "
            "Joining: with the method that is best on the validation samples of a repeat. No signal: no model is clearly "
            "better than always predicting the class frequencies, so that gains mean nothing. All clients "
            "have the same weight in the average."
        ]
        if len(clients) < len(self.advice.clients):
            notes.append(f"Of {len(self.advice.clients)} clients those with the smallest and the largest gains.")
        return ResultTable.from_items(
            columns, [*clients, self.advice.average], "Is joining better than staying alone?", notes=notes
        )

    def cost_table(self) -> ResultTable:
        """Return the table of costs of the methods."""
        chosen = self.advice.chosen
        columns: Mapping[ResultColumn, Callable[[tuple[str, MethodCost]], Cell]] = {
            ResultColumn("method"): lambda item: Bold(item[0]) if item[0] == self.advice.method else item[0],
            ResultColumn(f"{self.metric.label}{self.unit.suffix}", self.unit.spec): lambda item: self._score(
                self.result.mean_score(item[0])
            ),
            ResultColumn("chosen\nin", hide=2): lambda item: str(chosen[item[0]]) if item[0] in chosen else None,
            ResultColumn("rounds", ".0f"): lambda item: item[1].rounds,
            ResultColumn("best\nround", ".0f", hide=1): lambda item: item[1].selected_round,
            ResultColumn("sent by\na client"): lambda item: _format_cost(item[1].bytes_up),
            ResultColumn("received by\na client"): lambda item: _format_cost(item[1].bytes_down),
            ResultColumn("seconds", ".1f", hide=1): lambda item: item[1].seconds,
        }
        notes = [
            f"{self._label}: mean over clients and repeats, on test samples. Chosen in: repeats in which the method is best on "
            "validation samples. Bytes: in all rounds of one training. Seconds: to simulate all clients on this machine."
        ]
        if self.result.costs[ALONE].bytes_up:
            notes.append(
                "Staying alone sends statistics of columns only, of which it uses the categories; numbers are filled and "
                "scaled by the client's own."
            )
        return ResultTable.from_items(columns, self.result.costs.items(), "What do the methods cost?", notes=notes)

    @figure_style()
    def figure(self) -> str:
        """Return the figure of gains and probabilities as SVG."""
        verdicts = [each for each in (*self._extremes(MAX_DRAWN), self.advice.average) if each.gain is not None]
        rows = len(verdicts)
        figure = new_figure(8.2, 1.3 + 0.32 * max(rows, 2))
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
        scale = self.unit.scale
        rope = scale * self.result.rope
        left.axvspan(-rope, rope, color="#e8e8e8", lw=0)
        left.axvline(0, color="#444444", lw=0.8)
        for k, verdict in enumerate(verdicts):
            gain = verdict.gain
            assert gain is not None
            color, y = ANSWER_COLORS[verdict.answer], rows - 1 - k
            left.plot([scale * gain.low, scale * gain.high], [y, y], color=color, lw=3, solid_capstyle="butt")
            left.plot(scale * gain.mean, y, "o", color=color, ms=6.5, mec="white", mew=1.0)
            start = 0.0
            for name, share in (("better", gain.better), ("same", gain.same), ("worse", gain.worse)):
                right.barh(y, 100 * share, 0.6, left=start, color=PROBABILITY_COLORS[name], lw=0)
                if share >= 0.12:
                    dark = name == "same"
                    text = f"{100 * share:.0f} %"
                    right.text(
                        start + 50 * share, y, text, ha="center", va="center", color="black" if dark else "white", size=8
                    )
                start += 100 * share
        left.set_yticks(range(rows), [printable(each.name, 24) or AVERAGE for each in reversed(verdicts)])
        if verdicts and not verdicts[-1].name:
            left.get_yticklabels()[0].set_fontweight("bold")
        left.set_ylim(-0.6, rows - 0.4)
        left.set_xlabel(f"gain in {self.metric.label}{self.unit.points}: mean and 95 % interval")
        right.set(xlim=(0, 100), xlabel="probability, %")
        for axes in (left, right):
            axes.grid(axis="y", visible=False)
            axes.tick_params(axis="y", length=0)
        right.grid(visible=False)
        annotate(figure)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
        text = content.getvalue()
        return text[text.index("<svg") :]

    def render_html(self, command: str) -> str:
        """Return the page: self-contained HTML."""
        result, config = self.result, self.result.config
        return tables.render(
            "advice.html",
            report=self,
            result=result,
            config=config,
            command=command,
            net=net_name(config.net) if config.net else "custom",
            version=gpfl.__version__,
            choice=self.advice.choice,
            tables=[self.client_table(), self.cost_table()],
            figure=self.figure() if any(each.gain for each in (*self.advice.clients, self.advice.average)) else "",
            clear=format_share(CLEAR),
            unclear=format_share(1 - CLEAR),
            rope=self._amount(result.rope),
            metric=self.metric.label,
            n_repeats=self.scores.n_repeats,
            test_ratio=float(self.scores.n_test.sum() / (self.scores.n_samples - self.scores.n_test).sum()),
            methods=[name for name in result.costs if name not in (ALONE, *GLOBAL_METHODS)],
            global_methods=[name for name in result.costs if name in GLOBAL_METHODS],
        )

    def save(self, folder: Path, command: str) -> list[Path]:
        """Write advice.html and advice.json and return the paths."""
        content = {"sentence": self.sentence, "notes": self.notes, "command": command, **self.result.to_dict()}
        texts = {"advice.html": self.render_html(command), "advice.json": json.dumps(content, indent=2, allow_nan=False) + "\n"}
        return tables.write_texts(folder, texts)

    @property
    def _label(self) -> str:
        return self.metric.label[:1].upper() + self.metric.label[1:]

    def _amount(self, value: float) -> str:
        number = self.unit.scale * value
        return f"{number:g} {'point' if number == 1 else 'points'}" if self.metric.is_percentage else f"{number:g}"

    def _score(self, value: float) -> float | None:
        return None if math.isnan(value) else self.metric.sign * self.unit.scale * value

    def _interval(self, gain: Gain) -> str:
        return self.unit.interval(gain.low, gain.high)

    def _more_cell(self, verdict: Verdict) -> str | None:
        if verdict.reason != "noise":
            return None
        more = verdict.more_samples
        if more is None:
            return "cannot tell"
        count, low, high = _extra_samples(verdict.n_samples, more)
        return f"{count} ({low} to {high})"

    def _methods_cell(self, verdict: Verdict) -> str | None:
        excluded = [name for name in self.result.costs if name not in verdict.methods]
        if not excluded:
            return "any"
        if verdict.methods and len(excluded) <= 2 < len(verdict.methods):
            return f"all but {', '.join(excluded)}"
        return ", ".join(verdict.methods) or None

    def _extremes(self, count: int) -> Sequence[Verdict]:
        """Return the clients, or those with the smallest and the largest gains if there are more than `count`."""
        clients = self.advice.clients
        if len(clients) <= count:
            return clients
        ordered = sorted((each for each in clients if each.gain), key=lambda each: each.gain.mean if each.gain else 0.0)
        return [*ordered[: count // 2], *ordered[len(ordered) - count // 2 :]] if len(ordered) > count else ordered


def _format_cost(n_bytes: float) -> str:
    return tables.format_bytes(n_bytes) if n_bytes else "nothing"


def _extra_samples(n_samples: int, estimate: SampleEstimate) -> list[str]:
    """Return the additional samples that an estimate means, and the ends of its range, with two significant digits."""
    return [f"{float(f'{(factor - 1) * n_samples:.2g}'):,.0f}" for factor in (estimate.factor, estimate.low, estimate.high)]
