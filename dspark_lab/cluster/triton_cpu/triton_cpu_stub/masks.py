"""What Triton's interpreter takes for a mask only where numpy made it one."""

from typing import Any

from triton._C.libtriton import interpreter  # pyright: ignore[reportMissingImports]


def take_masks_of_any_dtype() -> None:
    """A block of truth values joined with a scalar one is of integers there, which its loads and stores refuse.

    Patched below the interpreter itself, which cannot be imported yet while Triton looks for its backends.
    """
    load, store = interpreter.load, interpreter.store

    def masked_load(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        return load(pointers, mask.astype(bool), other, dtype)

    def masked_store(pointers: Any, values: Any, mask: Any) -> None:
        store(pointers, values, mask.astype(bool))

    interpreter.load, interpreter.store = masked_load, masked_store
