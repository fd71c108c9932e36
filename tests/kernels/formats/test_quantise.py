"""The quantisers: small error, any finite weights, and bytes that depend on the block alone."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.formats import FORMATS, QUANTISERS, block

BLOCKS = ("Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q8_0", "MXFP4")
# Mean squared error of llama.cpp's own quantisers (llama-cpp-python 0.3.36) on `weights` below.
LLAMA_CPP = {
    ("Q2_K", "gaussian"): 3.5055e-05,
    ("Q2_K", "heavy"): 1.4292e-04,
    ("Q3_K", "gaussian"): 9.0812e-06,
    ("Q3_K", "heavy"): 4.2116e-05,
    ("Q4_K", "gaussian"): 2.0364e-06,
    ("Q4_K", "heavy"): 9.7980e-06,
    ("Q6_K", "gaussian"): 1.2621e-07,
    ("Q6_K", "heavy"): 7.2845e-07,
    ("Q8_0", "gaussian"): 1.1510e-08,
    ("Q8_0", "heavy"): 7.9418e-08,
    ("MXFP4", "gaussian"): 5.2172e-06,
    ("MXFP4", "heavy"): 2.3245e-05,
}

# What a block's largest scale and code reach.
LARGEST = {
    "Q2_K": 65504 * 45,
    "Q3_K": 65504 * 128,
    "Q4_K": 65504 * 945,
    "Q6_K": 65504 * 4096,
    "Q8_0": 65504 * 127,
    "MXFP4": np.inf,
}


def weights(kind: str) -> torch.Tensor:
    generator = np.random.default_rng(7)
    shape = (64, 2304)
    drawn = generator.normal(size=shape) if kind == "gaussian" else generator.standard_t(3, shape)
    return torch.from_numpy((0.02 * drawn).astype(np.float32))


def squared_error(name: str, values: torch.Tensor) -> torch.Tensor:
    back = FORMATS[name].dequantise(QUANTISERS[name](values))
    assert back.shape == values.shape
    return (back.double() - values.double()).square()


@pytest.mark.parametrize(("name", "kind"), list(LLAMA_CPP))
def test_squared_error_is_no_more_than_that_of_llama_cpp(name, kind):
    assert squared_error(name, weights(kind)).mean() <= 1.0001 * LLAMA_CPP[name, kind]


@pytest.mark.parametrize("name", BLOCKS)
def test_shape_and_type_are_those_that_dequantise_takes(name):
    kind = FORMATS[name]
    out = QUANTISERS[name](torch.randn(2, 3, 2 * kind.BLOCK_VALUES))
    assert out.dtype == torch.uint8
    assert out.shape == (2, 3, 2 * kind.BLOCK_BYTES)
    assert QUANTISERS[name](torch.randn(2, 0)).shape == (2, 0)
    assert QUANTISERS[name](torch.randn(0, kind.BLOCK_VALUES)).shape == (0, kind.BLOCK_BYTES)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_gets_the_same_bytes_alone_and_among_others(name, monkeypatch):
    kind = FORMATS[name]
    values = torch.randn(3, 37 * kind.BLOCK_VALUES)
    together = QUANTISERS[name](values)
    alone = [
        QUANTISERS[name](part.contiguous())
        for part in values.view(-1, kind.BLOCK_VALUES)[::5].split(1)
    ]
    assert torch.equal(together.view(-1, kind.BLOCK_BYTES)[::5], torch.cat(alone))
    monkeypatch.setattr(block, "PIECE_VALUES_CPU", 3 * kind.BLOCK_VALUES)
    assert torch.equal(QUANTISERS[name](values), together)
    strided = torch.zeros(3, values.shape[1] + 5)
    strided[:, 2:-3] = values
    assert torch.equal(QUANTISERS[name](strided[:, 2:-3]), together)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BLOCKS)
def test_a_gpu_writes_the_bytes_that_the_cpu_writes(name):
    for kind in ("gaussian", "heavy"):
        values = weights(kind)
        written = QUANTISERS[name](values.cuda())
        assert torch.equal(written.cpu(), QUANTISERS[name](values))
        read = FORMATS[name].dequantise(written)
        assert torch.equal(read.cpu(), FORMATS[name].dequantise(written.cpu()))


@pytest.mark.parametrize("name", BLOCKS)
def test_zeros_come_back_as_zeros(name):
    zeros = torch.zeros(1, 256)
    assert torch.equal(FORMATS[name].dequantise(QUANTISERS[name](zeros)), zeros)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("value", [1.0, -1.0, 0.017, -0.017])
def test_a_constant_comes_back_nearly(name, value):
    part = 0.1 if name == "MXFP4" else 0.01  # its scales are powers of two
    assert squared_error(name, torch.full((1, 256), value)).max() < (part * value) ** 2


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("outlier", [30.0, -30.0])
def test_one_outlier_is_kept(name, outlier):
    values = weights("gaussian")[:, :256].clone()
    values[:, 77] = outlier
    back = FORMATS[name].dequantise(QUANTISERS[name](values))
    part = 0.1 if name == "MXFP4" else 0.02
    assert ((back[:, 77] - outlier).abs() < part * abs(outlier)).all()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e-7, 1e-4, 1e4, 5e5, 2e8])
def test_tiny_and_huge_values_give_finite_blocks_no_worse_than_zeros(name, size):
    values = torch.from_numpy(np.random.default_rng(3).normal(size=(8, 256)).astype(np.float32))
    values *= size
    if values.abs().max() > LARGEST[name]:
        with pytest.raises(ValueError, match="above"):
            QUANTISERS[name](values)
        values *= LARGEST[name] / values.abs().max() * 0.999
    back = FORMATS[name].dequantise(QUANTISERS[name](values))
    assert bool(torch.isfinite(back).all())
    error = (back.double() - values.double()).square().sum()
    assert error <= values.double().square().sum()


@example(seed=8, name="Q6_K", shift=0.0, zeros=0.99, power=9)
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(BLOCKS),
    shift=st.sampled_from([0.0, 0.5, -0.5, 5.0]),
    zeros=st.sampled_from([0.0, 0.5, 0.99]),
    power=st.sampled_from([1, 3, 9]),
)
def test_no_block_is_worse_than_plain_rounding(seed, name, shift, zeros, power):
    generator = np.random.default_rng(seed)
    drawn = generator.normal(size=(4, 256)) ** power + shift
    drawn[generator.random(drawn.shape) < zeros] = 0
    values = torch.from_numpy(drawn.astype(np.float32))
    error = squared_error(name, values).sum(-1)
    # One step of the whole block's range, the bound of the plainest quantiser there could be.
    steps = {"Q2_K": 3, "Q3_K": 7, "Q4_K": 15, "Q6_K": 63, "Q8_0": 255, "MXFP4": 3}[name]
    low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
    # What half of float16's smallest step, in a block's scale, is in a value.
    largest = {"Q2_K": 15 * 3, "Q3_K": 32 * 4, "Q4_K": 63 * 15, "Q6_K": 127 * 32, "Q8_0": 127}
    coarse = largest.get(name, 0) * 2.0**-25
    assert (error <= 256 * ((high - low).double() / steps + coarse) ** 2).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_what_no_block_can_hold_is_refused(name):
    size = FORMATS[name].BLOCK_VALUES
    with pytest.raises(ValueError, match="multiple of"):
        QUANTISERS[name](torch.zeros(size + 1))
    with pytest.raises(ValueError, match="floating point"):
        QUANTISERS[name](torch.zeros(size, dtype=torch.int32))
    for bad in (torch.nan, torch.inf, -torch.inf):
        values = torch.zeros(4, size)
        values[2, 5] = bad
        with pytest.raises(ValueError, match="not finite"):
            QUANTISERS[name](values)


def test_bf16_weights_are_quantised_as_their_f32_values():
    values = torch.randn(2, 512).bfloat16()
    assert torch.equal(QUANTISERS["Q2_K"](values), QUANTISERS["Q2_K"](values.float()))


def test_q8_0_has_the_bytes_of_the_gguf_package():
    values = weights("heavy")
    theirs = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(QUANTISERS["Q8_0"](values).numpy(), theirs)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_have_the_bytes_of_the_gguf_package(name):
    values = torch.cat([weights("heavy"), weights("heavy") * 1e-6, weights("gaussian") * 1e5])
    values = values.clamp(-6e4, 6e4)
    theirs = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(QUANTISERS[name](values).numpy(), theirs.view(np.uint8))
