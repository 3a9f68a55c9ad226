"""The driver that Triton finds for a CPU: always there, of device ``cpu``."""

from typing import Any, NoReturn

import torch
from triton.backends import driver  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

from triton_cpu_stub.masks import take_masks_of_any_dtype  # pyright: ignore[reportMissingImports]

take_masks_of_any_dtype()  # DFlash2's walk over candidates needs it


class Driver(driver.DriverBase):
    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        raise NotImplementedError("nothing is compiled for CPUs: set TRITON_INTERPRET=1")

    def get_benchmarker(self) -> NoReturn:
        raise NotImplementedError("interpreted kernels are not tuned")
