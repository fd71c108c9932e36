"""Host memory while dense weights are loaded, above what imports and the device's start take.

    python bench/load.py [--quick] [--device NAME] [--model PATH]

A process of its own loads the weights of each model and reports its peak. Not counted are, on the
CPU, the dense weights themselves. What is left must stay under the largest tensor as stored plus
1 GiB. Without --model the models have the released widths (--quick: a quarter of them) and few
layers, as an official checkpoint and as a GGUF of K-quants, in sparse files: their values are
zero. Prints one JSON object as the last line; `worst_share` is of the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from compute.model.weights import load_weights  # noqa: E402
from protocol.files.block_sizes import BLOCK_TYPE_OF_NAME  # noqa: E402
from protocol.files.checkpoint import open_checkpoint, resolve_model  # noqa: E402
from protocol.files.gguf_names import gguf_names  # noqa: E402
from protocol.files.gguf_table import gguf_shapes  # noqa: E402
from protocol.files.model_config import ModelConfig, parse_model_config  # noqa: E402
from protocol.files.safetensors_index import SINGLE_NAME, dtype_bytes  # noqa: E402
from protocol.files.tensor_table import expected_tensors  # noqa: E402
from tests.support.fake_gguf import (  # noqa: E402
    FakeTensor,
    fake_metadata,
    fake_types,
    gguf_bytes,
    tensor_size,
)
from tests.support.released_config import released_config  # noqa: E402

GIB = 1 << 30
N_LAYERS = 4


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure host memory while weights are loaded.")
    parser.add_argument("--quick", action="store_true", help="a quarter of the released widths")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--model", type=Path, help="a model of your own instead")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measured(args.model, args.device)))
        return 0
    with tempfile.TemporaryDirectory(prefix="headrace-load-") as name:
        models = (
            {"model": args.model} if args.model else sparse_models(Path(name), quick=args.quick)
        )
        rows = {kind: in_a_child(path, args.device) for kind, path in models.items()}
    for kind, row in rows.items():
        print(
            f"{kind:9} {row['stored_bytes'] / GIB:6.2f} GiB in {row['seconds']:5.1f} s: peak "
            f"{row['peak_bytes'] / GIB:5.2f} GiB above the level, limit "
            f"{row['limit_bytes'] / GIB:5.2f} GiB"
        )
    worst = max(row["peak_bytes"] / row["limit_bytes"] for row in rows.values())
    found = {"device": args.device, "worst_share": round(worst, 4), "within": worst < 1, **rows}
    print(json.dumps(found))
    return 0 if worst < 1 else 1


def in_a_child(model: Path, device: str) -> dict[str, Any]:
    """Load in a process of its own, so that every run begins at the same level."""
    command = [sys.executable, __file__, "--child", "--model", str(model), "--device", device]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def measured(model: Path, device_name: str) -> dict[str, Any]:
    """Load in this process and return what it took."""
    device = torch.device(device_name)
    torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    level = status_bytes("VmRSS")
    began = time.perf_counter()
    checkpoint = open_checkpoint(resolve_model(model))
    weights = load_weights(checkpoint, device)
    seconds = time.perf_counter() - began
    own = tensor_bytes(weights) if device.type == "cpu" else 0
    dense = [entry.n_bytes for entry in checkpoint.dense_tensors()]
    return {
        "peak_bytes": status_bytes("VmHWM") - level - own,
        "limit_bytes": max(dense) + GIB,
        "largest_tensor_bytes": max(dense),
        "weight_bytes": tensor_bytes(weights),
        "stored_bytes": sum(dense),
        "seconds": round(seconds, 3),
    }


def status_bytes(name: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in nested dataclasses and tuples."""
    if is_dataclass(value):
        return sum(tensor_bytes(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tuple):
        return sum(map(tensor_bytes, value))
    return value.untyped_storage().nbytes() if hasattr(value, "untyped_storage") else 0


def sparse_models(directory: Path, *, quick: bool) -> dict[str, Path]:
    """An official checkpoint and a GGUF without data; zeros are read for it."""
    raw = cut_config(quick=quick)
    config = parse_model_config(raw, "bench")
    (directory / "official").mkdir()
    (directory / "official" / "config.json").write_text(json.dumps(raw))
    return {
        "official": sparse_official(directory / "official", config),
        "gguf": sparse_gguf(directory / "model.gguf", config),
    }


def cut_config(*, quick: bool) -> dict[str, Any]:
    """The released config with few layers and experts."""
    raw = released_config()
    text = raw["text_config"]
    text |= {
        "num_hidden_layers": N_LAYERS,
        "num_nextn_predict_layers": 0,
        "compress_ratios": [0, 0, 2, 2],
        "kv_source_layer_ids": [2],
        "index_source_layer_ids": [2],
        "candidate_source_layer_id": -1,
        "engram_layer_ids": [1],
        "engram_num_embeddings": text["engram_num_embeddings"][:1],
        "n_routed_experts": 8,
    }
    if quick:
        text |= {"hidden_size": 1280, "moe_intermediate_size": 768, "vocab_size": 32_768}
        text |= {"engram_compressed_vocab_size": 20_000, "num_attention_heads": 16}
        raw |= {"image_token_id": 32_000}
    return raw


def sparse_official(directory: Path, config: ModelConfig) -> Path:
    """One file with a header and a hole."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in expected_tensors(config).items():
        begin, end = end, end + dtype_bytes(tensor.dtype, tensor.shape)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    write_sparse(directory / SINGLE_NAME, len(text).to_bytes(8, "little") + text, end)
    return directory


def sparse_gguf(path: Path, config: ModelConfig) -> Path:
    """The same tensors in the types of a mixed Q2_K file."""
    tensors, end = [], 0
    for name, shape in gguf_shapes(config).items():
        type_id = BLOCK_TYPE_OF_NAME[fake_types(name, shape)].type_id
        tensors.append(FakeTensor(gguf_names(name)[0], shape[::-1], type_id, b"", end))
        end += -(-tensor_size(shape[::-1], type_id) // 32) * 32
    token_map = [token % config.engram_compressed_vocab for token in range(config.vocab_size)]
    header = gguf_bytes(fake_metadata(config, token_map=token_map).items(), tensors)
    write_sparse(path, header, end)
    return path


def write_sparse(path: Path, header: bytes, n_bytes: int) -> None:
    """A file of a header and zeros that take no room."""
    path.write_bytes(header)
    os.truncate(path, len(header) + n_bytes)


if __name__ == "__main__":
    raise SystemExit(main())
