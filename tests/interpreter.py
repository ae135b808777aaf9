"""Triton's interpreter, twice as fast: what it would set up or make again at every step of a kernel is made once."""

from functools import cache

import triton.language as tl
from triton.runtime import interpreter


def speed_up():
    """From now on, in this process. What kernels compute stays the same; sums of int32 are not tried in int64 too."""
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _numpy_types(interpreter._get_np_dtype)
    interpreter.InterpreterBuilder.get_block_ty = lambda builder, dtype, shape: _block(dtype, shape)
    tl.block_type.with_element_ty = lambda block, dtype: _block(dtype, block.shape)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _once_a_launch(patch):
    """As the function that puts the interpreter in place of a language; not again for each function that a kernel calls."""
    done = set()

    def patch_once(function):
        seen = _modules_seen(function)
        if seen <= done:  # it is called by a kernel that runs
            return None
        scope = patch(function)
        restore = scope.restore

        def end_of_launch():
            done.clear()
            restore()

        scope.restore = end_of_launch
        done.update(seen)
        return scope

    return patch_once


@cache
def _modules_seen(function):
    """Modules of the language by the names that a function sees."""
    return frozenset(value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core)


def _numpy_types(of):
    """From types to those of numpy, by a table that is not made again each time."""
    known = cache(of)
    return lambda dtype: of(dtype) if isinstance(dtype.scalar, tl.pointer_type) else known(dtype.scalar)


def _block(dtype, shape):
    """The type of a tensor; of pointers, which cannot be looked up, a new one."""
    return tl.block_type(dtype, shape) if isinstance(dtype, tl.pointer_type) else _block_of_numbers(dtype, *shape)


@cache
def _block_of_numbers(dtype, *shape):
    return tl.block_type(dtype, list(shape))
