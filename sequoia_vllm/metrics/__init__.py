"""Shows how a serving engine's trees do: counters, Prometheus metrics, a log line.

The worker counts (`StepStats`), `engine.common.step_messages` carries the counts to
vLLM's front end, and this package, which does not import vLLM, shows them.
"""
