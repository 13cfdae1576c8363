"""The field of pydantic models that names a method. Kernels are checked without pydantic."""

from typing import Annotated

from pydantic import AfterValidator

from sequoia_vllm.verification.methods import method_of

MethodName = Annotated[str, AfterValidator(lambda name: method_of(name).name)]
"""Name of a registered method of verification."""
