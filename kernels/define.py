"""How a custom op of the namespace `dpamoe` is registered: one function for all devices, and its fake."""

import inspect

import torch


def define(name: str, function, fake, writes: tuple[str, ...] = ()):
    """Register dpamoe::name. fake: shapes and dtypes of the results. writes: arguments that are written in place."""
    op = torch.library.custom_op(f"dpamoe::{name}", function, mutates_args=writes, device_types="cuda")
    op.register_kernel("cpu")(function)
    op.register_fake(fake)
    return op


def define_counted(name: str, function, fake) -> tuple:
    """Register dpamoe::name and dpamoe::name_counted, which takes the tensor that `function` takes first and writes into it.

    Two ops, since what is written must not be left out: older versions of torch look for it among the arguments.
    """
    whole = inspect.signature(function)
    written, *others = whole.parameters.values()

    def plain(*args, **named):
        return function(None, *args, **named)

    def counted(*args, **named):
        return function(*args, **named)

    plain.__signature__ = whole.replace(parameters=others)
    counted.__signature__ = whole.replace(parameters=[written.replace(annotation=torch.Tensor), *others])
    return (
        define(name, plain, fake),
        define(f"{name}_counted", counted, lambda written, *args, **named: fake(*args, **named), (written.name,)),
    )
