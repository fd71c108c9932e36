"""Squared error and speed of our quantisers beside llama.cpp's own, on the same weights.

    python bench/quantise.py [--quick] [--device cpu|cuda]

llama.cpp's come from `libggml-base` of the package llama-cpp-python, which is no dependency: where
it is not importable only our side is printed. Errors are mean squared errors of the weights, ratios
are ours / theirs. One expert is gate and up in Q2_K, down in Q3_K. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels.formats import FORMATS, QUANTISERS

TYPE_IDS = {"Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q6_K": 14, "Q8_0": 8, "MXFP4": 39}
COLUMNS = 2304
HIDDEN, WIDTH, N_EXPERTS = 5120, 2304, 40 * 384

Weights = NDArray[np.float32]


def distributions(n_rows: int) -> dict[str, Weights]:
    """The weights to quantise: a bell curve, three heavy tails, and values of the official grid."""
    generator = np.random.default_rng(7)
    shape = (n_rows, COLUMNS)
    bell = generator.normal(size=shape)
    spiked = np.where(generator.random(shape) < 0.002, 15 * bell, bell)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.abs(bell.reshape(n_rows, -1, 32))
    scale = 2.0 ** np.round(generator.normal(size=(n_rows, codes.shape[1], 1)))
    nearest = grid[np.abs(codes[..., None] * 2 - grid).argmin(-1)] * scale
    official = np.copysign(nearest, bell.reshape(nearest.shape)).reshape(shape)
    drawn = {
        "gaussian": bell,
        "laplace": generator.laplace(size=shape),
        "student_t3": generator.standard_t(3, size=shape),
        "spiked": spiked,
        "official_fp4": official,
    }
    return {name: (2.0**-6 * values).astype(np.float32) for name, values in drawn.items()}


def llama_cpp() -> Callable[[str, Weights], Tensor] | None:
    """llama.cpp's quantiser (name, rows) -> block bytes, or None where the package is missing."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or not found.submodule_search_locations:
        return None
    library = Path(found.submodule_search_locations[0]) / "lib" / "libggml-base.so"
    if not library.exists():
        return None
    quantise_chunk = ctypes.CDLL(str(library)).ggml_quantize_chunk
    quantise_chunk.restype = ctypes.c_size_t
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    quantise_chunk.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]

    def quantise(name: str, rows: Weights) -> Tensor:
        n_rows, n = rows.shape
        row_bytes = n // FORMATS[name].BLOCK_VALUES * FORMATS[name].BLOCK_BYTES
        out = np.empty((n_rows, row_bytes), np.uint8)
        written = quantise_chunk(
            TYPE_IDS[name], rows.ctypes.data, out.ctypes.data, 0, n_rows, n, None
        )
        assert written == out.size
        return torch.from_numpy(out)

    return quantise


def squared_error(name: str, blocks: Tensor, values: Weights) -> float:
    """Mean squared error of the blocks' values."""
    back = FORMATS[name].dequantise(blocks.cpu()).double()
    return float((back - torch.from_numpy(values).double()).square().mean())


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The median wall time of `run`, after one run that warms up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


def errors(n_rows: int, device: str) -> dict[str, float]:
    """Print both sides' errors and return the ratios."""
    theirs = llama_cpp()
    ratios = {}
    print(f"{'format':8}{'weights':14}{'ours':>12}{'llama.cpp':>12}{'ratio':>8}")
    for kind, values in distributions(n_rows).items():
        for name in TYPE_IDS:
            blocks = QUANTISERS[name](torch.from_numpy(values).to(device))
            ours = squared_error(name, blocks, values)
            if theirs is None:
                print(f"{name:8}{kind:14}{ours:12.4e}{'-':>12}{'-':>8}")
                continue
            other = squared_error(name, theirs(name, values), values)
            ratio = ours / other if other else 1.0
            ratios[f"{name.lower()}_{kind}"] = round(ratio, 4)
            print(f"{name:8}{kind:14}{ours:12.4e}{other:12.4e}{ratio:8.4f}")
    return ratios


def speed(n_rows: int, repeats: int, device: str) -> dict[str, float]:
    """Print and return how long one expert takes, and on the CPU the ratio to llama.cpp's time."""

    def drawn(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device) * 0.02

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    gate, up, down = drawn(n_rows, HIDDEN), drawn(n_rows, HIDDEN), drawn(n_rows, WIDTH)

    def expert() -> None:
        for name, values in (("Q2_K", gate), ("Q2_K", up), ("Q3_K", down)):
            QUANTISERS[name](values)
        wait()

    took = seconds(expert, repeats)
    n_weights = gate.numel() + up.numel() + down.numel()
    expert_s = took * 3 * HIDDEN * WIDTH / n_weights
    hours = expert_s * N_EXPERTS / 3600
    print(
        f"one expert on {device}: {expert_s:.3f} s, {1 / expert_s:.2f} a second, "
        f"{hours:.2f} hours for the model"
    )
    result = {"expert_s": expert_s, "experts_per_s": 1 / expert_s, "model_hours": hours}
    theirs = llama_cpp()
    if theirs is not None and device == "cpu":
        rows = [(name, values.numpy()) for name, values in (("Q2_K", gate), ("Q3_K", down))]
        other = seconds(lambda: [theirs(name, values) for name, values in rows], repeats)
        ours = seconds(lambda: [QUANTISERS["Q2_K"](gate), QUANTISERS["Q3_K"](down)], repeats)
        result["time_ratio"] = ours / other
        print(f"time, ours / llama.cpp on one thread: {ours / other:.2f}")
    return {name: float(f"{value:.4g}") for name, value in result.items()}


def main() -> None:
    """Measure, print a table, end with one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer weights, fewer repeats")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    ratios = errors(32 if options.quick else 512, device)
    # A GPU wants whole matrices; on the CPU a part of one says the same.
    n_rows = WIDTH if device == "cuda" else 64 if options.quick else 256
    result: dict[str, object] = {
        "device": device,
        **speed(n_rows, 3 if options.quick else 7, device),
    }
    if ratios:
        result["worst_q2k_q3k"] = max(
            ratio for name, ratio in ratios.items() if name.startswith(("q2_k", "q3_k"))
        )
        result["mse_ratio"] = ratios
    print(json.dumps(result))


if __name__ == "__main__":
    main()
