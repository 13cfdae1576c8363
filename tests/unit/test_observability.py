"""The example files of operators: metrics in them exist, alerts fire, YAML and JSON are read."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import vllm
import yaml
from prometheus_client import CollectorRegistry

from sequoia_vllm.engine.compat.versions import SUPPORTED_VERSIONS
from sequoia_vllm.metrics.prometheus import PrometheusKinds, TreeMetrics
from sequoia_vllm.tree import TokenTree

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "observability"
DOCKER = ROOT / "examples" / "docker"
FILES = [FOLDER / "alerts.yml", FOLDER / "dashboard.json", ROOT / "docs" / "metrics.md"]


def names(text: str, owner: str) -> set[str]:
    return set(re.findall(rf"\b{owner}:[a-z_]+(?<!_)", text))


@pytest.fixture(scope="module")
def ours() -> set[str]:
    tree = TokenTree.chain(2)
    metrics = TreeMetrics(
        tree, "a test", "m", [0], PrometheusKinds(CollectorRegistry()), expected_speedup=1.0
    )
    metrics.observe(0, None, 2, speedup=1.0)
    return {
        sample.name
        for family in metrics.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_metrics_exist(file, ours):
    text = file.read_text(encoding="utf-8")
    found = names(text, "sequoia")
    assert found
    assert found <= ours
    source = Path(vllm.__file__).parent / "v1" / "metrics" / "loggers.py"
    of_vllm = source.read_text(encoding="utf-8")
    for name in names(text, "vllm") - {"vllm:spec_decode"}:
        assert f'"{re.sub("_(total|sum|count)$", "", name)}"' in of_vllm


def test_every_metric_of_ours_is_documented(ours):
    assert ours <= names((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), "sequoia")


@pytest.mark.parametrize(
    "file",
    [*FOLDER.glob("*.yml"), *(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"],
    ids=lambda file: file.name,
)
def test_yaml_is_read(file):
    assert yaml.safe_load(file.read_text(encoding="utf-8"))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_alerts_fire_when_they_should():
    for arguments in ("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml"):
        done = subprocess.run(
            ["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_a_supported_vllm_with_all_that_the_wheel_takes():
    lines = (DOCKER / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert f"FROM vllm/vllm-openai:v{SUPPORTED_VERSIONS['gpu'][-1]}" in lines
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert all((ROOT / name).exists() for name in copied)
    found = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = found["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    needed = [*included, *found["project"]["license-files"], found["project"]["readme"]]
    assert all(any(Path(name).is_relative_to(part) for part in copied) for name in needed)
