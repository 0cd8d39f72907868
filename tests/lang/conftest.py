"""Fixtures for tests of the interpreter."""

import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions


@pytest.fixture(scope="module")
def semantic():
    """Triton's own semantic, without the library's replacements, and with the types of the interpreter."""
    builder, scope = InterpreterBuilder(), interpreter._LangPatchScope()
    builder.options = InterpreterOptions(sanitize_overflow=False)
    interpreter._patch_lang_core(tl, scope)
    yield TritonSemantic(builder)
    scope.restore()
