"""Generates the library in `trees/` from its inputs, byte for byte the same each time.

    python -m benchmarks.generate_trees            # writes <device>.json
    python -m benchmarks.generate_trees --check    # writes nothing, fails if a file is stale

Inputs, within the library's directory:

- ``acceptance/*.json`` (`AcceptanceFile`): published vectors serve every model
  class; a measured one serves the pair it was measured on.
- ``profiles/*.json`` (`Profile`): a measured profile replaces the roofline of
  its device and model class, or adds a class of its own.

The device table and the model classes come from the package. Nothing is generated without an
input that covers it.
"""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.scaling import weights_bytes
from sequoia_vllm.cli.common import friendly_errors, progress_bar
from sequoia_vllm.hardware.device import DeviceSpec, identify, known_devices
from sequoia_vllm.hardware.models import ModelClass, model_classes
from sequoia_vllm.hardware.roofline import roofline_profile
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.hardware.streaming import host_link, streamed_layers
from sequoia_vllm.json_file import dump_json
from sequoia_vllm.json_input import read_json
from sequoia_vllm.library.files import (
    LIBRARY_SCHEMA,
    AcceptanceFile,
    LibraryError,
    LibraryFile,
    ProfileReference,
    TreeEntry,
)
from sequoia_vllm.library.selection import (
    OFFLOADED,
    fastest_schedule,
    make_entry,
    model_class_of,
    profile_reference,
)
from sequoia_vllm.library.tree_library import shipped_directory

COMMAND = "python -m benchmarks.generate_trees"
# Share of the memory that weights may take; the rest is for the KV cache and vLLM itself.
_WEIGHTS_SHARE = 0.75
_MAX_TENSOR_PARALLEL = 8
_VALUE_BYTES = 2.0  # bfloat16
Progress = Callable[[str, int, int], None]
Timed = tuple[Profile, ProfileReference]


def generate(
    output: Annotated[
        Path | None, typer.Option(help="Directory to write to; default: that of the inputs.")
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help="Directory with acceptance/ and profiles/; default: the library's own."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if a file would change.")
    ] = False,
) -> None:
    """Generate the tree library from its measured and published inputs."""
    with friendly_errors():
        source = inputs or shipped_directory()
        target = output or source
        with progress_bar("generating") as report:
            files = generate_library(source, report)
        changed, removed = _stale_files(files, target)
        if check:
            for name in (*changed, *removed):
                typer.echo(f"would {'change' if name in files else 'remove'} {name}")
            raise typer.Exit(1 if changed or removed else 0)
        target.mkdir(parents=True, exist_ok=True)
        for name in changed:
            (target / name).write_text(files[name], encoding="utf-8")
        for name in removed:
            (target / name).unlink()
        trees = sum(text.count('"acceptance_class"') for text in files.values())
        typer.echo(
            f"{trees} trees in {len(files)} files, {len(changed)} changed, {len(removed)} "
            f"removed: {target}"
        )


def _stale_files(files: dict[str, str], directory: Path) -> tuple[list[str], list[str]]:
    """Names of library files in ``directory`` that differ, and that should not be there. A file
    that does not say it is a library file stays."""
    changed = [
        name
        for name, text in files.items()
        if not (directory / name).is_file()
        or (directory / name).read_text(encoding="utf-8") != text
    ]
    others = (path for path in sorted(directory.glob("*.json")) if path.name not in files)
    found = ((path.name, read_json(path, "library", LibraryError)) for path in others)
    return changed, [
        name
        for name, data in found
        if isinstance(data, dict) and data.get("schema") == LIBRARY_SCHEMA
    ]


# A device, a model class on it, and every vector that serves the class.
Job = tuple[str, str, Profile, ProfileReference, list[AcceptanceFile]]


def generate_library(
    inputs: Path,
    progress: Progress = lambda what, done, total: None,
    devices: Collection[str] | None = None,
) -> dict[str, str]:
    """Text of every library file by its sorted name, of these devices (None: all). ``progress`` is
    called with (job, jobs done, jobs in all)."""
    jobs = [job for job in _jobs(inputs) if devices is None or job[0] in devices]
    entries: dict[str, list[TreeEntry]] = {}
    for done, (device, name, profile, reference, vectors) in enumerate(jobs):
        progress(f"{device}/{name}", done, len(jobs))
        for vector in vectors:
            full, schedule = f"{device}/{name}/{vector.name}", fastest_schedule(profile, vector)
            entry = make_entry(full, name, profile, reference, vector, schedule)
            entries.setdefault(device, []).append(entry)
    progress("done", len(jobs), len(jobs))
    known = known_devices()
    return {
        f"{device}.json": dump_json(
            LibraryFile(
                device=device,
                datasheet=known[device].spec() if device in known else None,
                generated_by=COMMAND,
                entries=entries[device],
            ).to_dict()
        )
        for device in sorted(entries)
    }


def _jobs(inputs: Path) -> Iterator[Job]:
    vectors = _vectors(inputs / "acceptance")
    measured = _measured(inputs / "profiles")
    classes = model_classes()
    devices = [device.id for device in known_devices().values() if device.library]
    extra = sorted({device for device, _ in measured} - set(devices))
    published = [vector for vector in vectors if vector.source == "published"]
    for device in (*devices, *extra):
        own = sorted(name for owner, name in measured if owner == device and name not in classes)
        for name in (*classes, *own):
            found = measured.get((device, name))
            if found is None and device in devices:
                found = _roofline(known_devices()[device].spec(), classes[name])
            if found is None:
                continue
            pair = found[0].target, found[0].draft
            serving = [v for v in vectors if v in published or (v.target, v.draft) == pair]
            if serving:
                yield device, name, *found, serving
    for name, model_class in model_classes("offloaded").items():
        for device in model_class.devices if published else ():
            profile = _offloaded(known_devices()[device].spec(), model_class)
            reference = profile_reference(profile)
            yield device, f"{name}{OFFLOADED}", profile, reference, published


def _offloaded(device: DeviceSpec, model_class: ModelClass) -> Profile:
    """Predicts times on one device, with as few layers offloaded as leave room for the rest."""
    pair = target, _ = model_class.target, model_class.draft
    link = host_link(device.id)
    for layers in range(1, target.layers + 1):
        weights = streamed_layers(
            target, layers * target.layers_bytes(_VALUE_BYTES) / target.layers,
            link.bytes_per_second, f"{layers} of {target.layers} layers, {link.name}",
        )  # fmt: skip
        if weights_bytes(*pair, streamed=weights) <= _WEIGHTS_SHARE * device.memory_bytes:
            return roofline_profile(device, *pair, streamed=weights)
    raise LibraryError(f"{model_class.id} does not fit {device.id}, all of its layers offloaded")


def _vectors(directory: Path) -> list[AcceptanceFile]:
    paths = sorted(directory.glob("*.json"))
    if not paths:
        raise LibraryError(f"no acceptance vectors in {directory}: there is nothing to optimise")
    vectors = [AcceptanceFile.load(path) for path in paths]
    for path, vector in zip(paths, vectors, strict=True):
        if path.stem != vector.name:
            raise LibraryError(f"acceptance file {path} is named {vector.name!r} inside")
    return vectors


def _measured(directory: Path) -> dict[tuple[str, str], Timed]:
    found: dict[tuple[str, str], Timed] = {}
    for path in sorted(directory.glob("*.json")):
        profile = Profile.load(path)
        device = identify(profile.device).id
        if device is None:
            raise LibraryError(
                f"profile file {path}: device {profile.device!r} is not in the device table "
                "(sequoia_vllm/hardware/devices.json): add it there"
            )
        key = device, model_class_of(profile)
        if key in found:
            raise LibraryError(
                f"profile file {path}: {found[key][1].file} is already of "
                f"{device} and model class {key[1]}"
            )
        found[key] = profile, profile_reference(profile, f"profiles/{path.name}")
    return found


def _roofline(device: DeviceSpec, model_class: ModelClass) -> Timed | None:
    """Predicts times on the fewest devices that hold the weights; None if eight do not."""
    pair = model_class.target, model_class.draft
    devices = 1
    while weights_bytes(*pair, devices) > _WEIGHTS_SHARE * device.memory_bytes:
        devices *= 2
        if devices > _MAX_TENSOR_PARALLEL:
            return None
    profile = roofline_profile(device, *pair, tensor_parallel_size=devices)
    return profile, profile_reference(profile)


if __name__ == "__main__":
    typer.run(generate)
