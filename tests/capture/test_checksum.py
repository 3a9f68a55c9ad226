"""The checksum behind a payload: wherever a bit is flipped, it tells."""

import pytest

from dspark_lab.capture import checksum

pytest.importorskip("xxhash")


def test_every_flipped_bit_is_noticed() -> None:
    described = {"handle": "h", "version": 1, "tensors": {}, "metadata": {"total_aligned_bytes": 192}}
    checksum.leave_room(described)
    num_bytes = described["metadata"]["total_aligned_bytes"]
    assert described[checksum.OFFSET] == 192 and num_bytes == 256
    payload = bytearray(range(num_bytes))
    checksum.seal(memoryview(payload))
    assert payload[:192] == bytes(range(192)) and checksum.is_sound(memoryview(payload))
    for bit in range(8 * 200):  # of the bytes and of the checksum
        payload[bit // 8] ^= 1 << bit % 8
        assert not checksum.is_sound(memoryview(payload))
        payload[bit // 8] ^= 1 << bit % 8
    assert checksum.is_sound(memoryview(payload))
