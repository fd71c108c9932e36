"""Official fp8 and fp4 weights: exact values, exact layouts, byte 255 refused."""

import pytest
import torch

from kernels.formats import e8m0, fp4, fp8


def test_every_scale_byte_is_its_power_of_two():
    codes = torch.arange(255, dtype=torch.uint8)
    wanted = torch.tensor([2.0 ** (b - 127) for b in range(255)], dtype=torch.float64)
    assert torch.equal(e8m0.decode(codes).double(), wanted)


@pytest.mark.parametrize("shape", [(1,), (3, 5)])
def test_scale_byte_255_is_refused_wherever_it_stands(shape):
    codes = torch.full(shape, 127, dtype=torch.uint8)
    codes.view(-1)[-1] = 255
    with pytest.raises(ValueError, match="scale byte 255"):
        e8m0.decode(codes)


def test_every_byte_of_fp8_is_the_librarys_value():
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(fp8.decode(codes).nan_to_num(nan=1e9), wanted.nan_to_num(nan=1e9))


def test_tiles_of_fp8_share_a_scale_and_may_be_cut_off():
    codes = torch.randint(0, 0x7F, (40, 70), dtype=torch.uint8)
    scales = torch.randint(100, 150, (2, 3), dtype=torch.uint8)
    found = fp8.dequantise_tiles(codes, scales)
    for i, j in ((0, 0), (31, 31), (32, 32), (39, 69), (5, 64)):
        scale = 2.0 ** (int(scales[i // 32, j // 32]) - 127)
        assert float(found[i, j]) == float(fp8.decode(codes[i, j : j + 1])[0]) * scale


def test_rows_of_fp8_have_a_scale_for_each_32_values():
    codes = torch.randint(0, 0x7F, (3, 64), dtype=torch.uint8)
    scales = torch.randint(100, 150, (3, 2), dtype=torch.uint8)
    found = fp8.dequantise_rows(codes, scales)
    wanted = fp8.decode(codes) * e8m0.decode(scales).repeat_interleave(32, 1)
    assert torch.equal(found, wanted)


def test_the_low_nibble_of_fp4_comes_first():
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0] = 0xF1  # 0.5 low, -6 high
    packed[0, 15] = 0x0A  # -1, 0
    found = fp4.dequantise(packed, torch.tensor([[128]], dtype=torch.uint8))
    assert found[0, :2].tolist() == [1.0, -12.0]
    assert found[0, 30:].tolist() == [-2.0, 0.0]


def test_all_bytes_of_fp4_are_exact():
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.arange(119, 135, dtype=torch.uint8).view(16, 1)
    found = fp4.dequantise(packed, scales)
    values = [*fp4.MAGNITUDES, *(-m for m in fp4.MAGNITUDES)]
    for row in range(16):
        scale = 2.0 ** (119 + row - 127)
        for byte in range(16):
            code = row * 16 + byte
            pair = [values[code & 15] * scale, values[code >> 4] * scale]
            assert found[row, 2 * byte : 2 * byte + 2].tolist() == pair


@pytest.mark.parametrize(
    ("packed", "scales"),
    [((2, 16), (2, 2)), ((2, 16), (1, 1)), ((2, 24), (2, 1)), ((2, 24), (2, 2))],
)
def test_shapes_that_do_not_fit_are_refused(packed, scales):
    with pytest.raises(ValueError, match="scales"):
        fp4.dequantise(
            torch.zeros(packed, dtype=torch.uint8), torch.full(scales, 127, dtype=torch.uint8)
        )


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="uint8"):
        fp4.dequantise(torch.zeros(1, 16), torch.zeros(1, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        fp8.decode(torch.zeros(4))
    with pytest.raises(ValueError, match="uint8"):
        e8m0.decode(torch.zeros(4))
