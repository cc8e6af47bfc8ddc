"""The options of defences: what a client does to its gradients and to its upload before anyone sees them."""

from __future__ import annotations

from dataclasses import dataclass

from gpfl.core.options import option
from gpfl.errors import GpflError

WHOLE = 32
"""Bits of an entry that is sent as it is."""


@dataclass(frozen=True, kw_only=True)
class DefenceConfig:
    """What protects uploads; all of it is off unless it is asked for."""

    clip: float = option(
        0.0, "most length of a client's update (L2, all that is sent); 0 = as long as it is", symbol="C", min=0
    )
    noise: float = option(
        0.0, "client level: noise of the summed updates, as a multiple of C; each client adds its share", symbol="z", min=0
    )
    example_clip: float = option(0.0, "most length of one row's gradient in every local step; 0 = as it is", symbol="S", min=0)
    example_noise: float = option(0.0, "example level: noise of a batch's summed gradients, as a multiple of S", min=0)
    delta: float = option(1e-5, "δ for which ε is stated; below one over the number of those protected", above=0, max=0.5)
    top_k: float = option(1.0, "share of an update's entries that is sent, the largest ones", above=0, max=1)
    bits: int = option(WHOLE, "bits of each entry that is sent; 32 = as it is", min=2, max=WHOLE)
    rounding: str = option(
        "stochastic",
        "to so many bits: up or down by chance, right on average, or to the nearest",
        choices=("stochastic", "nearest"),
    )

    @property
    def on_uploads(self) -> bool:
        """Tells whether uploads are changed."""
        return self.clip > 0 or self.compresses

    @property
    def compresses(self) -> bool:
        """Tells whether uploads are made smaller."""
        return self.top_k < 1 or self.bits < WHOLE

    @property
    def on(self) -> bool:
        """Tells whether there is any defence."""
        return self.on_uploads or self.example_clip > 0

    def check(self) -> None:
        """Refuses what does not fit together."""
        for noise, clip in (("noise", "clip"), ("example_noise", "example_clip")):
            if getattr(self, noise) > 0 and getattr(self, clip) == 0:
                raise GpflError(
                    f"defence.{noise} is {getattr(self, noise):g} and defence.{clip} is 0: noise hides only what has a bound; "
                    f"set --{clip.replace('_', '-')} too"
                )
        if self.noise > 0 and self.compresses:
            raise GpflError(
                f"defence.noise is {self.noise:g} with a compressed upload: the noise of compressed uploads does not add up to "
                "that of a stated ε: leave out --top-k and --bits, or --noise"
            )


NO_DEFENCE = DefenceConfig()
