"""Options of the defences: what a client does to its gradients and to its upload before they leave it."""

from dataclasses import dataclass

from gpfl.core.options import option
from gpfl.errors import GpflError

FULL_BITS = 32  # bits of an entry that is not quantised


@dataclass(frozen=True, kw_only=True)
class DefenceConfig:
    """The defence of a run; everything is off by default."""

    clip: float = option(0.0, "largest L2 norm of a client's update; 0 = no limit", symbol="C", min=0)
    noise: float = option(
        0.0, "client level: noise on the sum of the updates, in multiples of C; each client adds its share", symbol="z", min=0
    )
    example_clip: float = option(
        0.0, "largest L2 norm of one example's gradient in every local step; 0 = no limit", symbol="S", min=0
    )
    example_noise: float = option(0.0, "example level: noise on a batch's summed gradients, in multiples of S", min=0)
    delta: float = option(
        1e-5, "δ of the stated ε; should be below 1 / number of protected clients or examples", above=0, max=0.5
    )
    top_k: float = option(1.0, "fraction of an update's entries to send, the largest ones", above=0, max=1)
    bits: int = option(FULL_BITS, "bits per entry of an update; 32 = no quantisation", min=2, max=FULL_BITS)
    rounding: str = option(
        "stochastic",
        "how to quantise: 'stochastic' (up or down at random, unbiased) or 'nearest'",
        choices=("stochastic", "nearest"),
    )

    @property
    def transforms_uploads(self) -> bool:
        """Whether uploads are clipped, noisy or compressed."""
        return self.clip > 0 or self.compresses

    @property
    def compresses(self) -> bool:
        """Whether uploads get smaller."""
        return self.top_k < 1 or self.bits < FULL_BITS

    @property
    def enabled(self) -> bool:
        """Whether there is any defence."""
        return self.transforms_uploads or self.example_clip > 0

    def validate(self) -> None:
        """Raise if options contradict each other."""
        for noise, clip in (("noise", "clip"), ("example_noise", "example_clip")):
            if getattr(self, noise) > 0 and getattr(self, clip) == 0:
                raise GpflError(
                    f"defence.{noise} is {getattr(self, noise):g} and defence.{clip} is 0: noise needs a bound; "
                    f"set --{clip.replace('_', '-')} too"
                )
        if self.noise > 0 and self.compresses:
            raise GpflError(
                f"defence.noise is {self.noise:g} and the upload is compressed, so the noise would be less than ε "
                "assumes: leave out --top-k and --bits, or --noise"
            )


NO_DEFENCE = DefenceConfig()
