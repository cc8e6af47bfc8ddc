"""Made-up results of the defence study."""

from __future__ import annotations

from gpfl.experiments.defence_study import DefencePoint, DefenceStudy


def make_point(
    method: str, family: str, value: float, accuracy: float, psnr: float, epsilon: float | None = None
) -> DefencePoint:
    """Return a point of one trial."""
    return DefencePoint(
        *(method, family, "", value, accuracy, 0.0, 1, 1e6, epsilon, epsilon and epsilon / 3, 1e-5 if epsilon else None),
        *(False, "model", psnr, 0.5, 11.0, "leaks", psnr - 0.25),
    )


STUDY = DefenceStudy(
    (
        make_point("gpfl", "", 0, 0.6, 30),
        make_point("gpfl", "noise", 1, 0.4, 12, 10.0),
        make_point("gpfl", "noise", 0.1, 0.5, 20, 300.0),
        make_point("fedavg", "", 0, 0.3, 31),
        make_point("fedavg", "bits", 4, 0.3, 25),
        make_point("fedavg", "noise", 1, 0.1, 9, 10.0),
    ),
    ceiling=30.0,
    ceiling_floor=11.0,
    ceiling_leaks=True,
    images=20,
    rounds=50,
    attacked_round="0",
)
