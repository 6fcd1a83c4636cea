"""The paged kernels written slowly and plainly: what `paged.py` and every device kernel must agree with.

One token, one head, one page at a time, in float64. Tests only.
"""

# D head dim, V value dim, S keys, K key/value heads, U units, W tokens of a unit, C latent dim

import torch
from torch import Tensor


def read_tokens(pages_UKWD: Tensor, units: list[int], head: int, num_tokens: int) -> Tensor:
    """[num_tokens, D]: a sequence's rows of one head, page by page."""
    rows = [pages_UKWD[units[t // 16], head, t % 16] for t in range(num_tokens)]
    return torch.stack(rows).double()


def attend(q_D: Tensor, keys_SD: Tensor, values_SV: Tensor, scale: float) -> Tensor:
    """One query against the keys it may see: softmax(q k^T scale) v, float64 [V]."""
    scores = torch.stack([(q_D.double() * key.double()).sum() * scale for key in keys_SD])
    weights = (scores - scores.max()).exp()
    return (weights.unsqueeze(1) * values_SV.double()).sum(0) / weights.sum()


def gqa(
    q_TQD: Tensor, keys_UKWD: Tensor, values_UKWD: Tensor, units: list[int], num_prefix: int, scale: float
) -> Tensor:
    """[T, Q, D] float64: T new tokens of one sequence behind `num_prefix`; T = 1 is decode."""
    T, Q, _ = q_TQD.shape
    num_kv_heads = keys_UKWD.shape[1]
    out = torch.empty(q_TQD.shape, dtype=torch.float64)
    for t in range(T):
        for head in range(Q):
            kv_head = head * num_kv_heads // Q
            keys = read_tokens(keys_UKWD, units, kv_head, num_prefix + t + 1)
            values = read_tokens(values_UKWD, units, kv_head, num_prefix + t + 1)
            out[t, head] = attend(q_TQD[t, head], keys, values, scale)
    return out


def mla(
    q_TQD: Tensor, latent_UWC: Tensor, units: list[int], num_prefix: int, expand_QNC: Tensor, scale: float
) -> Tensor:
    """[T, Q, V] float64, unabsorbed. A query is [nope | rope], a latent [c | k_rope]; `expand_QNC` [Q, nope + V, C]."""
    T, Q, D = q_TQD.shape
    kv_lora_rank = expand_QNC.shape[2]
    nope_dim = D - (latent_UWC.shape[-1] - kv_lora_rank)
    value_dim = expand_QNC.shape[1] - nope_dim
    out = torch.empty((T, Q, value_dim), dtype=torch.float64)
    for t in range(T):
        latent = read_tokens(latent_UWC.unsqueeze(1), units, 0, num_prefix + t + 1)
        for head in range(Q):
            expanded = latent[:, :kv_lora_rank] @ expand_QNC[head].double().T
            keys = torch.cat([expanded[:, :nope_dim], latent[:, kv_lora_rank:]], dim=1)
            out[t, head] = attend(q_TQD[t, head], keys, expanded[:, nope_dim:], scale)
    return out
