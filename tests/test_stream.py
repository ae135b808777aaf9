"""Conversions that are cut short: going on gives the bytes of an unbroken run, wherever the cut was."""

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import dpamoe
from dpamoe import calibration, checkpoint, convert, files, journal, shards
from dpamoe.convert import Job

from . import sources
from .marks import some_slow
from .sources import contents

SPEC = dpamoe.EncodeSpec(group_size=32, iterations=1)
PLENTY = 10_000


class Cut(BaseException):
    """Stands for a power cut: nothing of ours may catch it."""


@pytest.fixture(autouse=True)
def given_ids(monkeypatch, random_ids):
    ids = random_ids(4, 60)
    monkeypatch.setattr(
        convert, "calibration_batches", lambda job, plan, partial: calibration.id_batches(plan.model, ids.flatten())
    )


@pytest.fixture(scope="module")
def source(random_model, tmp_path_factory):
    """A random Qwen3-MoE of three layers, the second dense."""
    model = random_model("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]})
    return sources.per_expert(model, tmp_path_factory.mktemp("models") / "source")


@pytest.fixture
def job(source):
    return Job(source, source.parent / "unset", SPEC)


def folder(source, name):
    """A place at the same depth as others, so that the path to the source is the same in each config."""
    return source.parent / name


@pytest.fixture(scope="module")
def unbroken(source, random_ids):
    """What one run writes."""
    out = folder(source, "unbroken")
    ids, kept = random_ids(4, 60), convert.calibration_batches
    convert.calibration_batches = lambda job, plan, partial: calibration.id_batches(plan.model, ids.flatten())
    try:
        convert.convert(Job(source, out, SPEC))
    finally:
        convert.calibration_batches = kept
    return own(out)


def own(out):
    """Contents but for the card, which names the folder."""
    return {name: content for name, content in contents(out).items() if name != "README.md"}


def cutting(monkeypatch, owner, name, count):
    """Let a function work so often, and cut the power then; returns the list of its calls."""
    calls, original = [], getattr(owner, name)

    def call(*args, **kwargs):
        if len(calls) >= count:
            raise Cut
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


CUTS = {
    "tensors": (shards.Shards, "_append"),
    "synced": (shards, "sync"),
    "written": (files, "sync"),
    "journaled": (journal.Journal, "write"),
    "headers": (shards.Shards, "_write_header"),
    "put in place": (convert, "write_json"),
    "named": (journal, "clear"),
}  # fmt: skip


@pytest.mark.parametrize("cut", some_slow(CUTS, ("journaled", "named")))
def test_going_on_after_a_cut_anywhere(source, unbroken, monkeypatch, cut):
    out = folder(source, f"cut {cut}")
    with monkeypatch.context() as counted:
        calls = cutting(counted, *CUTS[cut], PLENTY)
        convert.convert(Job(source, folder(source, f"counted {cut}"), SPEC))
    total = len(calls)
    assert total
    for count in sorted({0, total // 4, total // 2, total - 1}):
        if out.exists():
            break
        with monkeypatch.context() as broken, contextlib.suppress(Cut):
            cutting(broken, *CUTS[cut], count)
            convert.convert(Job(source, out, SPEC))
    assert convert.convert(Job(source, out, SPEC), again=True)["experts"] == 16
    assert own(out) == unbroken
    assert not out.with_name(out.name + ".partial").exists()


def test_nothing_is_encoded_twice(source, unbroken, monkeypatch):
    out = folder(source, "once")
    encoded = []
    original = convert.stream.__globals__["encode_site"]

    def watch(experts, site, spec, sample):
        if len(encoded) == 1:
            encoded.append("cut")
            raise Cut
        encoded.append(site.path)
        return original(experts, site, spec, sample)

    monkeypatch.setitem(convert.stream.__globals__, "encode_site", watch)
    with pytest.raises(Cut):
        convert.convert(Job(source, out, SPEC))
    convert.convert(Job(source, out, SPEC))
    assert encoded == ["model.layers.0.mlp.experts", "cut", "model.layers.2.mlp.experts"]
    assert own(out) == unbroken


def broken_run(source, out, monkeypatch):
    with monkeypatch.context() as broken, pytest.raises(Cut):
        cutting(broken, journal.Journal, "write", 2)
        convert.convert(Job(source, out, SPEC))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"spec": dpamoe.EncodeSpec(group_size=16, iterations=1)}, "spec was .* and is "),
        ({"spend": dpamoe.SpendSpec(3.0)}, "budget was 4.0 and is 3.0"),
        ({"ignore": ("model.layers.0.*",)}, "ignored was"),
    ],
)
def test_going_on_with_other_settings_is_refused(source, unbroken, monkeypatch, change, words):
    out = folder(source, f"settings {sorted(change)}")
    broken_run(source, out, monkeypatch)
    before = contents(out.with_name(out.name + ".partial"))
    with pytest.raises(ValueError, match=f"was begun with other settings .*{words}.*--no-resume"):
        convert.convert(Job(source, out, **{"spec": SPEC, **change}))
    after = contents(out.with_name(out.name + ".partial"))
    assert {k: v for k, v in after.items() if k != checkpoint.MARKER} == {
        k: v for k, v in before.items() if k != checkpoint.MARKER
    }
    convert.convert(Job(source, out, SPEC))
    assert own(out) == unbroken


def test_a_source_that_changed_is_another(source, monkeypatch):
    out = folder(source, "changed")
    broken_run(source, out, monkeypatch)
    file = source / "model.safetensors"
    state = file.stat()
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))
    with pytest.raises(ValueError, match="source was"):
        convert.convert(Job(source, out, SPEC))
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    convert.convert(Job(source, out, SPEC, resume=False))


def test_saving_leaves_an_unfinished_conversion_alone(source, unbroken, monkeypatch, transformed):
    out = folder(source, "saved over")
    broken_run(source, out, monkeypatch)
    with pytest.raises(ValueError, match="saved over.partial holds an unfinished `dpamoe convert`: run that again"):
        dpamoe.save(transformed("qwen3_moe")[1], out)
    convert.convert(Job(source, out, SPEC))
    assert own(out) == unbroken


def test_starting_again(source, unbroken, monkeypatch):
    out = folder(source, "again")
    broken_run(source, out, monkeypatch)
    convert.convert(Job(source, out, SPEC, resume=False))
    assert own(out) == unbroken


def test_two_runs_into_one_folder(source, monkeypatch):
    out = folder(source, "two")
    with (
        journal.working_in(out, True),
        pytest.raises(ValueError, match=rf"two.partial is being written by process {os.getpid()}: wait"),
    ):
        convert.convert(Job(source, out, SPEC))
    convert.convert(Job(source, out, SPEC))
    with pytest.raises(ValueError, match="output folder .*two exists: choose another name"):
        convert.convert(Job(source, out, SPEC))


@pytest.mark.parametrize(
    "error, remedy",
    [(errno.ENOSPC, "make room for 0.00 GiB"), (errno.EDQUOT, "make room for"), (errno.EROFS, "make it writable")],
)
def test_a_disk_that_takes_no_more(source, unbroken, monkeypatch, error, remedy):
    out = folder(source, f"disk {error}")
    original, written = shards.Shards._append, []

    def append(self, group, name, tensor):
        written.append(name)
        if len(written) > 40:
            raise OSError(error, os.strerror(error))
        return original(self, group, name, tensor)

    with (
        monkeypatch.context() as full,
        pytest.raises(OSError, match=rf"{error}.partial could not be written \({os.strerror(error)}\): {remedy}.*, then run"),
    ):
        full.setattr(shards.Shards, "_append", append)
        convert.convert(Job(source, out, SPEC))
    assert not out.exists()
    convert.convert(Job(source, out, SPEC))
    assert own(out) == unbroken


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    ],
    ids=["Python", "CPU", "GPU"],
)
def test_memory_that_runs_out(source, unbroken, monkeypatch, error):
    out = folder(source, f"memory {type(error).__name__}")

    def fail(*_):
        raise error

    words = r"memory ran out while .*source was converted, which takes about 0.7 GiB with model.layers.0: free some, .* goes on"
    with monkeypatch.context() as full, pytest.raises(MemoryError, match=words):
        full.setitem(convert.stream.__globals__, "encode_site", fail)
        convert.convert(Job(source, out, SPEC))
    convert.convert(Job(source, out, SPEC))
    assert own(out) == unbroken


def test_a_source_that_goes_away(source, monkeypatch, tmp_path):
    gone = shutil.copytree(source, tmp_path / "source")
    file = gone / "model.safetensors"
    original = convert.stream.__globals__["encode_site"]

    def then_away(*args):
        if file.exists():
            file.rename(tmp_path / "away")
        return original(*args)

    with (
        monkeypatch.context() as away,
        pytest.raises(OSError, match="model.safetensors could not be read any more .*: put it back"),
    ):
        away.setitem(convert.stream.__globals__, "encode_site", then_away)
        convert.convert(Job(gone, tmp_path / "out", SPEC))
    (tmp_path / "away").rename(file)
    assert convert.convert(Job(gone, tmp_path / "out", SPEC))["experts"] == 16


def test_a_disk_that_is_too_small_is_seen_first(source, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match="needs 0.00 GiB more, and its disk has 0.00 GiB free: make room"):
        convert.convert(Job(source, folder(source, "small"), SPEC))


def test_a_place_that_cannot_be_written(source, monkeypatch):
    monkeypatch.setattr(checkpoint.os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ValueError, match="cannot be written to: choose another place"):
        convert.convert(Job(source, folder(source, "nowhere"), SPEC))


PROGRAM = """
import sys, torch
from dpamoe import calibration, convert, EncodeSpec, SpendSpec
ids = torch.randint(3, 128, (4, 60), generator=torch.Generator().manual_seed(0))
convert.calibration_batches = lambda job, plan, partial: calibration.id_batches(plan.model, ids.flatten())
limit = int(sys.argv[3])
if limit:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    spec, spend = EncodeSpec(group_size=32, iterations=1), SpendSpec(allocator=sys.argv[4])
    convert.convert(convert.Job(sys.argv[1], sys.argv[2], spec, spend))
except OSError as error:
    sys.exit(str(error))
"""


def start(source, out, limit=0, allocator="exact"):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(source), str(out), str(limit), allocator], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("allocator", ["exact", "threshold"])
def test_twenty_kills_at_random_moments(source, unbroken, allocator):
    """From when the program begins to write until it is done; each run goes on where the last one died."""
    began = time.monotonic()
    assert start(source, folder(source, f"timed {allocator}"), allocator=allocator).wait() == 0
    whole, expected = time.monotonic() - began, own(folder(source, f"timed {allocator}"))
    assert (expected == unbroken) == (allocator == "exact")
    moments, kills = random.Random(0), 0
    for number in range(200):
        out = folder(source, f"killed {allocator} {number}")
        while kills < 20 and not out.exists():
            run = start(source, out, allocator=allocator)
            while run.poll() is None and not out.with_name(out.name + ".partial").exists():
                time.sleep(0.005)
            time.sleep(moments.uniform(0, whole / 4))
            if run.poll() is None:
                run.send_signal(signal.SIGKILL)
                kills += run.wait() == -signal.SIGKILL
            if not out.exists():
                with pytest.raises(ValueError):
                    dpamoe.load(out)
        if not out.exists() or (out / checkpoint.MARKER).exists():
            assert start(source, out, allocator=allocator).wait() == 0
        assert own(out) == expected
        if kills >= 20:
            break
    assert kills >= 20


@pytest.mark.slow
def test_a_limit_on_file_sizes(source, unbroken):
    out = folder(source, "limited")
    run = start(source, out, 40_000)
    _, message = run.communicate()
    assert run.returncode == 1 and "could not be written" in message and "Traceback" not in message and not out.exists()
    assert start(source, out).wait() == 0
    assert own(out) == unbroken
