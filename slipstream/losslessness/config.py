"""Config of the losslessness certificate."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import Checked, Fraction, NonNegativeFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class LosslessnessConfig(Checked, path="losslessness"):
    """Size and levels of the certificate. Power grows with the square root of `num_tokens`."""

    num_tokens: PositiveInt = 20_000  # sampled by each of the two engines, at least
    num_repeated_prompts: PositiveInt = 4
    num_repeats: PositiveInt = 512  # draws of the first pair, of each repeated prompt
    num_greedy_prompts: PositiveInt = 32
    family_level: Fraction = 0.01  # an exact engine fails one certificate in a hundred
    power: Fraction = 0.9  # with which the stated bias would have been detected
    num_replications: PositiveInt = 40  # of each simulated bias
    max_detectable_bias: Fraction = 0.1  # total variation a token: a certificate that would miss more says nothing
    # Greedy decoding may differ where two tokens are this close: two bfloat16 steps at 16.
    near_tie_nats: NonNegativeFloat = 0.25
    seed: int = 0
