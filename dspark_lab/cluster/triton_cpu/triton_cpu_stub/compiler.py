"""The compiler that Triton asks a backend for; interpreted kernels never reach it."""

from typing import Any, NoReturn

from triton.backends import compiler  # pyright: ignore[reportMissingImports]

REFUSAL = "nothing is compiled for CPUs: set TRITON_INTERPRET=1"


class Compiler(compiler.BaseBackend):
    @staticmethod
    def supports_target(target: Any) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        raise NotImplementedError(REFUSAL)

    def add_stages(self, stages: dict[str, Any], options: object, language: Any) -> NoReturn:
        raise NotImplementedError(REFUSAL)

    def load_dialects(self, context: Any) -> NoReturn:
        raise NotImplementedError(REFUSAL)

    def get_module_map(self) -> NoReturn:
        raise NotImplementedError(REFUSAL)
