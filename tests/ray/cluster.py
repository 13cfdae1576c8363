"""A local Ray cluster of its own, functions called in processes that may use it, what they leave.

The tests' process never imports Ray: it could join a cluster, or start one.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from tests import quick_start
from tests.support.calling import call_in_process
from tests.support.serving import ROOT, environment, has_ended, wait_for_end

SHIM = Path(__file__).parent / "shim"
ACTOR = "RayWorkerOnCpu"  # the shim's class: Ray names processes after what they run
END_DEADLINE = 60.0  # seconds; an idle two-core machine needs 2
CPUS = 2  # as many as the largest engine has ranks: one that kept its CPUs would block the next

OWNER = """
import sys, ray
ray.init(
    num_cpus=int(sys.argv[1]), num_gpus=0, object_store_memory=80 << 20,
    include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[2],
)
print("address:", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()  # until the tests close it, or end
ray.shutdown()
"""


def ray_environment() -> dict[str, str]:
    """Variables of a cluster that nobody else can join, from the daemons to the drivers."""
    inherited = {name: value for name, value in environment().items() if name[:4] != "RAY_"}
    return inherited | {
        # Of this cluster: without it Ray keeps one for all in the home directory.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "240",  # 30 otherwise, too few on a busy machine
        "RAY_prestart_worker_first_driver": "0",  # no worker that no actor needs
    }


class Cluster:
    """Ray on this machine, open only to processes that have its `environment`.

    Attributes:
        directory: Where Ray keeps its files and where its workers run.
        environment: All variables of a process that uses the cluster.
    """

    def __init__(self) -> None:
        # Short, because Ray's sockets lie in it: their paths may have 107 characters.
        self.directory = Path(tempfile.mkdtemp(prefix="ray-"))
        self.environment = ray_environment() | {
            "PYTHONPATH": os.pathsep.join(map(str, (quick_start.FOLDER, SHIM, ROOT)))
        }
        log = self.directory / "owner.log"
        with log.open("wb") as errors:
            self._owner = psutil.Popen(
                [sys.executable, "-c", OWNER, str(CPUS), str(self.directory)],
                cwd=self.directory, env=self.environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        for line in self._owner.stdout:
            if line.startswith("address: "):
                # Without it an engine silently starts a cluster of its own.
                self.environment["RAY_ADDRESS"] = line.split()[1]
                return
        output = log.read_text(errors="replace")
        self.stop()
        raise AssertionError(f"Ray did not start:\n{output[-8000:]}")

    def actors(self) -> list[psutil.Process]:
        family = self._owner.children(recursive=True)
        return [process for process in family if ACTOR in " ".join(process.cmdline())]

    def stop(self) -> None:
        """Ends Ray, and fails if that leaves a process behind."""
        family = [] if has_ended(self._owner) else self._owner.children(recursive=True)
        self._owner.stdin.close()
        running = wait_for_end([self._owner, *family], END_DEADLINE)
        for process in running:
            process.kill()
        self._owner.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
        assert not running, f"Ray left processes behind: {running}"

    def call(
        self, function: Callable[..., Any], directory: Path, timeout: float = 280, **arguments: Any
    ) -> Any:
        """What `function(**arguments)` returns in a process of its own that uses the cluster.

        See `call_in_process`; the process runs in `directory`.
        """
        return call_in_process(
            function, directory, self.environment, timeout, directory, **arguments
        )


def footprint(parents: Iterable[psutil.Process]) -> dict[str, Any]:
    """These processes with those that they started, and the files in /dev/shm that they share."""
    family = {one for parent in parents for one in (parent, *parent.children(recursive=True))}
    return {
        "processes": [[process.pid, process.create_time()] for process in family],
        "shared_memory": sorted({path for process in family for path in shared_memory(process)}),
    }


def shared_memory(process: psutil.Process) -> list[str]:
    """Mapped files of /dev/shm that still have their name, so that they can be left behind."""
    paths = {entry.path for entry in process.memory_maps(grouped=True)}
    return [path for path in paths if path.startswith("/dev/shm/") and Path(path).exists()]


def left_behind(found: dict[str, Any]) -> tuple[list[psutil.Process], list[str]]:
    """Which of a footprint's processes still run, and which of its files lie there still.

    Waits for the processes to end, kills those that do not, and removes the files.
    """
    family = [same_process(number, created) for number, created in found["processes"]]
    running = wait_for_end([process for process in family if process], END_DEADLINE)
    for process in running:
        process.kill()
    files = [path for path in found["shared_memory"] if Path(path).exists()]
    for path in files:
        Path(path).unlink()
    return running, files


def same_process(number: int, created: float) -> psutil.Process | None:
    """The process of this id, unless it is another one that was given the id since."""
    try:
        process = psutil.Process(number)
        return process if process.create_time() == created else None
    except psutil.NoSuchProcess:
        return None
