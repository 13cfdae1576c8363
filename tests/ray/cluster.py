"""A local Ray cluster of its own, and functions that are called in processes that may use it.

The tests' process never imports Ray: it could join a cluster, or start one.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.ray.processes import END_DEADLINE, wait_for_end
from tests.server.serving import ROOT, environment, has_ended

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

# A file, not an argument of the interpreter: engines are spawned, and spawning
# runs the main module again.
CHILD = """
import importlib, json, sys
module, name, arguments, result = sys.argv[1:]
if __name__ == "__main__":
    answer = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    with open(result, "w") as file:
        json.dump(answer, file)
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
        theirs = {name: value for name, value in environment().items() if name[:4] != "RAY_"}
        self.environment = theirs | {
            "PYTHONPATH": os.pathsep.join(map(str, (SHIM, ROOT))),
            # Of this cluster: without it Ray keeps one for all in the home directory.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "240",  # 30 otherwise, too few on a busy machine
            "RAY_prestart_worker_first_driver": "0",  # no worker that no actor needs
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
        self,
        function: Callable[..., Any],
        directory: Path,
        timeout: float = 280,
        **arguments: Any,
    ) -> Any:
        """What `function(**arguments)` returns in a process of its own that uses the cluster.

        The function is imported there by its module and name, so it stands at
        the top of a module; arguments and result are what JSON can hold. The
        process runs in `directory`. Raises AssertionError, with the end of its
        output, when it fails or is not done after `timeout` seconds.
        """
        script, result, log = (directory / name for name in ("call.py", "result.json", "log"))
        script.write_text(CHILD)
        result.unlink(missing_ok=True)
        command = [script, function.__module__, function.__name__, json.dumps(arguments), result]
        with log.open("wb") as output:
            process = psutil.Popen(
                [sys.executable, *map(str, command)],
                cwd=directory, env=self.environment, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        try:
            status = process.wait(timeout)
        except psutil.TimeoutExpired:
            status = f"none after {timeout:.0f} s"
        finally:
            if not has_ended(process):
                for one in [*process.children(recursive=True), process]:
                    one.kill()
        if status != 0:
            tail = log.read_text(errors="replace")[-8000:]
            raise AssertionError(f"{function.__name__} ended with status {status}:\n{tail}")
        return json.loads(result.read_text())
