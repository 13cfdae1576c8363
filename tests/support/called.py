"""The other side of `tests.support.calling`: calls the function that it is told to call.

A module, not an argument of the interpreter: engines are spawned, and spawning
runs the main module again.
"""

import importlib
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    module, name, arguments, result = sys.argv[1:]
    answer = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(result).write_text(json.dumps(answer))
