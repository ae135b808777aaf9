"""How a custom op of the namespace `dpamoe` is registered: one function for all devices, and its fake."""

import torch


def define(name: str, function, fake, writes: tuple[str, ...] = ()):
    """Register dpamoe::name. fake: shapes and dtypes of the results. writes: arguments that are written in place."""
    op = torch.library.custom_op(f"dpamoe::{name}", function, mutates_args=writes, device_types="cuda")
    op.register_kernel("cpu")(function)
    op.register_fake(fake)
    return op
