"""`dpamoe convert` in several processes: the bytes of one process, and what one that dies leaves."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from dpamoe import checkpoint
from dpamoe.checkpoint import JOURNAL
from dpamoe.cli import jobs
from dpamoe.team import Team

from . import sources
from .sources import contents

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LAYERS = [f"model.layers.{number}" for number in range(4)]


@pytest.fixture(scope="module")
def arguments(source, tiny_dir, tmp_path_factory):
    """Function from an output folder to the arguments of its conversion, at whose end one process weighs layers."""
    text = tmp_path_factory.mktemp("text") / "calibration.txt"
    text.write_text((tiny_dir.parent / "text" / "calibration.txt").read_text(encoding="utf-8")[:8000], encoding="utf-8")
    flags = ["--calibration", str(text), "--group-size", "64", "--allocator", "threshold"]
    return lambda out: ["convert", str(source), "--output-dir", str(out), *flags]


@pytest.fixture(scope="module")
def one(arguments, tmp_path_factory):
    """What one process writes."""
    out = tmp_path_factory.mktemp("one") / "model"
    call([sys.executable, "-m", "dpamoe.cli.main", *arguments(out)])
    return contents(out)


def call(command):
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done


def dpamoe(*arguments):
    return [sys.executable, "-m", "dpamoe.cli.main", *map(str, arguments)]


@pytest.mark.slow
def test_launched_by_accelerate_each_encodes_every_second_layer(arguments, one, tmp_path):
    out = tmp_path / "model"
    done = call(jobs.command(2, [*arguments(out), "--json"]))
    encoded = re.findall(r"^dpamoe \[(\d)/2\]: encode \d/2 (model\.layers\.\d)", done.stderr, re.MULTILINE)
    assert sorted(encoded) == [("1", LAYERS[0]), ("1", LAYERS[2]), ("2", LAYERS[1]), ("2", LAYERS[3])]
    assert json.loads(done.stdout)["experts"] == 64  # one of them speaks
    assert contents(out) == one
    assert checkpoint.is_weighed(*checkpoint.read_index(out))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.log"]
    lines = (tmp_path / "model.log").read_text().splitlines()
    for number, layer in encoded:
        assert sum(f"[{number}/2] {layer}: on the disk" in line for line in lines) == 1


def start(command, out):
    """Start it, and wait until the first layer is written."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    journal = out.with_name("model.partial") / JOURNAL
    while process.poll() is None and not (journal.is_file() and LAYERS[0] in json.loads(journal.read_text())["units"]):
        time.sleep(0.01)
    return process


def stopped(command, out, stop):
    """Start it, stop it in the midst of its work, and return its exit code and what it said."""
    for _ in range(5):
        process = start(command, out)
        stop(process)
        said = process.communicate()
        if process.returncode:
            return process.returncode, *said
        shutil.rmtree(out)  # on a busy machine it may end before it is stopped
    raise AssertionError("five conversions ended before they were stopped")


def kill(process, number):
    """Kill process `number` of those that were started."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            if child.environ().get("RANK") == str(number):
                child.kill()
                return


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_one_that_is_killed_ends_all_and_any_number_goes_on(arguments, one, tmp_path, killed):
    out = tmp_path / "model"
    code, printed, errors = stopped(dpamoe(*arguments(out), "--jobs", "2"), out, lambda process: kill(process, killed))
    assert code == 1 and printed == "" and "Traceback" not in errors
    last = errors.splitlines()[-1]
    assert "dpamoe convert: error: " in last and "run the same command again" in last
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.log", "model.partial"]
    call(dpamoe(*arguments(out), "--jobs", 1 + killed))
    assert contents(out) == one


@pytest.mark.slow
def test_ctrl_c_ends_all(arguments, one, tmp_path, ctrl_c):
    out = tmp_path / "model"
    children = []

    def interrupt(process):
        with contextlib.suppress(psutil.Error):
            children[:] = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)

    code, _, errors = stopped(dpamoe(*arguments(out), "--jobs", "2"), out, interrupt)
    assert code == 130 and errors.splitlines()[-1].startswith("dpamoe: interrupted; what was finished is kept")
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    call(dpamoe(*arguments(out)))
    assert contents(out) == one


SAYS = """
import sys
print("  warnings.warn(of a library)", *sys.argv[2:], sep="\\n", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "code, said, passed_on",
    [
        (0, ["dpamoe: encode 1/4", "dpamoe [2/2]: encode 2/4"], ["dpamoe: encode 1/4", "dpamoe [2/2]: encode 2/4"]),
        (1, ["dpamoe convert: error: no folder"] * 2 + ["Traceback"], ["dpamoe convert: error: no folder"]),
        (1, ["dpamoe: one failed: no folder", "Traceback"], ["dpamoe: one failed: no folder"]),
        (9, ["dpamoe: encode 1/4"], ["dpamoe: encode 1/4", "dpamoe convert: error: a process was ended (exit code 9): run the "
             "same command again, which goes on where this one stopped"]),
    ],
)  # fmt: skip
def test_what_is_passed_on_of_what_the_processes_say(monkeypatch, capsys, code, said, passed_on):
    """Our own lines, an error of several processes once; and how it ended, where none of them said so."""
    monkeypatch.setattr(jobs, "command", lambda count, argv: [sys.executable, "-c", SAYS, str(code), *argv])
    assert jobs.launch(2, said) == int(code > 0)
    assert capsys.readouterr().err.splitlines() == passed_on


@pytest.mark.slow
def test_errors_are_one_sentence(tmp_path):
    done = subprocess.run(
        dpamoe("convert", tmp_path / "nothing", "--output-dir", tmp_path / "out", "--jobs", "2"),
        capture_output=True, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"dpamoe convert: error: model folder {tmp_path / 'nothing'} does not exist\n"


def test_a_dry_run_starts_nobody(run, source, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "launch", None)
    code, out, _ = run("convert", source, "--output-dir", tmp_path / "out", "--jobs", "2", "--dry-run")
    assert code == 0 and "64 experts in 4 sites; would write" in out


def test_each_process_takes_a_gpu(monkeypatch):
    monkeypatch.setattr(jobs.torch.cuda, "device_count", lambda: 2)
    assert [jobs.device_of("cuda", Team(index, 3)) for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert jobs.device_of("cuda", Team()) == "cuda" and jobs.device_of("cpu", Team(1, 2)) == "cpu"


@pytest.mark.slow
def test_one_with_dense_layers_alone_does_its_share(random_model, tmp_path):
    """Of three layers the second, dense one is that of the second process; the first writes the text that all wait for."""
    model = random_model("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]})
    source = sources.per_expert(model, tmp_path / "source")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    common = ("convert", str(source), "--group-size", "32", "--k-max", "2", "--budget", "2")
    call(dpamoe(*common, "--output-dir", tmp_path / "one" / "model"))
    done = call(jobs.command(2, [*common, "--output-dir", str(tmp_path / "two" / "model")]))
    assert contents(tmp_path / "two" / "model") == contents(tmp_path / "one" / "model")
    assert done.stderr.count("write calibration text") == 1
