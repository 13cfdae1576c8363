"""Every kernel compiles for the GPUs we name, keeps to registers and fits shared memory.

In processes of their own: Triton compiles nothing where TRITON_INTERPRET is set. The
largest variants of each kernel are compiled here; the pages of tests/kernels/compiled
have all of them, with every Triton that we support.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sequoia_vllm.kernels.compile_report import (
    CAPABILITIES,
    SHARED_MEMORY_LIMITS,
    Resources,
    all_variants,
    tasks_of,
)

PAGES = Path(__file__).parents[1] / "kernels" / "compiled"
LINE = re.compile(
    r"sm_(?P<capability>\d+) +(?P<name>\S.*?) +(?P<registers>\d+) registers"
    r" +(?P<spilled_bytes>\d+) B spilled +(?P<shared_bytes>\d+) B shared"
)


def run_report(*arguments, **environment):
    command = [sys.executable, "-m", "sequoia_vllm.kernels.compile_report", *arguments]
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, check=False
    )


def read_page(version):
    lines = (PAGES / f"triton-{version}.md").read_text().splitlines()
    found = [line.groupdict() for line in map(LINE.fullmatch, lines) if line]
    return [
        Resources(**{key: value if key == "name" else int(value) for key, value in row.items()})
        for row in found
    ]


def names(tasks):
    return [(variant.name, capability) for variant, capability in tasks]


def assert_no_device_refuses(table):
    limits = SHARED_MEMORY_LIMITS
    refused = [
        row for row in table if row.spilled_bytes or row.shared_bytes > limits[row.capability]
    ]
    assert refused == []


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    file = tmp_path_factory.mktemp("report") / "report.json"
    done = run_report("--json", str(file), "--in-every-test")
    assert done.returncode == 0, done.stderr[-4000:]
    return [Resources(**row) for row in json.loads(file.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_without_spills(report, capability):
    compiled = [row for row in report if row.capability == capability]
    expected = names(tasks_of([capability], in_every_test=True))
    assert [(row.name, capability) for row in compiled] == expected
    assert_no_device_refuses(compiled)


def test_every_kernel_is_compiled_here():
    kernels = {variant.kernel.__name__ for variant in all_variants()}
    assert {variant.kernel.__name__ for variant, _ in tasks_of(in_every_test=True)} == kernels
    assert len(kernels) >= 7


@pytest.mark.parametrize("version", ["3.7.1", "3.8.0", "3.9.0"])
def test_recorded_pages_have_every_variant_without_spills(version):
    """`python tests/kernels/record_compiled.py DIRECTORY` writes them again."""
    table = read_page(version)
    assert [(row.name, row.capability) for row in table] == names(tasks_of())
    assert_no_device_refuses(table)


def test_every_variant_is_compiled_for_some_device():
    for variant in all_variants():
        assert variant.capabilities, variant.name
        assert set(variant.capabilities) <= set(CAPABILITIES)


def test_the_interpreter_is_refused():
    """It would report on nothing."""
    done = run_report("--only", "merge_splits", "--processes", "1", TRITON_INTERPRET="1")
    assert done.returncode != 0
    assert "TRITON_INTERPRET" in done.stderr
