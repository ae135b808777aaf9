"""Accuracy on lm-eval's tasks: which tasks there are, checked before any long work, and what a model scores on them."""

import contextlib
import difflib
import io
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dpamoe.progress import track
from dpamoe.text import window_length

BATCH = 32  # fastest on a CPU, of 1 to 64; encoded experts are decoded once per batch
FEW_SHOT_SEED = 1234  # lm-eval's own
SHOWN = 8


@dataclass(frozen=True)
class Chosen:
    """Tasks that can be run: lm-eval's task objects by name, groups expanded, in the order asked for."""

    tasks: dict[str, Any]


def check_tasks(names: Sequence[str], include_path: str | Path | None = None) -> Chosen:
    """Find and load tasks by name, data included, so that nothing is missing once a model runs.

    names: tasks, groups or tags. include_path: a folder with task files (*.yaml), whose tasks are then the only known ones;
    None means the tasks that come with lm-eval, whose data lm-eval downloads if it is not in its cache. Raises ValueError if
    lm-eval or the folder is missing, a name is unknown, data cannot be loaded, or a task does not report `acc`.
    """
    if include_path is not None:
        _check_folder(Path(include_path))
    if not names:
        raise ValueError("no task is named: give one or more names of tasks or groups")
    with _quiet():
        manager = _task_manager(include_path)
        unknown = [name for name in names if name not in manager.all_tasks]
        if unknown:
            raise ValueError(_unknown(unknown, manager, include_path))
        tasks: dict[str, Any] = {}
        for name in names:
            tasks |= _load(manager, name)
    for name, task in tasks.items():
        if "acc" not in task.aggregation():
            reported = ", ".join(task.aggregation()) or "nothing"
            raise ValueError(f"task {name} reports {reported} and no acc: name tasks that are scored by acc")
    return Chosen(tasks)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"task folder {folder} does not exist: give a folder with lm-eval task files (*.yaml)")
    if not any(folder.rglob("*.yaml")):
        raise ValueError(f"task folder {folder} holds no *.yaml file: give a folder with lm-eval task files")


def _task_manager(include_path: str | Path | None):
    """lm-eval's index of tasks; ValueError if lm-eval is not installed. The environment stays as it was."""
    before = dict(os.environ)
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f'tasks need lm-eval, which is not installed: pip install "dpamoe[eval]" ({error})') from error
    finally:
        for name in os.environ.keys() - before.keys():
            if name.startswith("HF_"):  # importing lm-eval sets switches of the hub's client
                del os.environ[name]
    return TaskManager(include_path=include_path, include_defaults=include_path is None)


def _unknown(unknown: list[str], manager, include_path: str | Path | None) -> str:
    known = [*manager.all_groups, *manager.all_subtasks]
    if len(known) > SHOWN:
        alike = [name for wanted in unknown for name in difflib.get_close_matches(wanted, known, SHOWN)]
        shown = ", ".join((alike or known)[:SHOWN]) + f" or another of {len(known)}"
    else:
        shown = ", ".join(known) or "which holds none"
    place = "lm-eval's own" if include_path is None else f"those in {include_path}"
    return f"task {', '.join(unknown)} is unknown: use {place} ({shown})"


def _load(manager, name: str) -> dict[str, Any]:
    try:
        return manager.load([name])["tasks"]
    except Exception as error:  # task files run code of their own, which may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"task {name} could not be loaded ({reason}): check its files and data, or leave it out") from error


def run_tasks(
    model: nn.Module, tokenizer, chosen: Chosen, limit: int | None = None, batch_size: int = BATCH,
    max_length: int | None = None,
) -> dict:  # fmt: skip
    """Accuracy of a language model in memory, plain or transformed; what it spends stays as it is.

    limit: only the first so many documents of each task. max_length: tokens seen at most, None for 512 or what the model
    allows; texts start with the tokenizer's begin token, where it has one. Returns {"accuracy", "stderr", "acc_norm",
    "samples": each by task; "macro": mean accuracy over tasks}. stderr is sqrt(p (1 - p) / (n - 1)), None for one document;
    acc_norm, where a task reports it, divides log-likelihoods by the length of the choice. Raises ValueError if limit or
    batch_size is not positive.
    """
    for name, value in (("limit", limit), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: use 1 or more")
    with _quiet():
        lm = _wrap(model, tokenizer, batch_size, max_length or window_length(model.config))
    scores: dict[str, dict] = {}
    for name, task in track(chosen.tasks.items(), "task", lambda item: f"{item[0]} acc {scores[item[0]]['acc']:.4f}"):
        with _quiet():
            scores[name] = _run(lm, name, task, limit)
    accuracy = {name: score["acc"] for name, score in scores.items()}
    samples = {name: score["sample_len"] for name, score in scores.items()}
    return {
        "accuracy": accuracy,
        "stderr": {name: _standard_error(accuracy[name], samples[name]) for name in scores},
        "acc_norm": {name: score["acc_norm"] for name, score in scores.items() if "acc_norm" in score},
        "macro": sum(accuracy.values()) / len(accuracy),
        "samples": samples,
    }


def _wrap(model: nn.Module, tokenizer, batch_size: int, max_length: int):
    from dpamoe.harness import DpamoeLM

    begin = tokenizer.bos_token_id is not None
    return DpamoeLM(model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length, add_bos_token=begin or None)


def _run(lm, name: str, task, limit: int | None) -> dict[str, float]:
    """Metrics of one task by their plain names; of several filters, the first counts."""
    from lm_eval.evaluator import evaluate

    task.set_fewshot_seed(FEW_SHOT_SEED)  # each time, or the next model would see other examples
    found = evaluate(lm, {"tasks": {name: task}}, limit=limit, bootstrap_iters=0, log_samples=False)["results"][name]
    scores: dict[str, float] = {}
    for key, value in found.items():
        scores.setdefault(key.split(",")[0], value)
    return scores


def _standard_error(share: float, count: int) -> float | None:
    return math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval says nothing below an error, and draws its bars on a terminal only."""
    theirs = logging.getLogger("lm_eval")
    level = theirs.level
    theirs.setLevel(logging.ERROR)
    try:
        with contextlib.ExitStack() as stack:
            if not sys.stderr.isatty():
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield
    finally:
        theirs.setLevel(level)
