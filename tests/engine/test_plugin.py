"""Registration: the ledger is complete, the contract is checked, plain vLLM is untouched."""

import inspect
import json
import os
import subprocess
import sys

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerManager

from sequoia_vllm import plugin
from sequoia_vllm.engine import contract, cpu_attention, hooks, proposer, runner_v1, worker
from sequoia_vllm.engine.ledger import OVERRIDES
from tests.engine.models import TARGET, prompts

OUR_SUBCLASSES = (
    worker.SequoiaCPUWorker,
    runner_v1.SequoiaCPUModelRunner,
    proposer.SequoiaProposer,
    cpu_attention.CPUTreeAttentionBackend,
    cpu_attention.CPUTreeAttentionImpl,
    cpu_attention.CPUTreeAttentionMetadataBuilder,
)


def overridden_methods() -> set[str]:
    """``Class.method`` of vLLM for each method that a subclass of ours overrides."""
    found = set()
    for ours in OUR_SUBCLASSES:
        for name, member in vars(ours).items():
            is_method = inspect.isfunction(member) or isinstance(member, (staticmethod, property))
            owners = [base for base in ours.__mro__[1:] if name in vars(base)]
            if is_method and name != "__init__" and owners and owners[0] is not object:
                bases = {base.__name__ for base in ours.__mro__[1:]}
                found.add((name, frozenset(bases)))
    return found


def test_ledger_lists_every_override():
    listed = {tuple(o.what.split(".")) for o in OVERRIDES if o.kind == "subclass"}
    for name, bases in overridden_methods():
        assert any(method == name and owner in bases for owner, method in listed), name
    for owner, method in listed:
        assert any(method == name and owner in bases for name, bases in overridden_methods()), (
            f"{owner}.{method} is listed but not overridden"
        )


def test_ledger_lists_every_patch():
    plugin.register()
    patched = {
        f"{owner.__name__}.{name}"
        for owner in (EngineArgs, SamplingParams, Scheduler, StatLoggerManager, LLMEngine)
        for name in dir(owner)
        if hasattr(inspect.getattr_static(owner, name), hooks._MARK)
        or hasattr(getattr(owner, name, None), hooks._MARK)
    }
    assert patched == {o.what for o in OVERRIDES if o.kind == "patch"}
    source = "".join(inspect.getsource(module) for module in (worker, runner_v1))
    for override in (o for o in OVERRIDES if o.kind == "swap"):
        module, name = override.what.split(".")
        assert f'swapped({module}, "{name}"' in source
    assert source.count("with swapped(") == sum(o.kind == "swap" for o in OVERRIDES)


def test_every_override_says_why_and_when_it_can_go():
    assert all(o.why and o.removable for o in OVERRIDES)
    assert len({o.what for o in OVERRIDES}) == len(OVERRIDES)


def test_registering_twice_wraps_once():
    plugin.register()
    first = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is first
    assert not hasattr(getattr(first, hooks._MARK), hooks._MARK)


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("sequoiaa", "neither a JSON object nor the word sequoia (did you mean sequoia?). Write"),
        ("ngram", "neither a JSON object nor the word sequoia. Write sequoia alone"),
        ('{"method": "sequoia"', "not valid JSON: Expecting ',' delimiter: line 1 column 21"),
    ],
)
def test_misspelt_speculative_config_names_the_fix(capsys, value, fix):
    plugin.register()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--speculative-config", value])
    [message] = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert f"--speculative-config/-sc: {value!r} is {fix}" in message
    assert """'{"method": "sequoia", "model": "DRAFT"}'""" in message
    assert " at 0x" not in message


def test_vllm_that_lacks_what_we_patch_still_starts(monkeypatch):
    monkeypatch.setattr(hooks, "EngineArgs", object())
    plugin.register()


def test_contract_fits_this_vllm():
    assert contract.differences() == []


@pytest.mark.parametrize(
    "wrong",
    [
        contract.Expected("vllm.no_such_module:Thing"),
        contract.Expected("vllm.engine.arg_utils:EngineArgs.no_such_method"),
        contract.Expected("vllm.engine.arg_utils:EngineArgs.add_cli_args", ("parser", "more")),
    ],
)
def test_contract_reports_what_differs(monkeypatch, wrong):
    monkeypatch.setattr(contract, "CONTRACT", (*contract.CONTRACT, wrong))
    contract.check_contract.cache_clear()
    with pytest.raises(contract.ContractError) as error:
        contract.check_contract()
    contract.check_contract.cache_clear()
    message = str(error.value)
    assert wrong.path in message
    assert all(version in message for version in contract.SUPPORTED_VERSIONS)
    assert "pip install" in message


PLAIN = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256,
              seed=0, kv_cache_memory_bytes=64 << 20)
    params = [SamplingParams(temperature=t, max_tokens=32) for t in (0, 1.0, 0.7)]
    outputs = llm.generate(json.loads(sys.argv[2]), params, use_tqdm=False)
    config = llm.llm_engine.vllm_config
    print("RESULT" + json.dumps({
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "worker": config.parallel_config.worker_cls,
        "additional": config.additional_config,
        "registered": hasattr(EngineArgs.create_engine_config, "_sequoia_original"),
    }))
"""


@pytest.mark.engine
def test_plain_vllm_is_untouched_when_the_plugin_is_unused():
    """Same seed, same tokens (greedy and sampled), same worker, with and without the plugin."""
    results = {}
    for plugins in ("sequoia", "none"):
        env = {
            **os.environ,
            "VLLM_PLUGINS": plugins,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # one thread; "auto" takes all cores
        }
        done = subprocess.run(
            [sys.executable, "-c", PLAIN, TARGET, json.dumps(prompts(3))],
            env=env, capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
        results[plugins] = json.loads(line.removeprefix("RESULT"))
    assert results["sequoia"].pop("registered") is True
    assert results["none"].pop("registered") is False
    assert results["sequoia"] == results["none"]
