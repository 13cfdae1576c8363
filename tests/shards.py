"""Runs one shard of the tests that not every CI run has time for: ``make test-shard N=3``.

    python -m tests.shards N|next|list

`next` takes the shard whose turn it is: the number of commits decides, so that consecutive pushes
go round. A shard has the tests marked `sharded` of its files, the rehearsal's files over the newest
vLLM, or commands of its own. All of a shard's parts run, also after one has failed. The ten that
these were split from took 3 to 10 minutes on two fast cores, and the shortest 8 on two slow ones.
There, beside other work, 25 minutes were not enough for the first that rehearses the newest vLLM;
the first two took 15 and 13.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sequoia_vllm.engine.compat.versions import SUPPORTED_VERSIONS

ROOT = Path(__file__).parents[1]
NEWEST = SUPPORTED_VERSIONS["gpu"][-1]
WHEELS = ".contract"  # `make contract` keeps vLLM's GPU wheels there
# Parts whose surviving mutants were read: add one when you have read its own.
MUTATED = ("config", "eligibility", "tree")
# Shards' tests are the long ones, and some machines take twice as long as others.
SECONDS = {"PYTEST_TIMEOUT": "1800"}
# Three workers for two cores: engines wait, too.
PYTEST = ("-m", "pytest", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")


@dataclass(frozen=True)
class Shard:
    """Parts of one shard."""

    files: tuple[str, ...] = ()
    """Folders and files of tests; those in them that are marked `sharded` run."""
    rehearsed: tuple[str, ...] = ()
    """Files of the rehearsal; all of their tests run over the newest vLLM."""
    modules: tuple[tuple[str, ...], ...] = ()
    """Modules of tests, with their arguments; ``{commits}`` is the number of commits."""

    def commands(self) -> Iterable[list[str]]:
        """What it runs, each from the root of the checkout."""
        if self.files:
            marked = ("-m", "sharded and not upstream", "--durations", "20")
            yield [sys.executable, *PYTEST, *marked, *self.files]
        if self.rehearsed:
            module = "tests.gpu_rehearsal.other_versions"
            how = ("-m", "", "-n", "3", "--dist", "loadfile", "--durations", "20")
            yield [sys.executable, "-m", module, WHEELS, NEWEST, *how, *self.rehearsed]
        for words in self.modules:
            yield [sys.executable, "-m", *(word.format(commits=commits()) for word in words)]


def of(folder: str, *names: str) -> tuple[str, ...]:
    """Files of tests in one folder, by the middle of their names."""
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


SHARDS = (
    Shard(of("engine", "multimodal", "measuring", "differential", "features")),
    Shard(
        of("engine", "architectures", "interrupts", "lookup", "lora", "mutants", "offload")
        + of("engine", "reasoning", "sampled", "target_graphs", "tensor_parallel")
        + of("engine", "large_trees", "undrafted_steps", "vocabularies")
    ),
    Shard((*of("engine", "train_draft"), "tests/server")),
    Shard(("tests/v2",)),
    Shard(("tests/kernels", "tests/ops", "tests/unit", "tests/gpu_check")),
    Shard(("tests/ray", "tests/ray_examples", *of("gpu_rehearsal", "verify"))),
    Shard(of("gpu_rehearsal", "gpu_run", "server")),
    Shard(of("gpu_rehearsal", "grammars", "mtp_layers", "offloading", "ranks", "slots")),
    Shard(of("gpu_rehearsal", "targets")),
    Shard(
        of(
            "gpu_rehearsal",
            "architectures",
            "dynamic_trees",
            "heads",
            "long_contexts",
            "mutants",
            "requests",
        )
        + of("gpu_rehearsal", "sleeping"),
        modules=(("tests.contract.check_wheels", WHEELS, *SUPPORTED_VERSIONS["gpu"]),),
    ),
    Shard(rehearsed=of("gpu_rehearsal", "gpu_run", "host_copies", "sleeping")),
    Shard(rehearsed=of("gpu_rehearsal", "server", "verify")),
    Shard(rehearsed=of("gpu_rehearsal", "grammars", "offloading", "ranks", "slots")),
    Shard(rehearsed=of("gpu_rehearsal", "targets")),
    Shard(rehearsed=of("gpu_rehearsal", "architectures", "dynamic_trees", "engine", "mtp_layers")),
    Shard(rehearsed=of("gpu_rehearsal", "heads", "long_contexts", "mutants", "requests")),
    Shard(of("engine", "families_run")),
    Shard(
        of("engine", "verify"),
        modules=(("tests.mutants", *MUTATED, "--seed", "{commits}", "--parts", "12"),),
    ),
)


def main() -> int:
    """Runs what the arguments name; 1 if a part failed."""
    chosen = sys.argv[1] if len(sys.argv) == 2 else ""
    if chosen == "list":
        for number, shard in enumerate(SHARDS):
            print(number, *shard.files, *shard.rehearsed, *(words[0] for words in shard.modules))
        return 0
    if chosen == "next":
        chosen = str(commits() % len(SHARDS))
    if not chosen.isdecimal() or int(chosen) >= len(SHARDS):
        sys.exit(f"{__doc__}\nThere are shards 0 to {len(SHARDS) - 1}.")
    print(f"Shard {chosen} of 0 to {len(SHARDS) - 1}", flush=True)
    failed, environment = 0, SECONDS | os.environ
    for command in SHARDS[int(chosen)].commands():
        print("$", *command, flush=True)
        failed |= subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    return 1 if failed else 0


def commits() -> int:
    """The number of commits up to the one that is checked out."""
    count = ["git", "rev-list", "--count", "HEAD"]
    return int(subprocess.run(count, cwd=ROOT, check=True, capture_output=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
