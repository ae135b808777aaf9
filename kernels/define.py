"""How a custom op of the namespace `dpamoe` is registered: one function for all devices, and its fake."""

import torch


def define(name: str, function, fake, writes: tuple[str, ...] = (), schema: str | None = None):
    """Register dpamoe::name. fake: shapes and dtypes of the results. writes: arguments that are written in place.

    schema: where annotations do not say it.
    """
    op = torch.library.custom_op(f"dpamoe::{name}", function, mutates_args=writes, device_types="cuda", schema=schema)
    op.register_kernel("cpu")(function)
    op.register_fake(fake)
    return op


def define_counted(name: str, function, fake) -> tuple:
    """Register dpamoe::name and dpamoe::name_counted, which takes the tensor that `function` takes first and writes into it.

    Two ops, since what is written must not be left out: older versions of torch look for it among the arguments.
    """
    schema = torch.library.infer_schema(function, mutates_args=("spent",))
    optional = schema[schema.index("(") + 1 : schema.index(" spent, ")]
    plain = schema.replace(f"{optional} spent, ", "", 1)
    return (
        define(name, lambda *args, **named: function(None, *args, **named), fake, schema=plain),
        define(
            f"{name}_counted", function, lambda spent, *args, **named: fake(*args, **named), ("spent",),
            schema=schema.replace(optional, optional.replace("?", ""), 1),
        ),
    )  # fmt: skip
