"""Tests of `headrace inspect`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headrace
from compute.commands.checkpoint_facts import arenas, checkpoint_facts, size_for
from compute.commands.machine_memory import Gpu, MachineMemory, machine_memory
from expert_daemon.arena import plan
from protocol.errors import ConfigError
from protocol.files.checkpoint import open_checkpoint
from tests.support.converted_gguf import convert
from tests.support.fake_checkpoint import edit_config, write_fake_checkpoint
from tests.support.packing import pack, run_command
from tests.support.released_config import write_released_headers

GIB = 1 << 30


def _memory(n_bytes: int, *gpus: Gpu) -> MachineMemory:
    return MachineMemory(2 * n_bytes, n_bytes, None, gpus)


def _json_of(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert headrace.main(["inspect", str(directory), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(facts, dict)
    return facts


def test_json_says_what_the_checkpoint_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_fake_checkpoint(tmp_path)
    facts = _json_of(tmp_path, capsys)
    checkpoint = open_checkpoint(tmp_path)
    assert facts["fingerprint"] == checkpoint.fingerprint.hex()
    assert (facts["n_layers"], facts["n_experts"], facts["n_shards"]) == (8, 8, 3)
    assert sum(facts["bytes_by_kind"].values()) == facts["file_bytes"]
    assert facts["bytes_by_kind"]["expert"] == 64 * facts["expert"]["bytes"]
    assert facts["bytes_by_kind"]["engram"] == 33 * (204 + 358)
    assert facts["expert"]["slot_bytes"] % 4096 == 0
    assert facts["token"] == {"expert_bytes": 16 * facts["expert"]["bytes"], "engram_bytes": 396}
    assert facts["memory"]["total_bytes"] > 0


def test_json_names_every_layer_role(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = _json_of(write_fake_checkpoint(tmp_path), capsys)["layers"]
    assert [layer["rows_from"] for layer in layers] == [None, None, 2, 2, 4, 5, 5, 5]
    assert [layer["selection_from"] for layer in layers] == [None, None, 2, 2, 4, 5, 5, 7]
    assert [layer["engram_table"] for layer in layers] == [None, 0, None, None, 1, None, None, None]
    assert [layer["layer"] for layer in layers if layer["publishes_candidates"]] == [5]
    assert [layer["layer"] for layer in layers if layer["masked_by_candidates"]] == [7]
    assert layers[2]["own"] == ["compressor", "index keys", "indexer"]
    assert layers[7]["own"] == ["indexer"]


def test_tables_are_printed_for_people(
    demo_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert headrace.main(["inspect", str(demo_dir)]) == 0
    text = capsys.readouterr().out
    for words in ("Layer roles", "Bytes by kind", "6,684,672", "smallest", "This machine", "slots"):
        assert words in text


def inspected(model: Path) -> dict[str, Any]:
    outcome = run_command("inspect", model, "--json")
    assert outcome.status == 0, outcome.err
    return dict(outcome.events[-1])


def test_a_share_of_a_pack_and_a_mirror_are_described(tmp_path: Path) -> None:
    source = write_fake_checkpoint(tmp_path / "src", n_layers=3)
    official = inspected(source)
    pack(source, tmp_path / "share", "--layers", "1")
    share = inspected(tmp_path / "share")
    assert share["notes"][0] == "incomplete: the experts of layers 0, 2 are missing"
    assert share["bytes_by_kind"]["expert"] * 3 == official["bytes_by_kind"]["expert"]
    pack(source, tmp_path / "b", "--copy", "--mirror", tmp_path / "m")
    double = inspected(tmp_path / "b")
    assert double["bytes_by_kind"]["expert"] == 2 * official["bytes_by_kind"]["expert"]
    assert double["kind"] == "pack"


def test_what_pack_would_give_is_what_it_gives(tmp_path: Path) -> None:
    source = write_fake_checkpoint(
        tmp_path / "src", n_layers=2, n_experts=3, hidden_size=256, expert_width=256
    )
    gguf = convert(open_checkpoint(source), tmp_path / "m.gguf")
    rows = {row["experts"]: row for row in inspected(gguf)["packs"]}
    assert list(rows) == ["source", "fp4", "q2k-q3k", "q4k", "q8_0"]
    for name, row in rows.items():
        flags = [] if name == "source" else ["--experts", name]
        (plan,) = pack(
            gguf, tmp_path / name, "--dry-run", "--json", "--device", "cpu", *flags
        ).events
        assert plan["record_bytes"] == row["record_bytes"]
        n_header = 4096 + 3 * 2 * 8
        sizes = [file["bytes"] for file in plan["files"] if file["kind"] == "experts"]
        assert sum(sizes) == row["bytes"] + 2 * n_header


def test_the_smallest_arena_is_the_daemons_own(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_fake_checkpoint(tmp_path))
    smallest = size_for(checkpoint, 0)
    plan(checkpoint, size_bytes=smallest, max_bytes=0, top_k_batch=2)
    with pytest.raises(ConfigError, match=f"smallest: {smallest} bytes"):
        plan(checkpoint, size_bytes=smallest - 1, max_bytes=0, top_k_batch=2)


def test_what_fits_follows_from_the_memory(demo_dir: Path) -> None:
    checkpoint = open_checkpoint(demo_dir)
    names = ["smallest", "a quarter", "half", "all experts", "this machine"]

    def fits(memory: MachineMemory) -> list[bool]:
        rows = arenas(checkpoint, memory, 8 << 20)
        assert [row["arena"] for row in rows] == names
        shares = [row["resident_share"] for row in rows[:4]]
        assert shares == sorted(shares)
        assert shares[3] == 1.0
        return [row["fits"] for row in rows]

    assert fits(_memory(GIB)) == [True] * 5
    assert fits(_memory(1 << 20)) == [False] * 5
    assert fits(_memory(15 << 20)) == [True, True, True, False, True]
    assert fits(_memory(15 << 20, Gpu("one", GIB))) == [True] * 5


def test_the_released_model_is_described(tmp_path: Path) -> None:
    try:
        write_released_headers(tmp_path)
    except OSError as error:
        pytest.skip(f"no sparse files of this size here: {error}")
    facts = checkpoint_facts(open_checkpoint(tmp_path), _memory(128 * GIB, Gpu("one", 80 * GIB)))
    assert facts["expert"] == {
        "bytes": 18_800_640,
        "slot_bytes": 18_800_640,
        "pieces": {
            name: 368_640 if name.endswith("_scale") else 5_898_240
            for name in ("gate", "gate_scale", "up", "up_scale", "down", "down_scale")
        },
    }
    assert facts["bytes_by_kind"]["expert"] == 15_360 * 18_800_640
    assert facts["token"] == {"expert_bytes": 240 * 18_800_640, "engram_bytes": 48 * 264}
    assert round(facts["n_parameters"] / 1e9) == 552
    assert facts["n_engram_parameters"] == (384006168 + 384016682) * 256
    assert facts["dense_fits_on"] == ["one", "host"]
    by_name = {row["arena"]: row for row in facts["arenas"]}
    assert [row["fits"] for row in facts["arenas"]] == [True, True, False, False, True]
    assert 0.35 < by_name["this machine"]["resident_share"] < 0.45


def test_another_model_is_refused_before_torch_is_imported(tmp_path: Path, root: Path) -> None:
    write_fake_checkpoint(tmp_path)
    edit_config(tmp_path, lambda raw: raw.update(model_type="deepseek_v4"))
    code = (
        "import sys, headrace; status = headrace.main(['inspect', sys.argv[1]]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=root, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "model_type is 'deepseek_v4', wanted 'deepseek_v41'" in done.stderr
    assert "Traceback" not in done.stderr


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       1000 kB\nMemFree: 10 kB\nMemAvailable:    800 kB\n"


@pytest.mark.parametrize(
    ("files", "available", "limit"),
    [
        ({}, 800 << 10, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max"}, 800 << 10, None),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/memory.max": str(500 << 10),
                "sys/fs/cgroup/a/memory.current": str(100 << 10),
            },
            400 << 10,
            500 << 10,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n0::/\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(300 << 10),
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": str(400 << 10),
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
            },
            0,
            300 << 10,
        ),
    ],
)
def test_a_control_groups_limit_counts(
    tmp_path: Path, files: dict[str, str], available: int, limit: int | None
) -> None:
    memory = machine_memory(_write(tmp_path, {"proc/meminfo": MEMINFO, **files}))
    assert memory.total_bytes == 1000 << 10
    assert memory.available_bytes == available
    assert memory.limit_bytes == limit


def test_gpus_come_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\necho 'NVIDIA GB10, [N/A]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert machine_memory().gpus == (Gpu("NVIDIA H200", 143771 << 20), Gpu("NVIDIA GB10", 0))
    program.write_text("#!/bin/sh\nexit 9\n")
    assert machine_memory().gpus == ()
