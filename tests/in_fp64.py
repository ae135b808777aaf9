"""The expert block in fp64, for tests of kernels: how far a result is from it."""

from dpamoe.kernels import grouped


def error(found, x, ids, gates, chunks, block):
    """Frobenius norm of the difference over that of the exact result; block: weight and bias (or None) twice, activation."""
    up, up_bias, down, down_bias, activation = block
    biases = [bias if bias is None else bias.double() for bias in (up_bias, down_bias)]
    expected = grouped.expert_ffn(x.double(), ids, gates.double(), chunks, up, biases[0], down, biases[1], activation)
    return float((found.double() - expected).norm() / expected.norm())
