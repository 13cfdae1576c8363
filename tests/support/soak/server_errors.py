"""What a server logged about its own errors."""

import re

_PROCESS = re.compile(r"\(\w+ pid=\d+\) ")
_MOST_LINES = 120


def logged_errors(log: str) -> list[str]:
    """Lines of errors and tracebacks in a log of vLLM, the first of them: the cause is there.

    vLLM's loggers mark each line with its level. What Python prints of a process that ends has no
    level; there a traceback goes to the first line that is not indented.
    """
    found, is_traceback = [], False
    for line in log.splitlines():
        said = _PROCESS.sub("", line, count=1)
        begins = said.startswith("Traceback (most recent call last):")
        if is_traceback or begins or said.startswith(("ERROR ", "CRITICAL ")):
            found.append(line)
        is_traceback = begins or (is_traceback and said.startswith((" ", "\t")))
    return found[:_MOST_LINES]
