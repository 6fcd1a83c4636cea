"""Chained hashes of 16-token units: what a cached prefix is known by, on every worker and in every router.

The hash of a unit covers its tokens and, through its parent, all tokens before it and the request's cache salt. Units
are the same on the whole cluster, so hashes do not depend on anybody's block size: a block is known by the hash of its
last unit.
"""

import hashlib
import struct
from collections.abc import Sequence

from pd_cluster.ids import UnitHash
from pd_cluster.kv.layout import HASH_VERSION
from pd_cluster.request import UNIT_TOKENS

DIGEST_BYTES = 16
_PERSON = b"pd-kv-prefix-%d" % HASH_VERSION
_UNIT_BYTES = 4 * UNIT_TOKENS


def chain_root(cache_salt: str = "") -> UnitHash:
    """The parent of a request's first unit; other salts lead to hashes that never meet."""
    salt = cache_salt.encode("utf-8", "surrogatepass")
    return UnitHash(hashlib.blake2b(salt, digest_size=DIGEST_BYTES, person=_PERSON).digest())


def extend_chain(parent: UnitHash, token_ids: Sequence[int]) -> list[UnitHash]:
    """Hashes of the full units in `token_ids`, which follow `parent`; tokens of a last partial unit are left out."""
    num_tokens = len(token_ids) // UNIT_TOKENS * UNIT_TOKENS
    packed = struct.pack(f"<{num_tokens}I", *token_ids[:num_tokens])
    hashes: list[UnitHash] = []
    digest: bytes = parent
    for start in range(0, len(packed), _UNIT_BYTES):
        digest = hashlib.blake2b(digest + packed[start : start + _UNIT_BYTES], digest_size=DIGEST_BYTES).digest()
        hashes.append(UnitHash(digest))
    return hashes


def unit_hashes(token_ids: Sequence[int], cache_salt: str = "") -> list[UnitHash]:
    """Hashes of all full units of a sequence, in order."""
    return extend_chain(chain_root(cache_salt), token_ids)


class UnitChain:
    """The hashes of one growing sequence; each unit is hashed once."""

    __slots__ = ("_root", "hashes")

    def __init__(self, cache_salt: str = "") -> None:
        self._root = chain_root(cache_salt)
        self.hashes: list[UnitHash] = []

    def extend(self, token_ids: Sequence[int], num_tokens: int | None = None) -> None:
        """Hash the units that are full in the first `num_tokens` of `token_ids`, the whole sequence so far."""
        end = len(token_ids) if num_tokens is None else num_tokens
        start = len(self.hashes) * UNIT_TOKENS
        if end - start >= UNIT_TOKENS:
            self.hashes += extend_chain(self.hashes[-1] if self.hashes else self._root, token_ids[start:end])
