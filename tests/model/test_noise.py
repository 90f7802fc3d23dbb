"""The noise field: Random123's known answers, frozen layout, moments, and independence of how the tokens are split."""

import pytest
import torch

from model.noise import _CPU_CHUNK, MAX_RECURRENCE, Stream, normals, philox4x32

GOLDEN = [
    [-0.68351138, 0.42405003, 1.98548460, -0.20838360, -0.28565434, -0.84296882],
    [-0.35171333, -0.99292946, -1.59270644, -1.23309982, -0.62672949, 0.62570798],
    [0.89141423, 0.94917792, 1.53762138, 0.06081496, -0.33939493, -1.04919505],
]
# Random123 1.14, kat_vectors: philox4x32 10
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, 0xFFFFFFFF_FFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], 0x299F31D0_A4093822, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter: list[int], key: int, words: list[int]) -> None:
    assert philox4x32(torch.tensor(counter)[:, None], key)[:, 0].tolist() == words


def test_philox_of_words_that_broadcast_equals_that_of_whole_counters() -> None:
    words = (torch.arange(3), torch.tensor([[7], [2**32 - 1]]), torch.tensor([[5], [6]]), torch.tensor(0))
    whole = torch.stack(torch.broadcast_tensors(*words))
    assert torch.equal(philox4x32(words, 99), philox4x32(whole, 99))


@pytest.mark.parametrize("channels", [1, 10, 768])
def test_a_token_on_a_chunk_border_gets_what_it_gets_alone(channels: int) -> None:
    """Across the border of a chunk, and with channels that do not fill the last group."""
    tokens = _CPU_CHUNK // -(-channels // 4)
    whole = normals(7, torch.arange(tokens + 2), channels, Stream.GATE, 9)
    for token in (0, tokens - 1, tokens, tokens + 1):
        assert torch.equal(whole[token], normals(7, torch.tensor(token), channels, Stream.GATE, 9))


def test_golden_values_freeze_the_layout() -> None:
    drawn = normals(1234, torch.tensor([0, 5, 2**40 + 7]), 6, Stream.STATE, 3)
    torch.testing.assert_close(drawn, torch.tensor(GOLDEN), rtol=0, atol=1e-6)


def test_field_does_not_depend_on_the_split() -> None:
    positions = torch.arange(1000, 1064).reshape(16, 4)
    whole = normals(7, positions, 10, Stream.STATE, 2)
    parts = [normals(7, part, 10, Stream.STATE, 2) for part in positions.split(3)]
    assert torch.equal(whole, torch.cat(parts))


def test_large_draws_are_chunked_without_a_seam() -> None:
    positions = torch.arange(3000)
    whole = normals(7, positions, 64, Stream.STATE, 1)
    assert torch.equal(whole[1500:], normals(7, positions[1500:], 64, Stream.STATE, 1))


def test_every_part_of_the_key_and_counter_matters() -> None:
    position = torch.tensor([3])
    draws = [
        normals(1, position, 4, Stream.STATE, 1),
        normals(2, position, 4, Stream.STATE, 1),
        normals(1 + 2**32, position, 4, Stream.STATE, 1),
        normals(1, position + 1, 4, Stream.STATE, 1),
        normals(1, position + 2**32, 4, Stream.STATE, 1),
        normals(1, position, 4, Stream.GATE, 1),
        normals(1, position, 4, Stream.STATE, 2),
        normals(1, position, 4, Stream.STATE, MAX_RECURRENCE),
        normals(1, position, 8, Stream.STATE, 1)[:, 4:],
    ]
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == len(draws)


def test_moments_are_those_of_standard_normals() -> None:
    x = normals(99, torch.arange(20_000), 100, Stream.STATE, 1).double().flatten()
    n = x.numel()
    assert abs(x.mean()) < 4 / n**0.5
    assert abs(x.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 4 * (96 / n) ** 0.5
    assert abs((x[:-1] * x[1:]).mean()) < 4 / n**0.5
