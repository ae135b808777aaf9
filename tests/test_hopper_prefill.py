"""The Hopper kernel, compiled without a GPU: it is made of the copies and products that its cut asks for, and no others.

What it computes is tested in `test_hopper_on_cpu`, and on such a card in `test_cuda_hopper`.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon")

SCRIPT = Path(__file__).with_name("compile_kernels.py")
WORDS, PLANES = 2, 8


@cache
def compiled(part):
    """What the compiler says of the kernels of a set."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "90", part], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


ONE_K = [pytest.param(pairs, True, marks=pytest.mark.slow) for pairs in (64, 256)]


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("pairs, one_k", [(128, False), (32, False), *ONE_K])
def test_products_and_copies(pairs, one_k, second):
    """Both products; what results are multiplied by, and where they go, is asked for when a tile begins."""
    facts = compiled("one k hopper" if one_k else "some hopper")[f"{pairs}, one k {one_k}, second {second}"]
    groups, slices = facts["cut"]["groups"], len(facts["cut"]["widths"])
    whole = pairs < 256
    assert facts["cut"]["whole"] == whole and not facts["faults"] and facts["late"] == 0
    blocks = WORDS if whole else 1  # of a stretch, unpacked at once
    written = slices * (slices + 1) // 2 if one_k else slices  # for one k once for every number of slices that are used
    assert facts["HGMMA"] == groups * written * (8 * blocks + 1)  # 16 inputs each, and the offsets
    assert facts["UTMALDG"] == slices * (WORDS + 1)  # blocks of a stretch, and sums over it
    assert facts["LDGSTS"] == groups * (2 * PLANES + 1)  # planes, scales and offsets, each in one copy of every lane
