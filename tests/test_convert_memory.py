"""The peak of memory of a conversion: a few layers' worth, however many there are and however experts are stored."""

import os
import subprocess
import sys

import pytest

from . import sources

LAYERS = 5
PROGRAM = r"""
import re, sys, torch
from dpamoe import EncodeSpec, calibration, convert
ids = torch.randint(3, 512, (2048,), generator=torch.Generator().manual_seed(0))
convert.calibration_batches = lambda job, plan, partial: calibration.id_batches(plan.model, ids)
job = convert.Job(sys.argv[1], sys.argv[2], EncodeSpec(iterations=0, k_max=2), budget=2.0)
foreseen = convert.preview(job)
written = convert.convert(job)["bytes"]
status = open("/proc/self/status").read()  # getrusage counts what the parent held at the fork
print(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10, foreseen["memory"], foreseen["predicted_bytes"], written)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads what Linux says of a process")
def test_peak_of_memory(tmp_path):
    peaks = {}
    for stacked in (False, True):
        source = sources.large(tmp_path / f"stacked {stacked}", LAYERS, stacked)
        size = sum(file.stat().st_size for file in source.iterdir())
        command = [sys.executable, "-c", PROGRAM, str(source), str(tmp_path / f"out {stacked}")]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        peaks[stacked], foreseen, predicted, written = map(int, done.stdout.split())
        assert size > 0.95e9 and peaks[stacked] < min(foreseen, 1.6 * 2**30)
        assert written == pytest.approx(predicted, rel=0.01)
    assert peaks[True] == pytest.approx(peaks[False], rel=0.05)
    hashes = [sources.contents(tmp_path / f"out {stacked}") for stacked in (False, True)]
    assert {k: v for k, v in hashes[0].items() if k.endswith(".safetensors")} == {
        k: v for k, v in hashes[1].items() if k.endswith(".safetensors")
    }
