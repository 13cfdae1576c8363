"""The other side of `tests.support.calling`: calls the function that it is told to call.

A module, not an argument of the interpreter: engines are spawned, and spawning
runs the main module again.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def call_and_save(module: str, name: str, arguments: dict[str, Any], result: str) -> None:
    """Writes what the function returns, as JSON, to the file `result`."""
    answer = getattr(importlib.import_module(module), name)(**arguments)
    Path(result).write_text(json.dumps(answer))


if __name__ == "__main__":
    module, name, arguments, result = sys.argv[1:]
    call_and_save(module, name, json.loads(arguments), result)
