"""The peak of memory of a conversion: a few layers' worth, however many there are, however experts are stored, and also while
the model writes its own text, and while what its layers matter is measured."""

import os
import subprocess
import sys

import pytest

from . import sources

LAYERS = 5
PROGRAM = r"""
import re, sys, torch
from dpamoe import EncodeSpec, SpendSpec, calibration, convert, own_text
count = 512 if sys.argv[3] == "weighed" else 2048  # what is measured goes through all layers again and again
ids = torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(0))
if sys.argv[3] != "own":
    convert.calibration_batches = lambda job, plan, partial: calibration.id_batches(plan.model, ids)
calibration.WRITTEN_TOKENS, own_text.SHARE = 3, 0.0  # each of them, or of the passes that weigh, reads all layers again
allocator = "threshold" if sys.argv[3] == "weighed" else "exact"
job = convert.Job(sys.argv[1], sys.argv[2], EncodeSpec(iterations=0, k_max=2), SpendSpec(2.0, allocator=allocator))
foreseen = convert.preview(job)
written = convert.convert(job)["bytes"]
status = open("/proc/self/status").read()  # getrusage counts what the parent held at the fork
print(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10, foreseen["memory"], foreseen["predicted_bytes"], written)
"""


def measured(source, out, text):
    """Peak of memory, what was foreseen of it, and the size that was predicted and written."""
    command = [sys.executable, "-c", PROGRAM, str(source), str(out), text]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return map(int, done.stdout.split())


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads what Linux says of a process")
def test_peak_of_memory(tmp_path):
    peaks = {}
    for stacked in (False, True):
        source = sources.large(tmp_path / f"stacked {stacked}", LAYERS, stacked)
        size = sum(file.stat().st_size for file in source.iterdir())
        peaks[stacked], foreseen, predicted, written = measured(source, tmp_path / f"out {stacked}", "given")
        assert size > 0.95e9 and peaks[stacked] < min(foreseen, 1.6 * 2**30)
        assert written == pytest.approx(predicted, rel=0.01)
    # Experts that are read whole would add a layer; what the allocator and its threads keep differs by less than half of one.
    assert peaks[True] == pytest.approx(peaks[False], abs=size / LAYERS / 2)
    hashes = [sources.contents(tmp_path / f"out {stacked}") for stacked in (False, True)]
    assert {k: v for k, v in hashes[0].items() if k.endswith(".safetensors")} == {
        k: v for k, v in hashes[1].items() if k.endswith(".safetensors")
    }


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads what Linux says of a process")
@pytest.mark.parametrize("text", ["own", "weighed"])
def test_peak_of_memory_while_the_whole_model_runs(tmp_path, text):
    source = sources.large(tmp_path / "source", LAYERS, False)
    peak, foreseen, _, _ = measured(source, tmp_path / "out", text)
    assert peak < min(foreseen, 1.6 * 2**30)
