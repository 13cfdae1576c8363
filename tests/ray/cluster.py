"""Ray clusters of the tests' own, functions called in processes that use them, what they leave.

The tests' process never imports Ray: it could join a cluster, or start one.
"""

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests import quick_start
from tests.support.calling import call_in_process
from tests.support.ending import wait_until
from tests.support.serving import ROOT, Session, environment, free_port, wait_for_end

SHIM = Path(__file__).parent / "shim"
RAY = Path(sys.executable).with_name("ray")
START_DEADLINE = 300.0  # seconds; an idle two-core machine needs 40
END_DEADLINE = 60.0  # an idle one needs 2

wait_for = partial(wait_until, seconds=START_DEADLINE, pause=0.25)


def ray_environment() -> dict[str, str]:
    """Variables of a cluster that nobody else can join, from the daemons to the drivers."""
    inherited = {name: value for name, value in environment().items() if name[:4] != "RAY_"}
    return inherited | {
        # Of this cluster: without it Ray keeps one for all in the home directory.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "240",  # 30 otherwise, too few on a busy machine
        "RAY_worker_niceness": "0",  # 15 otherwise: engines would wait for other tests
        "REPORTER_UPDATE_INTERVAL_MS": "60000",  # 5000 otherwise, to look at all processes
        "RAY_prestart_worker_first_driver": "0",  # no worker that no actor needs
    }


def named(name: str, processes: list[psutil.Process]) -> list[psutil.Process]:
    """Processes whose title starts with this."""
    return [process for process in processes if _title(process).startswith(name)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class Cluster:
    """Ray on this machine, open only to processes that have its `environment`.

    Its nodes are started as in examples/cluster.md.

    Args:
        logs: A folder.
        cpus: Of each node, the head first.
        folders: Of PYTHONPATH, before this repository's.
        variables: More of the environment.

    Attributes:
        directory: Where Ray keeps its files and where its workers run.
        environment: All variables of a process that uses the cluster.
    """

    def __init__(self, logs: Path, cpus: Sequence[int], *folders: Path, **variables: str) -> None:
        # Short, because Ray's sockets lie in it: their paths may have 107 characters.
        self.directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.address = f"127.0.0.1:{free_port()}"
        path = os.pathsep.join(map(str, (quick_start.FOLDER, *folders, ROOT)))
        self.environment = ray_environment() | {
            # Without it an engine silently starts a cluster of its own.
            "RAY_ADDRESS": self.address, "PYTHONPATH": path, **variables,
        }  # fmt: skip
        self.metrics_ports = [free_port() for _ in cpus]
        self.nodes: list[Session] = []
        port = self.address.partition(":")[2]
        head = ["--head", f"--port={port}", f"--temp-dir={self.directory}"]
        head += ["--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
        try:
            for number, count in enumerate(cpus):
                options = [f"--address={self.address}"] if number else head
                self._start(logs / f"node-{number}.log", f"--num-cpus={count}", *options)
        except BaseException:
            self.kill()
            raise

    def _start(self, log: Path, *options: str) -> None:
        # `ray start` takes the address to join from its options only.
        environment = {k: v for k, v in self.environment.items() if k != "RAY_ADDRESS"}
        common = ["--block", "--node-ip-address=127.0.0.1", "--object-store-memory=80000000"]
        common.append(f"--metrics-export-port={self.metrics_ports[len(self.nodes)]}")
        command = [str(RAY), "start", *common, *options]
        node = Session(command, environment, log, self.directory)
        self.nodes.append(node)
        wait_for(
            lambda: "Ray runtime started" in node.log or node.check_running(),
            what="the start of a Ray node",
        )

    def named(self, name: str) -> list[psutil.Process]:
        """Processes of the nodes with this title."""
        return named(name, [process for node in self.nodes for process in node.family()])

    def kill(self) -> None:
        """Ends it at once: after Serve has run, a node that is told to end takes half a minute."""
        for node in self.nodes:
            node.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

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
    family = [
        process
        for process in psutil.process_iter(["create_time"])
        if [process.pid, process.info["create_time"]] in found["processes"]
    ]  # not others that were given their ids since
    running = wait_for_end(family, END_DEADLINE)
    for process in running:
        process.kill()
    files = [path for path in found["shared_memory"] if Path(path).exists()]
    for path in files:
        Path(path).unlink()
    return running, files
