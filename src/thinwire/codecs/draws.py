"""Random numbers that depend on nothing but their seed and place, computed on the device that needs them.

torch's generators draw different numbers on each kind of device. Numbers drawn on the CPU would have to be
copied, and a copy makes the host wait for the device in the middle of backward. SplitMix64 (Steele, Lea,
Flood: Fast splittable pseudorandom number generators, 2014) needs only integer operations, which are exact.
Its last round is left out, because it changes the lower bits alone.
"""

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed number
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def random_words(count: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Return random 64-bit numbers, the same on every device.

    Args:
        count: How many.
        device: Where.
        seed: The seed. The first number of seed 0 is 0.

    >>> random_words(3, torch.device("cpu"))
    tensor([                   0, -2447048558797075362,  7960286521582967072])
    """
    start = (seed + (1 << 63)) % (1 << 64) - (1 << 63)  # int64 arithmetic is modulo 2^64 too
    words = torch.arange(count, dtype=torch.int64, device=device).mul_(_GOLDEN).add_(start)
    for shift, factor in _ROUNDS:
        # The shift repeats the sign, which costs one of 64 bits, and a mask would cost one more kernel.
        words.bitwise_xor_(words >> shift).mul_(factor)
    return words


def random_integers(count: int, below: int, device: torch.device, seed: int) -> torch.Tensor:
    """Return random numbers from 0 to `below` - 1, as int64, the same on every device.

    >>> random_integers(5, 10, torch.device("cpu"), seed=1)
    tensor([0, 0, 8, 2, 2])
    """
    # 31 bits, whose remainder is biased by less than one part in a thousand for any block.
    return _upper(random_words(count, device, seed), 31).remainder_(below)


def random_floats(count: int, device: torch.device, seed: int) -> torch.Tensor:
    """Return random numbers from 0 up to 1, as float32, the same on every device.

    >>> random_floats(3, torch.device("cpu"), seed=1)
    tensor([0.3443, 0.1490, 0.7458])
    """
    # 24 bits are exact in float32, and so is their product with a power of two.
    return _upper(random_words(count, device, seed), 24).to(torch.float32).mul_(2.0**-24)


def _upper(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the upper bits, the most random ones, as numbers that are not negative."""
    return (words >> (64 - bits)).bitwise_and_((1 << bits) - 1)
