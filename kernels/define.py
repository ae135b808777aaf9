"""How a custom op of the namespace `dpamoe` is registered: one function for all devices, and its fake."""

import inspect

import torch

_LIBRARY = torch.library.Library("dpamoe", "FRAGMENT")


def define(name: str, function, fake, writes: tuple[str, ...] = ()):
    """Register dpamoe::name. fake: shapes and dtypes of the results. writes: arguments that are written in place."""
    if writes:
        return _define_writing(name, function, fake, writes)
    op = torch.library.custom_op(f"dpamoe::{name}", function, mutates_args=(), device_types="cuda")
    op.register_kernel("cpu")(function)
    op.register_fake(fake)
    return op


def _define_writing(name: str, function, fake, writes: tuple[str, ...]):
    """As `torch.library.custom_op`, which for such an op goes through the schema at every call: .4 ms for 27 arguments."""
    schema = torch.library.infer_schema(function, mutates_args=writes)
    _LIBRARY.define(name + schema, tags=[torch.Tag.pt2_compliant_tag])
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, torch._disable_dynamo(function), device)
    torch.library.register_fake(f"dpamoe::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.dpamoe, name).default

    def without_gradient(*arguments, **named):
        with torch._C._AutoDispatchBelowAutograd():
            found = op(*arguments, **named)
        if found is None or not torch.is_grad_enabled() or not any(map(_is_trained, (*arguments, *named.values()))):
            return found
        several = isinstance(found, tuple)
        refused = _Refusal.apply(name, torch.zeros(0, requires_grad=True), *(found if several else (found,)))
        return refused if several else refused[0]

    _LIBRARY.impl(name, torch._disable_dynamo(without_gradient), "Autograd")
    return op


def _is_trained(value) -> bool:
    """Whether a tensor, or one of several, has gradients."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    return isinstance(value, (list, tuple)) and any(map(_is_trained, value))


class _Refusal(torch.autograd.Function):
    """Passes the results of an op on, and refuses to go back through it."""

    @staticmethod
    def forward(ctx, name, required, *found):
        ctx.name = name
        ctx.mark_non_differentiable(*(tensor for tensor in found if not tensor.is_floating_point()))
        return tuple(tensor.view_as(tensor) for tensor in found)

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(
            f"dpamoe::{ctx.name} has no gradient: nothing is trained through encoded experts; call the model under "
            "torch.no_grad(), or train the original and transform it afterwards"
        )


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
