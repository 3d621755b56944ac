"""Config of the losslessness certificate."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import require


@dataclass(frozen=True, kw_only=True)
class LosslessnessConfig:
    """Size and levels of the certificate. Power grows with the square root of `num_tokens`."""

    num_tokens: int = 20_000  # sampled by each of the two engines, at least
    num_repeated_prompts: int = 4
    num_repeats: int = 512  # draws of the first pair, of each repeated prompt
    num_greedy_prompts: int = 32
    family_level: float = 0.01  # an exact engine fails one certificate in a hundred
    power: float = 0.9  # with which the stated bias would have been detected
    num_replications: int = 40  # of each simulated bias
    max_detectable_bias: float = 0.1  # total variation a token: a certificate that would miss more says nothing
    near_tie_nats: float = 0.25  # greedy decoding may differ where two tokens are this close: two bfloat16 steps at 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_repeated_prompts", "num_repeats", "num_greedy_prompts", "num_replications"):
            value: int = getattr(self, name)
            require(value > 0, f"losslessness.{name}", "must be > 0", value)
        for name in ("family_level", "power", "max_detectable_bias"):
            share: float = getattr(self, name)
            require(0 < share < 1, f"losslessness.{name}", "must lie in (0, 1)", share)
        require(self.near_tie_nats >= 0, "losslessness.near_tie_nats", "must be >= 0", self.near_tie_nats)
