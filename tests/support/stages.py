"""Compile a kernel as ``triton.compile`` does, but only to the stage whose result a test reads.

Machine code (LLVM's back end and ptxas) takes 40 % of the time of a compilation, and most tests only check that a
kernel compiles and how much shared memory it needs. Unlike ``triton.compile`` it does not use Triton's cache on disk.
"""

import re

from triton._C.libtriton import ir
from triton.compiler import make_backend

_ASSEMBLY = re.compile(r'\basm (?:sideeffect )?"((?:[^"\\]|\\.)*)"')


class Compilation:
    """A kernel that is compiled on demand: ``.asm[stage]`` and ``.metadata.name`` run the stages that they need."""

    def __init__(self, source, target, options):
        backend = make_backend(target)
        options = backend.parse_options(options)
        self._context = ir.context()
        ir.load_dialects(self._context)
        backend.load_dialects(self._context)
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        self._module = source.make_ir(target, options, functions, modules, self._context)
        self._stages, self._values = {}, {"target": target, **options.__dict__}
        backend.add_stages(self._stages, options, source.language)
        self.names = tuple(self._stages)
        self._results = {}
        self.asm, self.metadata = _Results(self), _Metadata(self)

    def run(self, last=None):
        """Run the stages up to ``last`` (default: all) that have not run; return its result."""
        last = last or self.names[-1]
        while last not in self._results:
            name = next(iter(self._stages))
            self._module = self._stages.pop(name)(self._module, self._values)
            # The next stage changes a module, so its text is taken now.
            self._results[name] = self._module if isinstance(self._module, (bytes, str)) else str(self._module)
        return self._results[last]

    def value(self, name):
        """Return a value of the metadata; run the stages until one sets it."""
        while name not in self._values and self._stages:
            self.run(next(iter(self._stages)))
        return self._values[name]

    def inline_assembly(self):
        """Return the texts of inline assembly in the LLVM IR."""
        return set(_ASSEMBLY.findall(self.run("llir")))


class _Results:
    """The results of the stages by name, like ``CompiledKernel.asm``."""

    def __init__(self, compilation):
        self._compilation = compilation

    def __contains__(self, name):
        return name in self._compilation.names

    def __getitem__(self, name):
        if name not in self:
            raise KeyError(name)
        return self._compilation.run(name)

    def get(self, name, default=None):
        return self[name] if name in self else default


class _Metadata:
    """The metadata of a kernel, like ``CompiledKernel.metadata``."""

    def __init__(self, compilation):
        self._compilation = compilation

    def __getattr__(self, name):
        try:
            return self._compilation.value(name)
        except KeyError:
            raise AttributeError(name) from None
