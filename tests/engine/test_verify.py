"""`verify` on real engines: the embedded pair passes, and mistakes in the engine fail it."""

import json

import pytest
from typer.testing import CliRunner
from vllm.distributed import cleanup_dist_env_and_memory

from sequoia_vllm.bench.verify import ALONE, BATCH
from sequoia_vllm.cli import app
from sequoia_vllm.verifying.law import BY_DRAFT
from sequoia_vllm.verifying.report import Outcome, VerifyReport
from tests.support.engines import DEFAULTS
from tests.support.models import DRAFT, MODELS, TARGET
from tests.support.mutating import Mutant, mutants

pytestmark = [pytest.mark.engine, pytest.mark.sharded]

STATIC = {"method": "sequoia", "tree": {"size": 16, "depth": 4}, "dynamic_tree": False}
WORDS = (
    "verify", TARGET, "--draft-model", DRAFT, "--prompts", MODELS / "prompts.jsonl", "--quick",
    "--json", "--dtype", "float32", "--enforce-eager",
    "--kv-cache-memory-bytes", DEFAULTS["kv_cache_memory_bytes"],
    "--speculative-config", json.dumps(STATIC),
)  # fmt: skip
ENGINES = mutants("v1")
MISTAKES = {
    name: ENGINES[name]
    for name in (
        "mask: nodes see one ancestor too many",
        "position: the target reads nodes in a row",
        "commit: into the slot before",
    )
}
# What the sampled check finds: answers to greedy requests stay plain vLLM's.
LAW = Mutant("verification/walk.py", "left = (target - draft)", "left = (target - 0 * draft)", "")


@pytest.fixture(autouse=True)
def _ends():
    yield
    cleanup_dist_env_and_memory()


def verified(code: int = 0, prompts: int = 8) -> VerifyReport:
    """Its report. What engines that break print beside it does not count, but its exit code."""
    done = CliRunner().invoke(app, [str(word) for word in (*WORDS, "--num-prompts", prompts)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    found = VerifyReport.model_validate(json.loads(done.stdout))
    assert done.exit_code == code, found.checks
    return found


def test_the_embedded_pair_passes():
    found = verified()
    others = {c.name: c.outcome for c in found.checks if c.outcome is not Outcome.PASSED}
    assert others == {"trees with graphs are as good as without": Outcome.OFF}
    assert found.verdict is Outcome.PASSED
    assert all(one.identical == one.answers > 0 for one in found.answers)
    assert all(BY_DRAFT in {test.what for test in one.tests} for one in found.law)
    assert found.options["kv_cache_dtype"] == "auto"
    assert {row["method"] for row in found.speed} == {"plain vLLM", "Sequoia"}
    # Nothing of the user's: neither texts nor folders.
    assert str(MODELS) not in json.dumps(found.to_dict())
    assert found.target.name == "target"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_fails_it(name, tmp_path):
    with MISTAKES[name].applied(tmp_path):
        found = verified(code=1, prompts=4)
    assert found.verdict is Outcome.FAILED
    assert {ALONE, BATCH} <= {check.name for check in found.failed}


def test_a_wrong_residual_fails_it(tmp_path):
    with LAW.applied(tmp_path):  # with eight prompts it is found in 40 % of runs
        found = verified(code=1, prompts=24)
    assert [check.name for check in found.failed] == ["sampled tokens follow the target's law"]
    ours, plain = ({test.what: test.p_value for test in one.tests} for one in found.law)
    assert ours[BY_DRAFT] < 1e-5 < plain[BY_DRAFT]
