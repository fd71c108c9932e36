"""One run of pack, from the plan to the manifest; whatever it writes, a later run can take up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from compute.commands.byte_report import Report
from protocol.errors import ConfigError
from protocol.files.pack_directory import layer_ranges
from protocol.files.pack_manifest import (
    HOME,
    KINDS,
    MANIFEST_NAME,
    WORK_NAME,
    Manifest,
    PackFile,
    is_pack,
    read_manifest,
)
from protocol.sizes import format_size

from .kept_files import unchanged
from .links import check_link, link_shard, would_link
from .outputs import CHUNK_BYTES, Output, PlannedFile, Site
from .part_file import write_atomically, write_error
from .plan import PackPlan
from .preflight import check_room
from .progress_notes import (
    Done,
    ProgressNotes,
    check_same_source,
    finished_before,
    manifest_files,
)
from .records import Convert, needs_conversion, record_filler
from .source_files import Scratch, SourceReader, stamps
from .workers import Workers


def pack(plan: PackPlan, report: Report, *, jobs: int, device: str) -> int:
    """Write the pack, or what is missing of it; raises HeadraceError."""
    if _is_finished(plan, jobs):
        _say_finished(plan, report)
        return 0
    if not is_pack(plan.options.target):
        check_room(plan, ())
    _check_links(plan)
    convert = _converter(plan, device)
    # The notes come first: from then on the directory is known as a pack that was begun.
    _make_directories(plan.options.target)
    notes = ProgressNotes(plan)
    try:
        _make_directories(*plan.record_directories())
        done = unchanged(plan, notes.done, _manifest(plan, notes.done), jobs, report.line)
        check_room(plan, done)
        _write_outputs(plan, notes, done, report, jobs=jobs, convert=convert)
        check_same_source(plan, stamps(plan.checkpoint, plan.copies), "while it was being packed")
        # Last: it closes the source's files to writers, for which a run that fails has no right.
        _link(plan, report)
        manifest = _manifest(plan, notes.done)
        write_atomically(plan.options.target / MANIFEST_NAME, manifest.encode())
    except BaseException:
        notes.close()
        raise
    notes.remove()
    facts = report.end()
    report.line(_closing_line(plan, manifest, facts))
    report.event("done", **_result(plan, manifest), **facts)
    return 0


def preview(plan: PackPlan, report: Report, *, jobs: int, device: str) -> int:
    """Print what `pack` would write, or raise what it would raise; writes nothing."""
    if _is_finished(plan, jobs):
        _say_finished(plan, report)
        return 0
    _check_links(plan)
    _converter(plan, device)
    before = finished_before(plan)
    done = unchanged(plan, before, _manifest(plan, before), jobs, report.line)
    _write_plan(plan, done, report)
    check_room(plan, done)
    return 0


def _write_plan(plan: PackPlan, done: set[tuple[str, str]], report: Report) -> None:
    files = plan.planned_files()
    links = [
        {"name": path.name, "how": would_link(path, plan.options.target)} for path in plan.links
    ]
    report.event(
        "plan",
        source=str(plan.checkpoint.path),
        directory=str(plan.options.target),
        experts=plan.options.experts,
        record_bytes=plan.layouts[0].image.slot_bytes,
        layers=list(plan.layers),
        total_bytes=sum(file.n_bytes for file in files),
        kept_bytes=sum(file.n_bytes for file in files if (file.place, file.name) in done),
        links=links,
        files=[
            {
                "path": str(plan.directory(file.place) / file.name),
                "kind": file.kind,
                "bytes": file.n_bytes,
            }
            for file in files
        ],
    )
    if report.is_json:
        return
    for text in _plan_lines(plan, files, done, links):
        sys.stdout.write(text + "\n")


def _plan_lines(
    plan: PackPlan,
    files: list[PlannedFile],
    done: set[tuple[str, str]],
    links: list[dict[str, str]],
) -> list[str]:
    layout = plan.layouts[0]
    n_experts = plan.checkpoint.config.n_experts
    what = f"layers {layer_ranges(plan.layers)}: {n_experts} experts each, {layout.format}"
    lines = [
        f"{plan.checkpoint.path} to {plan.options.target}:",
        f"  {what}, in records of {layout.image.slot_bytes} bytes",
    ]
    for kind in KINDS:
        by_place: dict[str, list[int]] = {}
        for file in files:
            if file.kind == kind:
                by_place.setdefault(file.place, []).append(file.n_bytes)
        for place, sizes in by_place.items():
            where = "" if place == HOME else f" in {plan.directory(place)} ({place})"
            lines.append(
                f"  {kind:8} {len(sizes):4} files {format_size(sum(sizes)):>10}"
                f" ({sum(sizes)} bytes){where}"
            )
    lines += [f"  engram   {link['name']}: {link['how']}" for link in links]
    total = sum(file.n_bytes for file in files)
    kept = sum(file.n_bytes for file in files if (file.place, file.name) in done)
    there = f"; {format_size(kept)} of it are there already" if kept else ""
    lines.append(f"  in all {format_size(total)} ({total} bytes) to write{there}")
    return lines


def _is_finished(plan: PackPlan, jobs: int) -> bool:
    """Whether the directory already holds all that is asked for; raises where it holds another."""
    home = plan.options.target
    if not (home / MANIFEST_NAME).exists() or (home / WORK_NAME).exists():
        return False
    manifest = read_manifest(home)
    done = manifest_files(plan, manifest)
    return (
        all((file.place, file.name) in done for file in plan.planned_files())
        and all((home / path.name).exists() for path in plan.links)
        and unchanged(plan, done, manifest, jobs, lambda _: None) == done.keys()
    )


def _say_finished(plan: PackPlan, report: Report) -> None:
    home = plan.options.target
    report.line(f"{home}: is packed already; headrace verify reads every byte of it")
    report.event("done", **_result(plan, read_manifest(home)), bytes=0)


def _make_directories(*directories: Path) -> None:
    for directory in directories:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(directory, error) from error


def _check_links(plan: PackPlan) -> None:
    for path in plan.links:
        check_link(path, plan.options.target)


def _link(plan: PackPlan, report: Report) -> None:
    for path in plan.links:
        how = link_shard(path, plan.options.target)
        report.line(f"{path.name}: {how} to the source, which is now read-only")
        report.event("link", name=path.name, how=how)


def _write_outputs(
    plan: PackPlan,
    notes: ProgressNotes,
    done: set[tuple[str, str]],
    report: Report,
    *,
    jobs: int,
    convert: Convert | None,
) -> None:
    reader = SourceReader(plan.checkpoint.shards)
    try:
        fill = record_filler(plan, reader, convert)
        outputs: list[Output] = [*plan.plain_outputs(), *plan.layer_outputs(fill)]
        missing = [
            output
            for output in outputs
            if not all((file.place, file.name) in done for file in output.files)
        ]
        sizes = [file.n_bytes for output in missing for file in output.files]
        report.start(sum(sizes), resumed=notes.is_resumed, files=len(sizes))

        def on_finished(output: Output, files: list[PackFile]) -> None:
            notes.note(files)
            report.add(output.frame_bytes)

        layouts = plan.checkpoint.slice_map.layouts
        target_bytes = max(layout.image.slot_bytes for layout in plan.layouts)
        source_bytes = max(layout.image.slot_bytes for layout in layouts)
        workers = Workers(
            missing,
            Site(plan.directory, notes.directory, reader),
            lambda: Scratch.of(max(CHUNK_BYTES, target_bytes), source_bytes),
            report.add,
            on_finished,
        )
        workers.run(jobs)
    finally:
        reader.close()


def _converter(plan: PackPlan, device: str) -> Convert | None:
    if not needs_conversion(plan):
        return None
    try:
        from compute.experts.requantise import Quantiser
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--experts {plan.options.experts}: quantising needs torch, which is not installed"
        ) from error
    return Quantiser(device).convert


def _manifest(plan: PackPlan, done: Done) -> Manifest:
    stripes, mirror = plan.place_texts()
    files = sorted(
        (one.file for one in done.values()),
        key=lambda file: (KINDS.index(file.kind), file.place, file.name),
    )
    linked = {path.name for path in plan.links}
    return Manifest(
        pack_id=plan.pack_id,
        fingerprint=plan.checkpoint.fingerprint,
        experts=plan.options.experts,
        engram=plan.options.engram,
        n_layers=plan.checkpoint.config.n_layers,
        layers=tuple(sorted({file.layer for file in files if file.kind == "experts"})),
        source=plan.stamps,
        files=tuple(files),
        links=tuple(stamp for stamp in plan.stamps if stamp.name in linked),
        stripes=stripes,
        mirror=mirror,
    )


def _result(plan: PackPlan, manifest: Manifest) -> dict[str, Any]:
    return {
        "directory": str(plan.options.target),
        "files": len(manifest.files),
        "file_bytes": sum(file.n_bytes for file in manifest.files),
        "complete": not manifest.missing_layers,
        "missing_layers": list(manifest.missing_layers),
    }


def _closing_line(plan: PackPlan, manifest: Manifest, facts: dict[str, Any]) -> str:
    kept = facts["bytes_kept"]
    text = (
        f"{plan.options.target}: {format_size(facts['bytes'] - kept)} written in "
        f"{facts['seconds']:.1f} s, {format_size(facts['bytes_per_s'])}/s"
    )
    if kept:
        text += f"; {format_size(kept)} were there already"
    if manifest.missing_layers:
        text += f"; incomplete, without layers {layer_ranges(manifest.missing_layers)}"
    return text
