"""Attack cases on the uploads of a run: select, reconstruct, measure against guesses without an upload, save, summarise."""

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.net import Net
from gpfl.core.options import option, option_values
from gpfl.defences import Defended, undefended
from gpfl.engine import Engine, matmul_precision
from gpfl.engine.base import Loop, RunSpec
from gpfl.federation import Federation
from gpfl.io.tensors import checksum, read_tensors, write_tensors
from gpfl.methods import METHODS
from gpfl.privacy import image_metrics, reconstruction, uploads
from gpfl.privacy.image_metrics import match_images
from gpfl.privacy.reconstruction import ATTACKS, AttackConfig, Reconstruction
from gpfl.privacy.server_view import ServerView
from gpfl.privacy.uploads import ROUNDS, STEPS, AttackedBatch, initial_state, load_images, mean_image, observe_uploads
from gpfl.training.run_dir import RunState

Floats = npt.NDArray[np.float64]

PSNR_FORMULAS = ("proper", "reference")  # peak 1 for pixels from 0 to 1, or the formula of the authors' code
MIN_IMAGES = 6  # fewest images with which a signed-rank test can be significant
_SIGNIFICANCE = 0.05
_VERSION = 4  # version of saved cases; cases of another version are attacked again

Record = dict[str, object]  # the metrics of one reconstructed image by name, as results.json holds them


@dataclass(frozen=True)
class AttackCase:
    """One attack on the uploads of one method."""

    method: str
    target: str
    kind: str  # one of reconstruction.ATTACKS
    round: str  # one of uploads.ROUNDS
    steps: str  # one of uploads.STEPS
    batch: int

    @property
    def training(self) -> str:
        """Length of the local training as text."""
        return "one step" if self.steps == "one" else "one epoch"

    @property
    def setting(self) -> str:
        """Round, local training and batch size as text."""
        return f"{'round 0' if self.round == '0' else 'best round'}, {self.training}, batch {self.batch}"

    @property
    def description(self) -> str:
        """The case as text."""
        return f"{self.method} {self.target}, {self.kind}, {self.setting}"


@dataclass(frozen=True, kw_only=True)
class AttackPlan(AttackConfig):
    """The attacks on each target of a method, and their effort. Commands have a flag for each option."""

    kind: tuple[str, ...] = option(("geiping",), "the paper's dlg, or geiping, which is stronger", choices=ATTACKS)
    batch: tuple[int, ...] = option((1,), "images in one upload, such as 1 or 1,4", min=1)
    steps: tuple[str, ...] = option(("one",), "local training: one step on these images, or an epoch", choices=STEPS)
    round: tuple[str, ...] = option(("0",), "untrained models (0) or those of the selected round (best)", choices=ROUNDS)
    psnr: str = option("proper", "with peak 1 (proper) or by the authors' formula (reference)", choices=PSNR_FORMULAS)
    images: int = option(20, "images to reconstruct", min=1)

    def cases(self, method: str, targets: Iterable[str], kind: str) -> list[AttackCase]:
        """Return the cases of one of the attacks on a method."""
        combinations = itertools.product(targets, self.round, self.batch, self.steps)
        return [AttackCase(method, target, kind, when, steps, batch) for target, when, batch, steps in combinations]

    def choose_batches(self, federation: Federation, net: Net, clients: Sequence[int]) -> dict[int, list[AttackedBatch]]:
        """Return the batches by size; the ceiling uses the smallest. Raise if they cannot be attacked."""
        uploads.check_images(federation)
        batches = uploads.choose_batches(federation, clients, self.images, sorted({net.min_batch, *self.batch}), self.seed)
        if "one" in self.steps:
            uploads.check_batch_size(net, min(self.batch))
        return batches


class CaseResult(NamedTuple):
    """The metrics and images of a case. Images have pixels from 0 to 1, (images, channels, height, width)."""

    records: list[Record]
    true: Tensor
    reconstructed: Tensor  # as negatives where the record says "turned"


OnResult = Callable[[AttackCase, CaseResult], None]


class AttackRunner:
    """Attacks batches of one run. Cases that a folder holds are not attacked again."""

    def __init__(
        self, engine: Engine, states: Mapping[str, RunState], batches: Mapping[int, list[AttackedBatch]], config: AttackConfig
    ) -> None:
        self.engine, self.states, self.batches, self.config = engine, states, batches, config
        cpu = torch.device("cpu")
        self._checksums = {key: checksum(tree.flatten(tree.to(state.shared, cpu)), {}) for key, state in states.items()}
        self._local_rounds: dict[str, dict[int, ServerView]] = {key: {} for key in states}

    def run(
        self, cases: Sequence[AttackCase], folder: Path | None = None, on_result: OnResult = lambda case, result: None
    ) -> dict[AttackCase, CaseResult]:
        """Return the results of all cases; those that differ only in their steps are attacked at once."""
        results: dict[AttackCase, CaseResult] = {}
        for case in cases:
            if case in results:
                continue
            group = [other for other in cases if dataclasses.replace(other, steps=case.steps) == case]
            saved = {each: self.load(each, folder) for each in group}
            missing = [each for each in group if saved[each] is None]
            new = self._attack(missing) if missing else {}
            for each in group:
                result = results[each] = saved[each] or new[each]
                if each in new and folder is not None:
                    images = {"true": result.true, "reconstructed": result.reconstructed}
                    pixels = {name: (values.clamp(0, 1) * 255).round().to(torch.uint8) for name, values in images.items()}
                    metadata = {"settings": self._settings(each), "records": result.records}
                    write_tensors(case_path(folder, each), pixels, metadata)
                on_result(each, result)
        return results

    def _attack(self, cases: Sequence[AttackCase]) -> dict[AttackCase, CaseResult]:
        """Attack cases that differ only in their steps."""
        first = cases[0]
        batches, state, local_rounds = self.batches[first.batch], self.states[first.round], self._local_rounds[first.round]
        true = load_images(self.engine.federation, batches)
        keys = [(batch.samples[0], len(batch.samples)) for _ in cases for batch in batches]
        with matmul_precision("float32"):  # also if the run used another precision
            views = [view for case in cases for view in observe_uploads(self.engine, state, batches, case.steps, local_rounds)]
            start = time.perf_counter()
            reconstructions = reconstruction.reconstruct(views, first.target, first.kind, true.shape[1:], keys, self.config)
        if true.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / len(views)
        results = {}
        for index, case in enumerate(cases):
            span = slice(index * len(batches), (index + 1) * len(batches))
            results[case] = self.measure(case, Reconstruction(*(values[span] for values in reconstructions)), true, seconds)
        return results

    def measure(self, case: AttackCase, reconstructions: Reconstruction, true: Tensor, seconds: float) -> CaseResult:
        """Return the metrics of each true image and the reconstruction assigned to it.

        The reconstruction, the start and the mean image are measured in the same way: as they are, and (either_…) as
        themselves or their negative, whichever is closer.
        """
        truth = true.flatten(0, 1)
        guesses = {
            "": reconstructions.images,
            "start_": torch.sigmoid(reconstructions.initial_logits),
            "mean_": self._mean_image.expand_as(true),
        }
        matched = {name: match_images(true, images) for name, images in guesses.items()}
        matched |= {f"either_{name}": match_images(true, images, either_sign=True) for name, images in guesses.items()}
        metrics = {
            f"{name}{metric.__name__}": metric(truth, guess)
            for name, (guess, _) in matched.items()
            for metric in (image_metrics.psnr, image_metrics.ssim)
        }
        metrics |= {
            "reference_psnr": image_metrics.reference_psnr(truth, matched[""][0]),
            "reference_start": image_metrics.reference_psnr_of_start(truth, reconstructions.initial_logits.flatten(0, 1)),
            "gradient_distance": reconstructions.distances.repeat_interleave(case.batch),
        }
        values = {name: metric.double().cpu().tolist() for name, metric in metrics.items()}
        images, inverted = matched["either_"]
        federation = self.engine.federation
        samples = [(batch.client, sample) for batch in self.batches[case.batch] for sample in batch.samples]
        records: list[Record] = [
            {
                **dataclasses.asdict(case),
                "client": federation.shards[client].name,
                "row": sample,
                "label": int(federation.table.y[sample]),
                **{name: of_images[index] for name, of_images in values.items()},
                "turned": bool(inverted[index]),
                "seconds": seconds,
            }
            for index, (client, sample) in enumerate(samples)
        ]
        return CaseResult(records, truth.cpu(), images.cpu())

    @functools.cached_property
    def _mean_image(self) -> Tensor:
        return mean_image(self.engine.federation)

    def load(self, case: AttackCase, folder: Path | None) -> CaseResult | None:
        """Return the case saved in a folder, or None if there is none with the same settings."""
        path = None if folder is None else case_path(folder, case)
        if path is None or not path.is_file():
            return None
        images, metadata = read_tensors(path)
        if metadata.get("settings") != json.loads(json.dumps(self._settings(case))):
            return None
        true, reconstructed = (images[name].to(torch.float32) / 255 for name in ("true", "reconstructed"))
        return CaseResult(cast(list[Record], metadata["records"]), true, reconstructed)

    def _settings(self, case: AttackCase) -> dict[str, object]:
        """Return all that the result of a case depends on; a saved case with the same settings is reused."""
        method, schedule = self.engine.method, self.engine.schedule
        settings = {"version": _VERSION, **dataclasses.asdict(case)}
        settings |= {name: getattr(self.config, name) for name in ("iterations", "restarts", "seed")}
        settings |= {"sent": self._checksums[case.round], "data": self.engine.federation.table.digest}
        settings |= {"samples": [list(batch.samples) for batch in self.batches[case.batch]]}
        settings |= {"lr": method.lr, "batch_norm": method.batch_norm, "options": option_values(undefended(method))}
        if isinstance(method, Defended):
            settings["defence"] = option_values(method.defence) | {"salt": method.salt, "min_clients": method.min_clients}
        if case.steps == "epoch":
            settings |= {name: getattr(schedule, name) for name in ("batch_size", "shuffle", "drop_last")}
            settings["epochs"] = method.epochs
        return settings


def case_path(folder: Path, case: AttackCase) -> Path:
    """Return the path of a saved case."""
    name = f"{case.method}-{case.target}-{case.kind}-round-{case.round}-{case.steps}-batch-{case.batch}"
    return folder / "cases" / f"{name}.safetensors"


def attack_ceiling(
    engine: Engine,
    batches: Mapping[int, list[AttackedBatch]],
    kind: str,
    config: AttackConfig,
    folder: Path | None = None,
    on_result: OnResult = lambda case, result: None,
) -> tuple[AttackCase, CaseResult]:
    """Attack the case that is easiest to attack: FedAvg's untrained model after one step on the smallest batch.

    It has the run's net, data, seed and learning rate.
    """
    method = engine.method
    fedavg = METHODS["fedavg"]().bind(method.net, lr=method.lr, epochs=method.epochs, batch_norm=method.batch_norm)
    other = Loop(RunSpec(fedavg, engine.federation, engine.schedule, engine.class_counts))
    case = AttackCase("fedavg", "model", kind, "0", "one", min(batches))
    runner = AttackRunner(other, {"0": initial_state(other)}, batches, config)
    return case, runner.run([case], folder, on_result)[case]


def records_to_json(records: Sequence[Mapping[str, object]]) -> str:
    """Return records as JSON, one per line."""
    return "[\n" + ",\n".join(json.dumps(record, allow_nan=False) for record in records) + "\n]\n"


# Summaries: means over images, and the verdict whether the upload leaks.


@dataclass(frozen=True)
class CaseSummary:
    """Means over the images of a case. Each counts as itself or its negative, whichever is closer, except `…_as_found`."""

    case: AttackCase
    images: int
    psnr: float
    std: float
    ssim: float
    start_psnr: float  # of the images that the attack starts from
    mean_psnr: float  # of the dataset's mean image
    leaks: bool
    tested: bool  # by a signed-rank test; with few images only the means are compared
    psnr_as_found: float
    ssim_as_found: float
    inverted: int  # images whose negative is closer

    @property
    def floor(self) -> float:
        """PSNR of the better of the two guesses that need no upload."""
        return max(self.start_psnr, self.mean_psnr)

    @property
    def verdict(self) -> str:
        """Whether the upload leaks, as text."""
        if not self.tested:
            return f"{'above' if self.leaks else 'at'} the floor (too few images to test)"
        if self.leaks:
            return "leaks"
        return "above the floor, not significantly" if self.psnr > self.floor else "at the floor"


def summarize_case(case: AttackCase, result: CaseResult, formula: str = "proper") -> CaseSummary:
    """Return the summary of a case with PSNRs by one of `PSNR_FORMULAS`."""
    keys = ("either_psnr", "either_start_psnr", "either_mean_psnr", "either_ssim", "psnr", "ssim", "turned")
    psnr, start, mean, ssim, as_found, ssim_as_found, inverted = (record_values(result.records, key) for key in keys)
    # Net inputs have four times the squared error of pixels; the formula divides it by 3.
    shift = 10 * np.log10(4 / 3) if formula == "reference" else 0.0
    return CaseSummary(
        case,
        len(result.records),
        psnr=float(psnr.mean() - shift),
        std=float(psnr.std()),
        ssim=float(ssim.mean()),
        start_psnr=float(start.mean() - shift),
        mean_psnr=float(mean.mean() - shift),
        leaks=_exceeds(psnr, np.maximum(start, mean)),
        tested=len(result.records) >= MIN_IMAGES,
        psnr_as_found=float(as_found.mean() - shift),
        ssim_as_found=float(ssim_as_found.mean()),
        inverted=int(inverted.sum()),
    )


def record_values(records: Sequence[Record], key: str) -> Floats:
    """Return the values of a key of all records."""
    return np.array([cast(float, record[key]) for record in records])


def signed_rank_p_value(differences: Floats, alternative: str = "two-sided") -> float | None:
    """Return the p-value of a signed-rank test, or None if there are too few images to test."""
    from scipy.stats import wilcoxon

    if len(differences) < MIN_IMAGES or not np.any(differences):
        return None
    return float(wilcoxon(differences, alternative=alternative).pvalue)


def _exceeds(psnr: Floats, floor: Floats) -> bool:
    """Return whether images are closer to the truth than the floor: by a signed-rank test, for few images by the mean."""
    p_value = signed_rank_p_value(psnr - floor, "greater")
    return bool((psnr - floor).mean() > 0) if p_value is None else p_value < _SIGNIFICANCE
