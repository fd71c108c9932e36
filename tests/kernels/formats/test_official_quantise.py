"""E2M1, E4M3 and E8M0: every midpoint, the scale bytes, the nibble orders, lossless re-packing."""

import numpy as np
import pytest
import torch

from kernels.formats import e8m0, fp4, fp8, mxfp4

E2M1 = torch.tensor(fp4.MAGNITUDES)
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def check_midpoints(encode, grid, sign_bit):
    low, high = grid[:-1], grid[1:]
    middle = (low + high) / 2  # exact: both are small multiples of one step
    code = torch.arange(len(low))
    even = code + code % 2
    towards = [torch.nextafter(middle, side) for side in (low, high)]
    for sign, mark in ((1.0, 0), (-1.0, sign_bit)):
        assert encode(sign * middle).tolist() == (even | mark).tolist()
        assert encode(sign * towards[0]).tolist() == (code | mark).tolist()
        assert encode(sign * towards[1]).tolist() == (code + 1 | mark).tolist()
        assert encode(sign * grid).tolist() == (torch.arange(len(grid)) | mark).tolist()


def test_every_midpoint_of_e2m1_rounds_to_the_even_code():
    check_midpoints(fp4.encode, E2M1, 8)
    assert len(E2M1) == 8


def test_every_midpoint_of_e4m3_rounds_to_the_even_code():
    check_midpoints(fp8.encode, E4M3, 128)
    assert E4M3[-1] == 448


def test_values_beyond_the_largest_saturate():
    beyond = torch.tensor([6.5, 7.0, 100.0, 3e38, torch.inf])
    assert fp4.encode(beyond).tolist() == [7] * 5
    assert fp4.encode(-beyond).tolist() == [15] * 5
    assert fp8.encode(beyond + 449).tolist() == [0x7E] * 5
    assert fp8.encode(-beyond - 449).tolist() == [0xFE] * 5


def test_encode_agrees_with_round_to_grid():
    values = torch.randn(20000) * torch.logspace(-3, 3, 20000)
    codes = fp4.encode(values).int()
    back = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    assert torch.equal(back, fp4.round_to_grid(values))
    assert torch.equal(fp8.decode(fp8.encode(values)), fp8.round_to_grid(values))


@pytest.mark.parametrize("byte", [0, 1, 110, 254])
def test_scale_bytes_are_powers_of_two_in_every_format(byte):
    wanted = float(np.ldexp(1.0, byte - 127))
    scale = torch.tensor([byte], dtype=torch.uint8)
    assert e8m0.decode(scale).item() == wanted
    blocks = torch.full((17,), 0x22, dtype=torch.uint8)  # all ones
    blocks[0] = byte
    assert mxfp4.dequantise(blocks).tolist() == [wanted] * 32
    packed = torch.full((1, 16), 0x22, dtype=torch.uint8)
    assert fp4.dequantise(packed, scale[None]).tolist() == [[wanted] * 32]
    ones = torch.full((1, 32), 0x38, dtype=torch.uint8)
    assert fp8.dequantise_rows(ones, scale[None]).tolist() == [[wanted] * 32]
    assert fp8.dequantise_tiles(ones, scale[None]).tolist() == [[wanted] * 32]


def test_scale_byte_255_is_refused_in_every_format():
    bad = torch.tensor([[255]], dtype=torch.uint8)
    blocks = torch.zeros(3, 17, dtype=torch.uint8)
    blocks[1, 0] = 255
    with pytest.raises(ValueError, match="255"):
        mxfp4.dequantise(blocks)
    with pytest.raises(ValueError, match="255"):
        fp4.dequantise(torch.zeros(1, 16, dtype=torch.uint8), bad)
    with pytest.raises(ValueError, match="255"):
        fp8.dequantise_rows(torch.zeros(1, 32, dtype=torch.uint8), bad)
    with pytest.raises(ValueError, match="255"):
        fp8.dequantise_tiles(torch.zeros(1, 32, dtype=torch.uint8), bad)


@pytest.mark.parametrize("place", range(32))
def test_each_of_32_places_has_its_own_nibble(place):
    one = torch.zeros(1, 32)
    one[0, place] = -3.0
    packed, scales = fp4.quantise(one)
    shift = 4 * (place % 2)
    assert packed[0].nonzero().tolist() == [[place // 2]]
    code = int(packed[0, place // 2]) >> shift
    assert (code & 15) << shift == int(packed[0, place // 2])
    assert torch.equal(fp4.dequantise(packed, scales), one)
    blocks = mxfp4.quantise(one)
    shift = 4 * (place // 16)
    assert blocks[0, 1:].nonzero().tolist() == [[place % 16]]
    assert int(blocks[0, 1 + place % 16]) == code << shift
    assert torch.equal(mxfp4.dequantise(blocks), one)


def test_32_distinct_values_keep_their_places_from_official_to_gguf_and_back():
    # 16 codes at two scales: 2^0 and 2^-4 give 30 distinct values besides the two zeros.
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(4)[None]
    scales = torch.tensor([[127, 123]], dtype=torch.uint8)
    values = fp4.dequantise(packed, scales)
    assert values.unique().numel() == 15 + 14
    blocks = mxfp4.from_official(packed, scales)
    assert torch.equal(mxfp4.dequantise(blocks), values)
    assert [int(byte) & 15 for byte in blocks[0, 1:17]] == list(range(16))
    assert [int(byte) >> 4 for byte in blocks[0, 1:17]] == list(range(16))
    back, back_scales = mxfp4.to_official(blocks)
    assert torch.equal(back, packed)
    assert torch.equal(back_scales, scales)


def test_random_official_bytes_survive_the_way_to_gguf_and_back():
    generator = torch.Generator().manual_seed(5)
    packed = torch.randint(0, 256, (7, 96), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 255, (7, 6), dtype=torch.uint8, generator=generator)
    blocks = mxfp4.from_official(packed, scales)
    assert blocks.shape == (7, 6 * 17)
    assert torch.equal(mxfp4.dequantise(blocks), fp4.dequantise(packed, scales))
    assert all(map(torch.equal, mxfp4.to_official(blocks), (packed, scales)))


def test_official_values_are_quantised_without_loss():
    generator = torch.Generator().manual_seed(6)
    packed = torch.randint(0, 256, (9, 64), dtype=torch.uint8, generator=generator)
    packed[3] = 0x11 * torch.randint(0, 3, (64,), generator=generator).to(torch.uint8)
    scales = torch.randint(0, 250, (9, 4), dtype=torch.uint8, generator=generator)
    values = fp4.dequantise(packed, scales)
    assert torch.equal(fp4.dequantise(*fp4.quantise(values)), values)
    assert torch.equal(mxfp4.dequantise(mxfp4.quantise(values)), values)
    codes = torch.randint(0, 127, (40, 70), dtype=torch.uint8, generator=generator)
    codes = codes | (torch.randint(0, 2, (40, 70), generator=generator) << 7).to(torch.uint8)
    tiles = torch.randint(9, 240, (2, 3), dtype=torch.uint8, generator=generator)
    values = fp8.dequantise_tiles(codes, tiles)
    assert torch.equal(fp8.dequantise_tiles(*fp8.quantise_tiles(values)), values)
    rows = values[:, :64].contiguous()
    assert torch.equal(fp8.dequantise_rows(*fp8.quantise_rows(rows)), rows)


def test_fp8_scales_are_the_least_that_cut_nothing_off():
    for largest, byte in ((448.0, 127), (449.0, 128), (1.75, 119), (1.7500001, 120), (0.0, 127)):
        values = torch.zeros(1, 32)
        values[0, 9] = -largest
        codes, scales = fp8.quantise_rows(values)
        assert scales.tolist() == [[byte]]
        assert fp8.quantise_tiles(values)[1].tolist() == [[byte]]
        assert (fp8.dequantise_rows(codes, scales) - values).abs().max() <= largest / 16


def test_fp8_tiles_share_a_scale_over_32_rows_and_32_columns():
    values = torch.ones(33, 65)
    values[32, 64] = 2.0**20
    codes, scales = fp8.quantise_tiles(values)
    assert scales.tolist() == [[119, 119, 119], [119, 119, 139]]
    assert codes.shape == values.shape
    assert torch.equal(fp8.dequantise_tiles(codes, scales), values)


def test_fp4_takes_the_scale_of_less_error():
    # The scale that reaches 6 cuts 7.9 off; the next one reaches 12 and has no 0.5.
    assert fp4.dequantise(*fp4.quantise(torch.full((1, 32), 7.9))).unique().tolist() == [8.0]
    fine = torch.full((1, 32), 0.5)
    fine[0, 0] = 6.5
    assert fp4.dequantise(*fp4.quantise(fine)).unique().tolist() == [0.5, 6.0]


def test_what_is_not_finite_or_no_whole_group_is_refused():
    for quantise in (fp4.quantise, fp8.quantise_tiles, fp8.quantise_rows):
        for bad in (torch.nan, torch.inf):
            values = torch.zeros(2, 32)
            values[1, 3] = bad
            with pytest.raises(ValueError, match="not finite"):
                quantise(values)
    for quantise in (fp4.quantise, fp8.quantise_rows):
        with pytest.raises(ValueError, match="whole groups"):
            quantise(torch.zeros(2, 33))
