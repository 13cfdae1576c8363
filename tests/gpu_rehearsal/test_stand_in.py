"""The stand-ins do what the rehearsal rests on."""

import pytest

from tests.gpu_rehearsal import stand_in_checks
from tests.support.on_gpu import call_on_gpu

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return call_on_gpu(stand_in_checks.run_all, tmp_path_factory.mktemp("stand-in"), timeout=120)


@pytest.mark.parametrize("name", stand_in_checks.CHECKS)
def test_stand_in(name, results):
    assert results[name] == ""
