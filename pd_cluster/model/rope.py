"""Rotary position embedding: angles of a position, with the stretched frequencies of long-context models.

YaRN is Peng et al. 2023 (arXiv 2309.00071), section 3; the llama3 form is that of the Llama 3.1 release. A rotated
head lies in halves (the rotated first members of all pairs, then the second members), whichever way its pairs came:
queries and keys agree, and the cached keys of every engine do.
"""

# T tokens, H heads, D head dim, R half of the rotary dim

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pd_cluster.model.config import RopeConfig
from pd_cluster.model.hf_config import yarn_mscale


class Angles(NamedTuple):
    """Cosines and sines of one step's positions, float32 [T, 1, R]."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """Radians per position of each pair, float32 [R]."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim
    plain = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3(config, plain)
    if config.kind == "yarn":
        return _yarn(config, plain)
    return plain


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    turns = config.original_max_position * plain / (2 * math.pi)
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / config.factor + blend * plain


def _yarn(config: RopeConfig, plain: Tensor) -> Tensor:
    """Pairs that turn more than `beta_fast` times in the trained context are kept, below `beta_slow` stretched, a
    ramp between.
    """

    def pair_that_turns(times: float) -> float:
        waves = config.original_max_position / (times * 2 * math.pi)
        return config.dim * math.log(waves) / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / config.factor * stretched + plain * (1 - stretched)


def amplitude(config: RopeConfig) -> float:
    """What cosines and sines are multiplied by: YaRN's attention factor, 1 for every other kind."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    return yarn_mscale(config.factor, 1.0)


class Rope:
    """The rotation of one model: `angles` once a step, `rotate` in every layer."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.interleaved = config.interleaved
        self.dim = config.dim
        self._frequencies_R = inverse_frequencies(config).to(device)
        self._amplitude = amplitude(config)

    def angles(self, positions_T: Tensor) -> Angles:
        angles = positions_T.to(torch.float32)[:, None, None] * self._frequencies_R
        cos, sin = angles.cos(), angles.sin()
        if self._amplitude != 1.0:
            cos, sin = cos * self._amplitude, sin * self._amplitude
        return Angles(cos, sin)

    def rotate(self, x_THD: Tensor, angles: Angles) -> Tensor:
        """The first `dim` values of every head rotated, in float32; the rest, if any, as they are."""
        half = self.dim // 2
        if self.interleaved:
            first, second = x_THD[..., 0 : self.dim : 2], x_THD[..., 1 : self.dim : 2]
        else:
            first, second = x_THD[..., :half], x_THD[..., half : self.dim]
        parts = [first * angles.cos - second * angles.sin, second * angles.cos + first * angles.sin]
        if x_THD.shape[-1] > self.dim:
            parts.append(x_THD[..., self.dim :])
        return torch.cat(parts, dim=-1).to(x_THD.dtype)
