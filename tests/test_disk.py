"""Conversions onto real file systems that are full or read-only: one sentence each time, and every run goes on."""

import json
import subprocess
import sys

import pytest

import dpamoe
from dpamoe import calibration, convert

from . import sources
from .sources import contents

# Runs in a mount namespace of its own, where it may mount what it likes without touching the machine.
PROGRAM = r"""
import json, shutil, subprocess, sys
from pathlib import Path
import torch
from dpamoe import EncodeSpec, calibration, convert, load

source, disk, copy, kind = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
ids = torch.randint(3, 128, (4, 60), generator=torch.Generator().manual_seed(0))
convert.calibration_batches = lambda job, plan, partial: calibration.id_batches(plan.model, ids.flatten())
job = convert.Job(source, disk / "out", EncodeSpec(group_size=32, iterations=1))

def mount(options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)

def attempt():
    try:
        convert.convert(job)
    except (ValueError, OSError) as error:
        return str(error)

said = []
mount("size=64k")
if kind == "small":
    said.append(attempt())
if kind == "full":
    convert.shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)  # it fills up only later
    for size in range(64, 2000, 32):
        mount(f"remount,size={size}k")
        message = attempt()
        if message is None:
            break
        said.append(message)
        for folder in (disk / "out", disk / "out.partial"):
            try:
                load(folder)
                said.append(f"{folder} loads")
            except ValueError:
                pass
if kind == "read-only":
    mount("remount,ro,size=4m")
    said.append(attempt())
if (disk / "out").is_dir():
    shutil.copytree(disk / "out", copy)
print(json.dumps(said))
"""
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
ROOM = "could not be written (No space left on device): make room for 0.00 GiB, then run the same command again"


@pytest.fixture(scope="module")
def source(random_model, tmp_path_factory):
    return sources.per_expert(random_model("qwen3_moe"), tmp_path_factory.mktemp("models") / "source")


@pytest.fixture
def on_disk(source, tmp_path):
    """Function that runs the program; returns what it said, and the folder that it left."""
    try:
        allowed = (
            subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True).returncode == 0
        )
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("needs a mount namespace of its own")

    def call(kind):
        (tmp_path / "disk").mkdir()
        command = [*NAMESPACE, sys.executable, "-c", PROGRAM, source, tmp_path / "disk", tmp_path / "copy", kind]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), tmp_path / "copy"

    return call


def unbroken(source, out, random_ids, monkeypatch):
    ids = random_ids(4, 60).flatten()
    monkeypatch.setattr(convert, "calibration_batches", lambda job, plan, partial: calibration.id_batches(plan.model, ids))
    convert.convert(convert.Job(source, out, dpamoe.EncodeSpec(group_size=32, iterations=1)))
    return {name: content for name, content in contents(out).items() if name.endswith((".safetensors", "index.json"))}


@pytest.mark.slow
def test_a_disk_that_fills_up_at_any_moment(on_disk, source, tmp_path, random_ids, monkeypatch):
    said, out = on_disk("full")
    assert len(said) > 8 and all(ROOM in message for message in said), said
    expected = unbroken(source, tmp_path / "unbroken", random_ids, monkeypatch)
    found = contents(out)
    assert {name: found[name] for name in expected} == expected
    assert dpamoe.report(dpamoe.load(out)).experts == 16


@pytest.mark.slow
def test_a_disk_that_is_too_small(on_disk):
    said, out = on_disk("small")
    assert len(said) == 1 and "needs 0.00 GiB more, and its disk has 0.00 GiB free: make room, or choose another" in said[0]
    assert not out.exists()


@pytest.mark.slow
def test_a_disk_that_is_read_only(on_disk):
    said, _ = on_disk("read-only")
    assert len(said) == 1 and "which should hold out, cannot be written to: choose another place" in said[0]
