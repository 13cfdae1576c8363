"""Keeps metrics current where no step does it: between steps, and after the last one."""

import threading
import time

from sequoia_vllm.metrics.prometheus import TreeMetrics

_FLUSH_SECONDS = 1.0
_IDLE_SECONDS = 10.0  # without a step: then an engine has no load


class Watch:
    """Flushes the counters of busy engines every second, and takes away gauges of idle ones.

    A thread does it, as steps may end at any time. It ends when all engines are idle.

    Args:
        metrics: Those of the engines.
    """

    def __init__(self, metrics: TreeMetrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._stepped: dict[int, float] = {}  # when each engine that is not idle made its last step
        self._has_thread = False

    def note_step(self, engine: int) -> None:
        """Takes note that the engine made a step, which the metrics have observed."""
        with self._lock:
            self._stepped[engine] = time.monotonic()
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self._has_thread:
            time.sleep(_FLUSH_SECONDS)
            with self._lock:
                idle_since = time.monotonic() - _IDLE_SECONDS
                for engine, stepped in list(self._stepped.items()):
                    self._metrics.flush(engine)
                    if stepped <= idle_since:
                        self._metrics.rest(engine)
                        del self._stepped[engine]
                self._has_thread = bool(self._stepped)
