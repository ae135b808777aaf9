"""What may stand between the two matmuls of an expert, in Triton; the names and meanings of `reference.ACTIVATIONS`."""

import triton
import triton.language as tl


@triton.jit
def _gelu_tanh(x):
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def activate_gated(gate, up, ACT: tl.constexpr):
    """Gate and up rows, fp32, to what the second matmul takes."""
    if ACT == "silu_mul":
        result = gate * tl.sigmoid(gate) * up
    elif ACT == "gelu_mul":
        result = gate * 0.5 * (1 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACT == "gelu_tanh_mul":
        result = _gelu_tanh(gate) * up
    elif ACT == "relu_mul":
        result = tl.maximum(gate, 0.0, tl.PropagateNan.ALL) * up
    elif ACT == "sigmoid_mul":
        result = tl.sigmoid(gate) * up
    else:  # swigluoai
        gate = tl.minimum(gate, 7.0, tl.PropagateNan.ALL)
        up = tl.minimum(tl.maximum(up, -7.0, tl.PropagateNan.ALL), 7.0, tl.PropagateNan.ALL)
        result = (up + 1) * gate * tl.sigmoid(1.702 * gate)
    return result


@triton.jit
def activate_plain(x, ACT: tl.constexpr):
    """One row, fp32, to one row; "" leaves it alone."""
    if ACT == "silu":
        x = x * tl.sigmoid(x)
    elif ACT == "gelu":
        x = x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        x = _gelu_tanh(x)
    elif ACT == "relu":
        x = tl.maximum(x, 0.0, tl.PropagateNan.ALL)
    elif ACT == "relu2":
        x = tl.maximum(x, 0.0, tl.PropagateNan.ALL)
        x = x * x
    return x
