"""A folder of results: what it lacks is measured, and what it holds becomes the table."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.serving.server import (
    Load,
    ServingError,
    bench_serve,
    make_loads,
    running_server,
    server_environment,
    server_options,
    write_prompts,
)
from benchmarks.serving.table import Rounds, make_markdown, make_rows, make_summary
from sequoia_vllm.cli.common import note, progress_bar
from sequoia_vllm.json_input import read_json
from sequoia_vllm.measuring.provenance import provenance

VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "chain": {"method": "draft_model", "num_speculative_tokens": 4},
    "sequoia": {"method": "sequoia"},
}  # speculative configuration of each variant, without the draft


class Run:
    """The results, prompts and logs in a folder, with what all of its results have in common:
    "model", "draft_model", "rates", "requests", "tokens", "warm_up" (None: as the folder says).
    Raises ServingError if the folder has results with other settings."""

    def __init__(self, folder: Path, settings: dict[str, Any] | None = None) -> None:
        self.folder = folder
        file = folder / "settings.json"
        if settings is not None and not file.exists():
            preloaded = server_environment(Path())["LD_PRELOAD"].split(":")
            stated = provenance(preloaded=[Path(library).name for library in preloaded if library])
            _write(file, {"settings": settings, "provenance": stated})
        self.kept = read_json(file, "result", ServingError)
        self.settings = self.kept["settings"]
        if settings not in (None, self.settings):
            raise ServingError(f"{folder} has results with other settings: give another --output")
        self.loads = make_loads(self.settings["rates"], self.settings["requests"])

    def missing(self, variants: Sequence[str], rounds: int) -> dict[tuple[int, str], list[Load]]:
        """Returns the loads without results, by round and variant, in the order of measuring."""
        servers = [(number, name) for number in range(1, rounds + 1) for name in variants]
        lacking = {
            (number, name): [
                load for load in self.loads if not self._file(name, number, load).exists()
            ]
            for number, name in servers
        }
        return {server: loads for server, loads in lacking.items() if loads}

    def results(self) -> dict[tuple[str, str], Rounds]:
        """Reads all results, by title of the load and name of the variant."""
        found = {
            (load.title, name): {
                int(file.stem.split("-")[1]): read_json(file, "result", ServingError)["bench"]
                for file in sorted(self.folder.glob(f"{name}-*-{load.key}.json"))
            }
            for load in self.loads
            for name in VARIANTS
        }
        return {key: rounds for key, rounds in found.items() if rounds}

    def measure(self, variants: Sequence[str], rounds: int) -> None:
        """Measures what is missing, with one server for each variant and round."""
        missing = self.missing(variants, rounds)
        total, done = sum(map(len, missing.values())), 0
        note(f"{len(missing)} servers, {total} loads")
        write_prompts(self.folder)
        with progress_bar("serving, loads:") as report:
            for (number, name), loads in missing.items():
                where = f"round {number}, {name}"
                report(f"{where}, start", done, total)
                with self._server(name, number) as url:
                    for load in loads:
                        report(f"{where}, {load.title}", done, total)
                        self._measure(url, name, number, load)
                        done += 1

    def write_table(self) -> str:
        """Writes table.md and table.json, and returns the first: a short table and a long one."""
        rows = make_rows(self.results())
        if not rows:
            raise ServingError(f"{self.folder} has no results: call without --table-only")
        table = f"{make_summary(rows)}\n\n{make_markdown(rows)}"
        (self.folder / "table.md").write_text(table + "\n", encoding="utf-8")
        _write(self.folder / "table.json", {**self.kept, "rows": rows})
        return table

    @contextmanager
    def _server(self, name: str, number: int) -> Iterator[str]:
        """A server that has learned nothing yet."""
        options, speculative = server_options(self.settings["tokens"]), VARIANTS[name]
        if speculative is not None:
            config = {**speculative, "model": self.settings["draft_model"]}
            options.append(f"--speculative-config={json.dumps(config)}")
        log = self.folder / f"{name}-{number}.log"
        with (
            tempfile.TemporaryDirectory() as trees,
            running_server(self.settings["model"], options, log, Path(trees)) as url,
        ):
            yield url

    def _measure(self, url: str, name: str, number: int, load: Load) -> None:
        tokens = self.settings["tokens"]
        where = [f"--base-url={url}", f"--model={self.settings['model']}"]
        log = self.folder / f"{name}-{number}-bench.log"
        warm_up = load.options(self.folder, tokens, self.settings["warm_up"])
        bench_serve(where + warm_up, log)
        bench = bench_serve(where + load.options(self.folder, tokens), log)
        _write(self._file(name, number, load), {"bench": bench})

    def _file(self, name: str, number: int, load: Load) -> Path:
        return self.folder / f"{name}-{number}-{load.key}.json"


def _write(file: Path, data: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    part.replace(file)
