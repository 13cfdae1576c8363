"""C++ that belongs to the package, compiled on the machine it runs on."""

import logging
from ctypes import CDLL
from pathlib import Path

logger = logging.getLogger("vllm.sequoia.cpp")  # shown by vLLM's own handler


def load_library(source: Path, without: str) -> CDLL | None:
    """The library of a source file; None where it cannot be compiled.

    It is compiled once per machine by torch.compile's toolchain, and kept in its cache.

    Args:
        source: A file that needs no other of ours.
        without: What happens where there is no compiler, for the log: a sentence, no period.
    """
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    code = source.read_text(encoding="utf-8")
    try:
        library: CDLL = CppCodeCache.load(
            code, extra_flags=("-ffp-contract=fast",), needs_vec_isa=True
        )
    except (CppCompileError, InvalidCxxCompiler, OSError) as error:
        fix = "install a C++ compiler (g++), as torch.compile needs one too."
        logger.warning("Sequoia: %s: %s %s", without, fix, str(error).strip().splitlines()[-1])
        return None
    return library
