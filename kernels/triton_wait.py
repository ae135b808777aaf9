"""Where a kernel waits that was launched to begin before the end of the one before it, as `paths.early` says."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_before(PDL: tl.constexpr):
    """Where a kernel may begin before the end of the one before: wait for that, and let the next one begin.

    So whatever is older than the kernel before can be read without waiting; nothing may be written before.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
