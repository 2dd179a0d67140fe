"""A table from 64-bit hashes to small numbers, for checks over a million rows in a few megabytes."""


class HashTable:
    """64-bit hash -> a number below 2**32, in about 11 bytes an entry; a dict takes over 100.

    The first two bytes of a hash choose a bucket, which holds for each entry the other six and the number. Buckets
    are searched through: 14 entries each at a million, 150 at ten million.
    """

    _HASH_BYTES, _ENTRY_BYTES = 6, 10

    def __init__(self) -> None:
        self._buckets = [b""] * (1 << 16)

    def get(self, key: int) -> int | None:
        bucket = self._buckets[key >> 48]
        at = self._find(bucket, key)
        return None if at < 0 else int.from_bytes(bucket[at + self._HASH_BYTES : at + self._ENTRY_BYTES], "big")

    def add(self, key: int, number: int) -> None:
        """`key` must not be there yet."""
        self._buckets[key >> 48] += ((key & 0xFFFF_FFFF_FFFF) << 32 | number).to_bytes(self._ENTRY_BYTES, "big")

    def replace(self, key: int, number: int) -> None:
        """`key` must be there."""
        bucket = self._buckets[key >> 48]
        at = self._find(bucket, key)
        self._buckets[key >> 48] = bucket[:at] + bucket[at + self._ENTRY_BYTES :]
        self.add(key, number)

    def _find(self, bucket: bytes, key: int) -> int:
        wanted = (key & 0xFFFF_FFFF_FFFF).to_bytes(self._HASH_BYTES, "big")
        at = bucket.find(wanted)
        while at > 0 and at % self._ENTRY_BYTES:  # a find across two entries
            at = bucket.find(wanted, at + 1)
        return at


def hash64(data: bytes | str) -> int:
    """A key for the table. Python's own: SipHash-1-3 with a random key for each process, so never to be stored."""
    return hash(data) & 0xFFFF_FFFF_FFFF_FFFF
