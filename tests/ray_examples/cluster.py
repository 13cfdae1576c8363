"""A Ray cluster of two nodes on this machine, and the examples run on it as users run them."""

import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests import quick_start
from tests.ray.cluster import ray_environment
from tests.support.ending import wait_until
from tests.support.models import prompts
from tests.support.serving import ROOT, Session, free_port, http_client

PROMPTS = prompts(12)
MAX_TOKENS = 32
ENGINE_OPTIONS = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
}  # fmt: skip
RAY = Path(sys.executable).with_name("ray")
EXAMPLES = ROOT / "examples"
ENGINE = "VLLM::EngineCore"
START_DEADLINE = 300.0  # seconds; an idle two-core machine needs 40
STOP_DEADLINE = 90.0


wait_for = partial(wait_until, seconds=START_DEADLINE, pause=0.25)


def named(name: str, processes: list[psutil.Process]) -> list[psutil.Process]:
    """Processes whose title starts with this."""
    return [process for process in processes if _title(process).startswith(name)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class Cluster:
    """A head and another node with room for a replica each, started as in examples/cluster.md."""

    def __init__(self, logs: Path) -> None:
        # Short, as the paths of sockets in it may not be long.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.address = f"127.0.0.1:{free_port()}"
        self.environment = ray_environment() | {
            "RAY_ADDRESS": self.address,
            "RAY_metrics_report_interval_ms": "2000",  # 10000 otherwise
            # Ray's own loops take a quarter of a core: they look at processes, and at replicas.
            "REPORTER_UPDATE_INTERVAL_MS": "60000",  # 5000 otherwise
            "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # 0.1 otherwise
            "RAY_worker_niceness": "0",  # 15 otherwise: engines would wait for other tests
            "RAYLLM_VLLM_ENGINE_CLS": "tests.ray_examples.engine_as_on_gpus.VLLMEngine",
            "PYTHONPATH": os.pathsep.join((quick_start.FOLDER, str(ROOT))),
        }
        self.metrics_ports = [free_port(), free_port()]
        self._http = http_client()
        self.nodes: list[Session] = []
        try:
            port = self.address.partition(":")[2]
            head = ["--head", f"--port={port}", f"--temp-dir={self.folder}", "--num-cpus=1"]
            head += ["--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
            self._start(logs / "head.log", *head)
            self._start(logs / "node.log", f"--address={self.address}", "--num-cpus=1")
        except BaseException:
            self.kill()
            raise

    def _start(self, log: Path, *options: str) -> None:
        # `ray start` takes the address to join from its options only.
        environment = {k: v for k, v in self.environment.items() if k != "RAY_ADDRESS"}
        common = ["--block", "--node-ip-address=127.0.0.1", "--object-store-memory=80000000"]
        common.append(f"--metrics-export-port={self.metrics_ports[len(self.nodes)]}")
        node = Session([str(RAY), "start", *common, *options], environment, log)
        self.nodes.append(node)
        wait_for(
            lambda: "Ray runtime started" in node.log or node.check_running(),
            what="the start of a Ray node",
        )

    def run(self, log: Path, script: str, *options: str) -> Session:
        command = [sys.executable, str(EXAMPLES / script), *options]
        return Session(command, self.environment, log)

    def named(self, name: str) -> list[psutil.Process]:
        """Processes of the nodes with this title."""
        return named(name, [process for node in self.nodes for process in node.family()])

    def samples(self, name: str) -> list[Sample]:
        found = []
        for port in self.metrics_ports:
            text = self._http.get(f"http://127.0.0.1:{port}/metrics").text
            # Ray has a thousand others, and the parser is slow.
            lines = [line for line in text.splitlines() if line.startswith(name)]
            families = text_string_to_metric_families("\n".join(lines) + "\n")
            found += [s for family in families for s in family.samples if s.name == name]
        return found

    def kill(self) -> None:
        """Ends it at once: after Serve has run, a node that is told to end takes half a minute."""
        for node in self.nodes:
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
