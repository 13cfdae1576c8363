"""A Ray cluster of two nodes on this machine, and the examples run on it as users run them."""

import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.ray.cluster import Cluster
from tests.support.models import prompts
from tests.support.serving import ROOT, Session, http_client

PROMPTS = prompts(12)
MAX_TOKENS = 32
ENGINE_OPTIONS = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
}  # fmt: skip
EXAMPLES = ROOT / "examples"
ENGINE = "VLLM::EngineCore"
STOP_DEADLINE = 90.0  # seconds


class TwoNodes(Cluster):
    """A head and another node with room for a replica each."""

    def __init__(self, logs: Path) -> None:
        self._http = http_client()
        super().__init__(
            logs, [1, 1],
            RAY_metrics_report_interval_ms="2000",  # 10000 otherwise
            # Ray's own loops take a quarter of a core: this one looks at replicas.
            RAY_SERVE_CONTROL_LOOP_INTERVAL_S="0.5",  # 0.1 otherwise
            RAYLLM_VLLM_ENGINE_CLS="tests.ray_examples.engine_as_on_gpus.VLLMEngine",
        )  # fmt: skip

    def run(self, log: Path, script: str, *options: str) -> Session:
        command = [sys.executable, str(EXAMPLES / script), *options]
        return Session(command, self.environment, log)

    def samples(self, name: str) -> list[Sample]:
        found = []
        for port in self.metrics_ports:
            text = self._http.get(f"http://127.0.0.1:{port}/metrics").text
            # Ray has a thousand others, and the parser is slow.
            lines = [line for line in text.splitlines() if line.startswith(name)]
            families = text_string_to_metric_families("\n".join(lines) + "\n")
            found += [s for family in families for s in family.samples if s.name == name]
        return found
