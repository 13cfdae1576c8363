"""The stand-ins do what the rehearsal rests on."""

import pytest

from tests.gpu_rehearsal import stand_in_checks
from tests.support.calling import called_once
from tests.support.on_gpu import call_on_gpu

pytestmark = pytest.mark.slow


results = called_once(call_on_gpu, stand_in_checks.run_all, timeout=120)


@pytest.mark.parametrize("name", stand_in_checks.CHECKS)
def test_stand_in(name, results):
    assert results[name] == ""
