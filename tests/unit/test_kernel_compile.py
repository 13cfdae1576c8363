"""Every kernel compiles for the GPUs we name, keeps to registers and fits shared memory.

In processes of their own: Triton compiles nothing where TRITON_INTERPRET is set.
"""

import json
import os
import subprocess
import sys

import pytest

from sequoia_vllm.kernels.compile_report import (
    CAPABILITIES,
    SHARED_MEMORY_LIMITS,
    Resources,
    all_variants,
)


def run_report(*arguments, **environment):
    command = [sys.executable, "-m", "sequoia_vllm.kernels.compile_report", *arguments]
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    file = tmp_path_factory.mktemp("report") / "report.json"
    done = run_report("--json", str(file))
    assert done.returncode == 0, done.stderr[-4000:]
    return [Resources(**row) for row in json.loads(file.read_text())]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_without_spills(report, capability):
    compiled = [row for row in report if row.capability == capability]
    expected = [variant.name for variant in all_variants() if variant.is_for(capability)]
    assert [row.name for row in compiled] == expected
    assert expected
    limit = SHARED_MEMORY_LIMITS[capability]
    assert [row for row in compiled if row.spilled_bytes or row.shared_bytes > limit] == []


def test_every_variant_is_compiled_for_some_device():
    for variant in all_variants():
        assert any(map(variant.is_for, CAPABILITIES)), variant.name


def test_the_interpreter_is_refused():
    """It would report on nothing."""
    done = run_report("--only", "merge_splits", "--processes", "1", TRITON_INTERPRET="1")
    assert done.returncode != 0
    assert "TRITON_INTERPRET" in done.stderr
