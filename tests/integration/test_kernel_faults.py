"""Errors that the kernel returns: a file system on a loop device whose drive lost its end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.files.checkpoint import Checkpoint, open_checkpoint
from protocol.wire.client import ExpertClient
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.running_daemon import daemon_process
from tests.support.shard_bytes import expert_bytes, slot_bytes

pytestmark = pytest.mark.timeout(60)

N_LAYERS, N_EXPERTS, TOP_K = 4, 16, 2
IMAGE_BYTES = 24 << 20
BLOCK_BYTES = 4096
FIBMAP = 1  # ioctl: a file's block to the device's


class Drive:
    """An ext4 file system on a loop device; `lose_from` cuts the drive, `mend` gives it back."""

    def __init__(self, directory: Path) -> None:
        self.image = directory / "drive.img"
        self.mount = directory / "mnt"
        self.mount.mkdir()
        with self.image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        _run("mkfs.ext4", "-q", "-b", str(BLOCK_BYTES), str(self.image))
        self.loop = _run("losetup", "-f", "--show", str(self.image)).strip()
        try:
            _run("mount", self.loop, str(self.mount))
        except BaseException:
            self.close()
            raise

    def seal(self) -> None:
        """Mount again read-only with nothing cached; keep the drive's bytes."""
        _run("umount", str(self.mount))
        _run("mount", "-o", "ro", self.loop, str(self.mount))
        self._whole = self.image.read_bytes()

    def block_of(self, path: Path, offset: int) -> int:
        """Where a file's byte is on the drive."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            block = struct.pack("i", offset // BLOCK_BYTES)
            (found,) = struct.unpack("i", fcntl.ioctl(descriptor, FIBMAP, block))
        finally:
            os.close(descriptor)
        return int(found) * BLOCK_BYTES

    def lose_from(self, offset: int) -> None:
        os.truncate(self.image, offset)

    def mend(self) -> None:
        with self.image.open("r+b") as file:
            file.write(self._whole)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.mount)], check=False, capture_output=True)
        subprocess.run(["losetup", "-d", self.loop], check=False, capture_output=True)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    if os.geteuid() != 0:
        pytest.skip("loop devices need root")
    for tool in ("losetup", "mkfs.ext4", "mount"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    try:
        made = Drive(tmp_path)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no loop device can be had here: {error}")
    with contextlib.closing(made):
        yield made


def _place(drive: Drive, checkpoint: Checkpoint, layer: int, expert: int) -> list[int]:
    """First and last blocks of an expert on the drive."""
    blocks = []
    for piece in checkpoint.slice_map.slices(layer, expert):
        for offset in (piece.offset, piece.offset + piece.n_bytes - 1):
            blocks.append(drive.block_of(piece.shard.path, offset))
    return blocks


@pytest.mark.parametrize("read_mode", ["direct", "buffered"])
def test_experts_beyond_the_drives_end_fail_alone_and_come_back_with_it(
    drive: Drive, runtime_dir: Path, read_mode: str
) -> None:
    model = write_fake_checkpoint(
        drive.mount / "model", n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K
    )
    drive.seal()
    checkpoint = open_checkpoint(model)
    keys = [(layer, expert) for layer in range(N_LAYERS) for expert in range(N_EXPERTS)]
    wanted = {key: expert_bytes(checkpoint, *key) for key in keys}
    places = {key: _place(drive, checkpoint, *key) for key in keys}
    cut = sorted(max(blocks) for blocks in places.values())[len(keys) // 2]
    with (
        daemon_process(model, runtime_dir, "--read-mode", read_mode) as daemon,
        ExpertClient(runtime_dir, "engine", checkpoint.fingerprint, TOP_K) as engine,
    ):
        _forget_cached(checkpoint)
        drive.lose_from(cut)
        n_failed = 0
        for layer in range(N_LAYERS):
            answer = engine.miss(layer, range(N_EXPERTS))
            engine.applied = answer.to_version
            failed = {expert: (code, text) for _, expert, code, text in answer.errors}
            n_failed += len(failed)
            for expert, slot in enumerate(answer.slots):
                assert (slot < 0) == (expert in failed)
                if slot >= 0:
                    assert slot_bytes(engine, slot) == wanted[layer, expert]
                else:
                    code, text = failed[expert]
                    assert code == "EIO"
                    assert f"layer {layer} expert {expert}: {drive.mount}" in text
                    assert max(places[layer, expert]) + 65536 >= cut
        assert 0 < n_failed < len(keys)
        assert engine.stats()["quarantined"] == 0
        drive.mend()
        for layer in range(N_LAYERS):
            answer = engine.miss(layer, range(N_EXPERTS))
            engine.applied = answer.to_version
            assert answer.errors == ()
            for expert, slot in enumerate(answer.slots):
                assert slot_bytes(engine, slot) == wanted[layer, expert]
        assert daemon.is_alive


def _forget_cached(checkpoint: Checkpoint) -> None:
    for shard in checkpoint.shards:
        descriptor = os.open(shard.path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
