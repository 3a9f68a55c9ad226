"""The compiler that Triton asks a backend for; interpreted kernels never reach it."""

from typing import Any, NoReturn

from triton.backends import compiler  # pyright: ignore[reportMissingImports]


def _refuse(*_: Any) -> NoReturn:
    raise NotImplementedError("nothing is compiled for CPUs: set TRITON_INTERPRET=1")


class Compiler(compiler.BaseBackend):
    @staticmethod
    def supports_target(target: Any) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreted"

    parse_options = add_stages = load_dialects = get_module_map = _refuse
