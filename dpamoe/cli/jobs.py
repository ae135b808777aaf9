"""Start this program several times with `accelerate launch`, and pass on what the processes say."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable

import torch

from dpamoe.cli.signals import terminated_is_interrupted
from dpamoe.team import Team

OURS = (
    "dpamoe: ",
    "dpamoe [",
    "dpamoe convert: ",
)  # how our own lines on stderr begin; the launcher's tracebacks say nothing to a person
ERROR = "dpamoe convert: error: "
GRACE = 30  # seconds that the processes have to end when they are asked to


def command(count: int, argv: list[str]) -> list[str]:
    """The call of `accelerate launch` that runs `dpamoe` with these arguments in `count` processes."""
    settings = {
        "num_processes": count, "num_machines": 1, "mixed_precision": "no", "dynamo_backend": "no", "main_process_port": 0,
        "num_cpu_threads_per_process": max(1, torch.get_num_threads() // count),
    }  # fmt: skip
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    start = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", *flags]
    return [*start, "-m", "dpamoe.cli.main", *argv]


def launch(count: int, argv: list[str], everything: bool = False) -> int:
    """Run `dpamoe` in `count` processes and wait; returns the exit code. everything: pass on the launcher's own lines too."""
    process = subprocess.Popen(command(count, argv), stderr=subprocess.PIPE, text=True, start_new_session=True)
    said: list[str] = []
    reader = threading.Thread(target=_pass_on, args=(process.stderr, said, everything), daemon=True)
    reader.start()
    try:
        with terminated_is_interrupted():
            code = process.wait()
    except BaseException:
        _end(process)
        raise
    reader.join()
    if code and not any(ERROR in line or " failed: " in line for line in said):
        print(f"{ERROR}a process was ended (exit code {code}): run the same command again, which goes on where "
              "this one stopped", file=sys.stderr)  # fmt: skip
    return 1 if code else 0


def _pass_on(lines: Iterable[str], said: list[str], everything: bool) -> None:
    for line in lines:
        if everything or (line.startswith(OURS) and not (ERROR in line and line in said)):
            said.append(line)
            print(line, end="", file=sys.stderr, flush=True)


def _end(process: subprocess.Popen) -> None:
    """Ask all of them to end, then make them."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def sign(logger: logging.Logger, team: Team) -> None:
    """Begin every line with the number of the process that writes it."""
    for handler in logger.handlers:
        handler.setFormatter(logging.Formatter(f"dpamoe [{team.index + 1}/{team.count}]: %(message)s"))


def device_of(device: str, team: Team) -> str:
    """The device of this process: of several, each takes the next GPU."""
    if team.count > 1 and device == "cuda":
        return f"cuda:{team.index % torch.cuda.device_count()}"
    return device
