"""What tells two models of one layout apart, since kept states are true of one's weights only."""

from __future__ import annotations

import os

from protocol.errors import ShardError
from protocol.files.checkpoint import Checkpoint
from protocol.files.pack_format import hash_bytes

_SAMPLE_BYTES = 4096


def weights_tag(checkpoint: Checkpoint) -> str:
    """Return 32 hex digits of the fingerprint, the experts' formats and samples of the weights.

    Hashed are the first 4 KiB of every dense tensor, and of experts the checksums where the source
    has them: training changes all tensors, and reading every byte would cost each start its time.
    Raises ShardError where a file cannot be read.
    """
    told = [checkpoint.fingerprint]
    told += [
        checkpoint.expert_format(layer).encode() for layer in range(checkpoint.config.n_layers)
    ]
    if checkpoint.checksums is not None:
        told.append(checkpoint.checksums.tobytes())
    descriptors: dict[str, int] = {}
    try:
        for tensor in checkpoint.dense_tensors():
            path = str(tensor.shard.path)
            if path not in descriptors:
                descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            n_bytes = min(tensor.n_bytes, _SAMPLE_BYTES)
            told.append(os.pread(descriptors[path], n_bytes, tensor.offset))
    except OSError as error:
        raise ShardError(f"{path}: cannot be read: {error.strerror}") from error
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    body = b"".join(told)
    return f"{hash_bytes(body):016x}{hash_bytes(b'2' + body):016x}"
