"""`headrace doctor` on this machine, and its checks on machines made up for the purpose."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import headrace
from compute.commands.doctor.check import EXIT_STATUS, STATUSES, Check, Host, worst_of
from compute.commands.doctor.command import _of_disks, _of_machine
from compute.commands.doctor.device import device
from compute.commands.doctor.drive import drive, free_disk
from compute.commands.doctor.memory import Needs, memory
from compute.commands.doctor.model import model_checks, needs_of
from compute.commands.doctor.place import daemon_check, runtime_dir_check, state_dir_checks
from compute.commands.doctor.software import software, torch_check
from compute.commands.gpu_facts import FIELDS, gpu_facts
from expert_daemon.source import FileSource
from protocol.files.checkpoint import open_checkpoint
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.running_daemon import daemon_thread

GIB = 1 << 30
H200 = "NVIDIA H200, 580.65, 143771, 9.0, 5, 5, 16, 16\n"
GB10 = "NVIDIA GB10, 580.95, [N/A], 12.1, [N/A], [N/A], [N/A], [N/A]\n"
NAMES = {
    "python",
    "packages of the daemon",
    "packages of compute",
    "packages of the server",
    "torch",
    "triton",
    "gpu",
    "model",
    "tokenizer",
    "runtime directory",
    "daemon",
    "memory",
    "memlock limit",
    "huge pages",
    "swap",
    "file system",
    "drive",
    "direct reads",
    "drive rate, 16 reads of 1 MiB at a time",
    "state directory",
    "state disk",
}


def host(root: Path, files: Mapping[str, str] | None = None, **more: Any) -> Host:
    for name, text in (files or {}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host({}, root, **more)


def by_name(checks: Any) -> dict[str, Check]:
    return {check.name: check for check in checks}


def run_json(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    status = headrace.main(["doctor", "--json", *flags])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(found, dict)
    return status, found


# the command


def test_every_check_has_its_five_fields_and_the_exit_status_is_the_worst(
    runtime_dir: Path, capsys: pytest.CaptureFixture[str]
):
    began = time.monotonic()
    flags = ("--runtime-dir", str(runtime_dir), "--state-dir", str(runtime_dir / "state"))
    status, found = run_json(capsys, *flags)
    assert time.monotonic() - began < 20
    assert set(found) == {"checks", "worst"}
    assert {check["name"] for check in found["checks"]} >= NAMES
    for check in found["checks"]:
        assert set(check) == {"name", "status", "found", "wanted", "fix"}
        assert check["status"] in STATUSES
        assert check["fix"] or check["status"] in ("ok", "note")
        assert check["found"]
    worst = max((check["status"] for check in found["checks"]), key=STATUSES.index)
    assert (found["worst"], status) == (worst, EXIT_STATUS[worst])


def test_people_read_what_is_wanted_and_how_to_get_it(
    runtime_dir: Path, capsys: pytest.CaptureFixture[str]
):
    missing = str(runtime_dir / "nowhere")
    status = headrace.main(["doctor", "--runtime-dir", str(runtime_dir), "--model", missing])
    lines = capsys.readouterr().out.splitlines()
    (place,) = [place for place, line in enumerate(lines) if line.startswith("error    model")]
    assert missing in lines[place]
    assert "wanted: config.json" in lines[place + 1]
    assert "fix: fetch the missing" in lines[place + 2]
    assert lines[-1].startswith("worst: error")
    assert status == 2


@pytest.mark.parametrize(
    ("statuses", "worst"),
    [((), "ok"), (("ok", "note"), "note"), (("error", "warning"), "error")],
)
def test_the_worst_is_the_most_severe(statuses: tuple[str, ...], worst: str):
    assert worst_of([Check("x", status, "y") for status in statuses]) == worst


# software


def test_missing_packages_are_named_with_the_extra_that_brings_them(tmp_path: Path):
    found = by_name(software(host(tmp_path), ()))
    assert found["packages of the daemon"].status == "error"
    assert "pyzmq" in found["packages of the daemon"].found
    assert found["packages of compute"].fix == "pip install '.[compute]' in the clone"
    assert found["packages of the server"].status == "note"
    assert found["torch"].status == "error"


@pytest.mark.parametrize(
    ("version", "cuda", "gpus", "status"),
    [
        ("2.13.0+cpu", None, "", "ok"),
        ("2.13.0+cpu", None, H200, "warning"),
        ("2.13.0", "13.0", H200, "ok"),
        ("2.13.0", "13.0", "", "note"),
        ("2.4.1", "12.4", H200, "error"),
        (None, None, "", "error"),
    ],
)
def test_torch_is_held_to_the_machine(
    version: str | None, cuda: str | None, gpus: str, status: str
):
    assert torch_check(version, cuda, gpu_facts(lambda _: gpus)).status == status


# the GPU


def test_a_gpu_on_all_its_lanes_is_fine():
    found = by_name(device(gpu_facts(lambda _: H200), "13.0"))
    assert {check.status for check in found.values()} == {"ok"}
    assert "discrete" in found["gpu memory"].found
    assert "PCIe 5 x16, about 55 GB/s" in found["gpu link"].found


@pytest.mark.parametrize(
    ("link", "words"), [("5, 5, 8, 16", "all lanes"), ("5, 4, 16, 16", "older generation")]
)
def test_a_gpu_on_half_a_link_is_a_warning(link: str, words: str):
    gpus = gpu_facts(lambda _: f"NVIDIA RTX 5090, 580.65, 32607, 12.0, {link}\n")
    check = by_name(device(gpus, "13.0"))["gpu link"]
    assert check.status == "warning"
    assert words in check.fix


def test_an_old_driver_is_an_error():
    gpus = gpu_facts(lambda _: H200.replace("580.65", "535.10"))
    check = by_name(device(gpus, "13.0"))["gpu driver"]
    assert (check.status, check.wanted) == ("error", "580 or newer, for CUDA 13.0")


def test_memory_that_is_the_hosts_is_called_unified():
    gpus = gpu_facts(lambda _: GB10)
    found = by_name(device(gpus, "13.0"))
    assert gpus[0].is_unified
    assert found["gpu memory"].found.startswith("unified")
    assert "gpu link" not in found


def test_several_gpus_are_told_apart():
    found = by_name(device(gpu_facts(lambda _: H200 + H200), None))
    assert {"gpu 0", "gpu 1 link"} <= set(found)


def test_what_nvidia_smi_does_not_know_is_no_gpu():
    assert gpu_facts(lambda _: None) == ()
    assert gpu_facts(lambda _: "No devices were found\n") == ()
    assert len(FIELDS) == len(H200.split(","))


# memory


def test_an_arena_may_have_what_is_available_less_weights_and_spare(tmp_path: Path):
    needs = Needs(smallest_arena=GIB, expert_bytes=100 * GIB, dense_bytes=8 * GIB)
    check = by_name(memory(host(tmp_path), (), 20 * GIB, 4 * GIB, needs, -1))["memory"]
    assert check.status == "ok"
    assert "an arena of 14.0 GiB at most" in check.found
    check = by_name(memory(host(tmp_path), (), 10 * GIB, 0, needs, -1))["memory"]
    assert check.status == "error"


@pytest.mark.parametrize(
    ("limit", "gpus", "status"), [(-1, H200, "ok"), (8 << 20, "", "ok"), (8 << 20, H200, "warning")]
)
def test_a_limit_of_locked_memory_matters_with_a_gpu(
    tmp_path: Path, limit: int, gpus: str, status: str
):
    found = by_name(memory(host(tmp_path), gpu_facts(lambda _: gpus), GIB, 0, Needs(), limit))
    assert found["memlock limit"].status == status


@pytest.mark.parametrize(
    ("text", "release", "status"),
    [
        ("always within_size [advise] never deny force", "5.15.0-91-generic", "ok"),
        ("always within_size advise [never] deny force", "5.15.0-91-generic", "warning"),
        ("always within_size advise [never] deny force", "6.0.9", "warning"),
        ("always within_size advise [never] deny force", "6.1.0-28-amd64", "ok"),
        ("always within_size advise [never] deny force", "10.0", "ok"),
        ("always within_size advise never [deny] force", "6.18.44", "warning"),
        (None, "6.1.0", "note"),
    ],
)
def test_small_pages_are_a_warning(tmp_path: Path, text: str | None, release: str, status: str):
    files = {"proc/sys/kernel/osrelease": f"{release}\n"}
    if text is not None:
        files["sys/kernel/mm/transparent_hugepage/shmem_enabled"] = text
    found = by_name(memory(host(tmp_path, files), (), GIB, 0, Needs(), -1))
    assert found["huge pages"].status == status


@pytest.mark.parametrize(
    ("total", "free", "status"), [(0, 0, "ok"), (8 << 20, 8 << 20, "ok"), (8 << 20, 0, "warning")]
)
def test_swap_in_use_is_a_warning(tmp_path: Path, total: int, free: int, status: str):
    files = {"proc/meminfo": f"SwapTotal: {total} kB\nSwapFree: {free} kB\n"}
    found = by_name(memory(host(tmp_path, files), (), GIB, 0, Needs(), -1))
    assert found["swap"].status == status


# drive


def test_a_drive_is_looked_up_by_its_number(tmp_path: Path):
    shards = open_checkpoint(write_fake_checkpoint(tmp_path / "model")).shards
    device_number = shards[0].path.stat().st_dev
    number = f"{os.major(device_number)}:{os.minor(device_number)}"
    block = tmp_path / "root" / "sys/dev/block"
    for name, rotational, status in (("nvme0n1", "0", "ok"), ("sda", "1", "warning")):
        real = tmp_path / "root" / "sys/devices" / name
        (real / "queue").mkdir(parents=True)
        (real / "queue" / "rotational").write_text(f"{rotational}\n")
        (real / "part").mkdir()
        block.mkdir(parents=True, exist_ok=True)
        (block / number).unlink(missing_ok=True)
        (block / number).symlink_to(real / "part")
        found = by_name(drive(Host({}, tmp_path / "root"), shards, seconds=0.01))
        assert (found["drive"].status, name in found["drive"].found) == (status, True)
    assert found["drive rate"].status == "note"


def test_the_rate_is_measured_on_shards_that_are_large_enough(demo_dir: Path):
    shards = open_checkpoint(demo_dir).shards
    found = by_name(drive(Host({}), shards, seconds=0.05))
    assert "GB/s" in found["drive rate, 16 reads of 1 MiB at a time"].found


@pytest.mark.timeout(20)
def test_a_drive_that_does_not_answer_is_an_error(demo_dir: Path, monkeypatch: pytest.MonkeyPatch):
    released = threading.Event()
    readers: set[threading.Thread] = set()

    def read_into(*_: Any) -> int:
        readers.add(threading.current_thread())
        released.wait()
        return 0

    monkeypatch.setattr(FileSource, "read_into", read_into)
    monkeypatch.setattr("expert_daemon.watched_source.WAIT_S", 0.3)
    monkeypatch.setattr("expert_daemon.watched_source.CLOSE_S", 0.1)
    shards = open_checkpoint(demo_dir).shards
    found = by_name(_of_disks(Host({}), open_checkpoint(demo_dir), str(demo_dir)))["drive"]
    released.set()
    assert found.status == "error"
    assert re.search(r": bytes \d+ to \d+: no answer from the drive in 0\.3 s", found.found)
    assert found.found.startswith(tuple(str(shard.path) for shard in shards))
    assert all(thread.daemon for thread in readers)  # the exit does not wait for them


def test_too_little_room_is_a_warning(tmp_path: Path):
    assert free_disk("disk", tmp_path / "not yet", 1, "for this").status == "ok"
    assert free_disk("disk", tmp_path, 1 << 60, "for this").status == "warning"


# the model


def test_a_missing_shard_is_named(tmp_path: Path):
    model = write_fake_checkpoint(tmp_path / "model")
    gone = min(model.glob("*.safetensors"))
    gone.unlink()
    (check,), checkpoint = model_checks(str(model))
    assert checkpoint is None
    assert check.status == "error"
    assert gone.name in check.found


def test_a_missing_tokenizer_is_named(tmp_path: Path):
    model = write_fake_checkpoint(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    checks, _ = model_checks(str(model))
    found = by_name(checks)
    assert found["model"].status == "ok"
    assert found["tokenizer"].status == "error"


def test_needs_of_a_model_are_its_smallest_arena_and_dense_weights(tmp_path: Path):
    checkpoint = open_checkpoint(write_fake_checkpoint(tmp_path / "model"))
    needs = needs_of(checkpoint, on_host=True)
    assert 0 < needs.smallest_arena < 10 << 20
    assert needs.dense_bytes > 0
    assert needs_of(checkpoint, on_host=False).dense_bytes == 0


# where the processes meet


def test_without_a_runtime_directory_a_person_is_told_three_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("os.getuid", lambda: 4_000_000)  # whose /run/headrace is not
    (check, *_) = _of_machine(host(tmp_path), (), None, None)
    assert (check.name, check.status) == ("runtime directory", "warning")
    assert "`headrace daemon` does not start" in check.found
    for way in ("mkdir -m 0700 ~/.headrace", "in over ssh", "sudo -u headrace headrace doctor"):
        assert way in check.fix


def test_a_runtime_directory_that_others_may_write_to_is_an_error(runtime_dir: Path):
    assert runtime_dir_check(runtime_dir).status == "ok"
    assert runtime_dir_check(runtime_dir / "later").status == "ok"
    runtime_dir.chmod(0o755)
    assert runtime_dir_check(runtime_dir).status == "warning"
    runtime_dir.chmod(0o777)
    assert runtime_dir_check(runtime_dir).status == "error"
    assert runtime_dir_check(runtime_dir / ("x" * 100)).status == "error"


def test_a_live_daemon_is_asked_for_its_version_and_arena(tmp_path: Path, runtime_dir: Path):
    model = write_fake_checkpoint(tmp_path / "model")
    fingerprint = open_checkpoint(model).fingerprint
    check, live = daemon_check(runtime_dir, fingerprint)
    assert (check.status, live.arena_bytes) == ("ok", 0)
    with daemon_thread(model, runtime_dir):
        check, live = daemon_check(runtime_dir, fingerprint)
        assert check.status == "ok"
        assert "wire version" in check.found
        assert live.arena_bytes > 0
        check, _ = daemon_check(runtime_dir, b"x" * 16)
        assert check.status == "error"
        assert fingerprint.hex() in check.found


def test_a_state_directory_is_tried_at_its_nearest_parent(tmp_path: Path):
    found = by_name(state_dir_checks(tmp_path / "a" / "b"))
    assert found["state directory"].status == "ok"
    assert not (tmp_path / "a").exists()
