"""A local Ray cluster of its own, and functions that are called in processes that may use it.

The tests' process never imports Ray: it could join a cluster, or start one.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests import quick_start
from tests.ray.environment import ray_environment
from tests.ray.processes import END_DEADLINE
from tests.support.calling import call_in_process
from tests.support.serving import ROOT, has_ended, wait_for_end

SHIM = Path(__file__).parent / "shim"
ACTOR = "RayWorkerOnCpu"  # the shim's class: Ray names processes after what they run
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
        """The processes of vLLM's workers."""
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
