"""Config of the losslessness certificate."""

from __future__ import annotations

from slipstream.config import Checked, Fraction, NonNegativeFloat, PositiveInt, Seed


class LosslessnessConfig(Checked, path="losslessness"):
    """Size and levels of the certificate. Power grows with the square root of `num_tokens`."""

    num_tokens: PositiveInt = 20_000
    """Tokens of long responses that are judged of each arm's engines; the last response is judged as a whole."""
    num_repeated_prompts: PositiveInt = 4
    """Prompts whose first pair of tokens is sampled many times. Set it for a test over more prompts."""
    num_repeats: PositiveInt = 512
    """Samples of the first pair of tokens of each repeated prompt. Set it for more power."""
    num_greedy_prompts: PositiveInt = 32
    """Prompts that both engines also answer greedily. Set it for a longer comparison."""
    family_level: Fraction = 0.01
    """Chance that an exact engine fails a certificate. Set it lower where many certificates are made."""
    power: Fraction = 0.9
    """Chance of detecting the bias that a certificate states. Set it for a stricter statement."""
    num_replications: PositiveInt = 40
    """Simulations of each bias that the power is computed from. Set it for a finer estimate."""
    max_detectable_bias: Fraction = 0.1
    """Total variation a token; a certificate that would miss more gives no verdict. Set it for a stricter one."""
    near_tie_nats: NonNegativeFloat = 0.25
    """Gap in nats below which greedy decoding may choose either token. Set it lower for float32 engines."""
    seed: Seed = 0
    """Seed of the certificate's samples. Set it for another sample."""
