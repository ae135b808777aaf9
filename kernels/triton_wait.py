"""Where a kernel waits that was launched to begin before the end of the one before it, as `paths.early` says."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_before(PDL: tl.constexpr, NEXT: tl.constexpr = True):
    """Where a kernel may begin before the end of the one before: wait for that, and (NEXT) let the next one begin.

    So whatever is older than the kernel before can be read without waiting; nothing may be written before.
    """
    if PDL:
        gdc_wait()
    let_next_begin(PDL and NEXT)


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """Let the next kernel begin once every program has come here, of which one warp may do, or ended.

    Before its own wait it most likely sees what was written here, but nothing says that it does.
    """
    if PDL:
        gdc_launch_dependents()
