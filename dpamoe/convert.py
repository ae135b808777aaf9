"""Convert model folders: check everything first, stream, put the result in place; one folder or many."""

import errno
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from dpamoe import calibration as calibrate
from dpamoe import checkpoint, own_text, storage, weighing
from dpamoe.encode import check_group
from dpamoe.files import sync, write_json
from dpamoe.forecast import Forecast, check_memory, check_size, companions_of, forecast, written_size
from dpamoe.journal import JOURNAL, Journal, clear, finish, partial_of, working_in
from dpamoe.layers import Outline, outline
from dpamoe.shards import Shards
from dpamoe.sites import Site
from dpamoe.source import open_source
from dpamoe.spec import EncodeSpec, SpendSpec, check_budget
from dpamoe.stream import Work, settings, stream
from dpamoe.team import ALONE, WORKER, Team, at_work

logger = logging.getLogger("dpamoe")
OUT_OF_MEMORY = ("can't allocate memory", "out of memory")  # as torch says it, of the CPU and of a GPU


@dataclass(frozen=True)
class Job:
    """One conversion.

    spend: how the folder spends unless it is told otherwise. calibration: a text file; None for text of its own. max_memory:
    bytes. ignore: patterns of sites.
    """

    source: Path
    out: Path
    spec: EncodeSpec = EncodeSpec()
    spend: SpendSpec = SpendSpec()
    calibration: Path | None = None
    ignore: tuple[str, ...] = ()
    device: str = "cpu"
    max_memory: int | None = None
    resume: bool = True

    @property
    def weighed(self) -> bool:
        """Whether what layers matter is measured."""
        return self.spend.allocator == "threshold"


def prepare(job: Job) -> tuple[Outline, Forecast]:
    """Everything that can be known before the work. Raises ValueError for whatever would make it fail."""
    check_budget(job.spend.budget, job.spend.least(job.spec.k_min), job.spec.k_max)
    plan = outline(open_source(job.source), job.ignore)
    for sketch in plan.sketches:
        check_group(job.spec, min(sketch.hidden, sketch.inner), sketch.path)
    companions = companions_of(job.source, storage.WEIGHT_SUFFIXES, storage.WRITTEN_ANEW)
    found = forecast(plan, job.spec, companions, weighed=job.weighed)
    own_text.check_source(plan.model, job.calibration)
    if job.calibration is None:
        found = replace(found, memory=max(found.memory, own_text.writing_memory(plan)))
    if job.weighed:
        weighing.check_measurable(plan)
        found = replace(found, memory=max(found.memory, weighing.weighing_memory(plan)))
    check_memory(plan, found, job.max_memory)
    return plan, found


def preview(job: Job, again: bool = False, team: Team = ALONE) -> dict:
    """What `convert` would write and how much memory it would take; nothing is written. again, team: as in `convert`."""
    plan, found = prepare(replace(job, source=Path(job.source)))
    read = 0
    if job.calibration is None:
        room = own_text.room(own_text.writing_memory(plan), job.device, job.max_memory)
        read = math.prod(own_text.price(plan, own_text.read_again(plan, room)))
    weighed = weighing.price(plan, weighing.read_again(plan, job.device, job.max_memory)) if job.weighed else (0, 0)
    return {
        "source": str(job.source), "output_dir": str(job.out), "predicted_bytes": found.bytes, "encoded_bytes": found.encoded,
        "memory": found.memory, "sites": len(plan.sketches), "experts": sum(sketch.experts for sketch in plan.sketches),
        "refused": plan.refused, "refused_bytes": _bytes_left(plan, plan.refused),
        "read_again_bytes": read, "read_to_weigh_bytes": math.prod(weighed),
    }  # fmt: skip


def convert(job: Job, again: bool = False, team: Team = ALONE) -> dict | None:
    """Encode one folder into another, streaming; returns what was encoded and written.

    An interrupted run of the same settings goes on where it stopped. again: a folder that is complete already, of the same
    source and settings, is no error. team: several processes that all call this share the layers; the bytes are the same,
    and the first of them returns something. Raises ValueError, and OSError of the disk, with nothing under the output's name.
    """
    job = replace(job, source=Path(job.source), out=Path(job.out).absolute())
    stopped_late = team.gather(team.together(lambda: team.main and job.out.is_dir() and clear(job.out)))[0]
    if team.together(lambda: stopped_late or (again and _is_result(job))):
        logger.info("%s is complete already", job.out)
        return described(job, outline(open_source(job.source), job.ignore), {})
    team.together(lambda: team.main and _check_place(job))
    plan, found = team.together(lambda: prepare(job))
    with ExitStack() as held, _sentences(job, found):
        team.together(lambda: team.main and held.enter_context(working_in(job.out, job.resume)))
        refused = _convert(job, plan, found, partial_of(job.out), team)
    return described(job, plan, refused) if team.main else None


def _check_place(job: Job) -> None:
    """ValueError if the output cannot be made where it is wanted."""
    source, out = job.source.resolve(), job.out.resolve()
    if out == source or source in out.parents:
        raise ValueError(f"output folder {job.out} is the model itself, or inside of it, and that is only read: choose another")
    checkpoint.check_new(job.out)


@contextmanager
def _sentences(job: Job, found: Forecast) -> Iterator[None]:
    """Say what to do when disk or memory are full, or the source is gone."""
    again = "then run the same command again, which goes on where this one stopped"
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason, file = getattr(error, "strerror", None) or error, getattr(error, "filename", None)
        if file and Path(file).is_relative_to(job.source):
            raise OSError(f"{file} could not be read any more ({reason}): put it back, {again}") from error
        full = not isinstance(error, OSError) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = f"make room for {found.bytes / 2**30:.2f} GiB" if full else "make it writable"
        raise OSError(f"{partial_of(job.out)} could not be written ({reason}): {remedy}, {again}") from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        raise MemoryError(
            f"memory ran out while {job.source} was converted, which takes about {found.memory / 2**30:.1f} GiB with "
            f"{found.layer}: free some, or use fewer --jobs or a machine with more, {again}"
        ) from error


def _is_result(job: Job) -> bool:
    """Whether the output folder is a checkpoint of this source with these settings."""
    if not job.out.is_dir() or not checkpoint.is_encoded(job.out):
        return False
    held, _ = checkpoint.read_index(job.out)
    wanted = {**job.spec.as_dict(), "source": _relative_source(job)}
    return checkpoint.spend_of(held) == job.spend and all(held.get(name) == value for name, value in wanted.items())


def _relative_source(job: Job) -> str:
    return os.path.relpath(job.source.absolute(), job.out)


def _say(plan: Outline, found: Forecast, count: int) -> None:
    """What is going to be done, by `count` processes, and what is left out."""
    experts = sum(sketch.experts for sketch in plan.sketches)
    logger.info(
        "%d experts in %d sites of %s; %.2f GiB will be written, about %.1f GiB of memory are needed",
        experts, len(plan.sketches), plan.source.folder, found.bytes / 2**30, found.memory / 2**30,
    )  # fmt: skip
    free = psutil.virtual_memory().available
    if count * found.memory > free:
        logger.warning(
            "%d processes need about %.1f GiB of memory together, and %.1f GiB are free: the system may end them",
            count, count * found.memory / 2**30, free / 2**30,
        )  # fmt: skip
    for path, reason in plan.refused.items():
        logger.warning("stays as it is: %s (%d bytes): %s", path, plan.bytes_of(plan.mapping.below(path)), reason)
    for kind, names in (("the model does not use", plan.mapping.extra), ("transformers passes over", plan.mapping.ignored)):
        if names:
            logger.warning("left out: %d tensors that %s, such as %s", len(names), kind, names[0])


def _convert(job: Job, plan: Outline, found: Forecast, partial: Path, team: Team) -> dict[str, str]:
    """Do the work in a folder of our own, then give it its name; returns experts that were left alone, and why."""
    work = team.together(lambda: _opened(job, plan, found, partial, team) if team.main else None)
    with at_work(team, partial):
        work = team.together(lambda: work or _work(job, plan, found, partial, team))
        stream(work)
        if team.main:
            if job.weighed:
                weighing.weigh(work, job.max_memory)
            _put_in_place(job, plan, found, partial, work)
            finish(partial, job.out)
    return {path: reason for unit in work.journal.units.values() for path, reason in unit["refused"].items()}


def _work(job: Job, plan: Outline, found: Forecast, partial: Path, team: Team) -> Work:
    batches = calibration_batches(job, plan, partial)
    spending = {"budget": job.spend.budget, "skip": job.spend.skip, "allocator": job.spend.allocator}
    journal = Journal(partial, settings(plan, job.spec, batches, job.device) | spending)
    if job.calibration is None and team.main:
        own_text.keep(batches, partial / own_text.WRITTEN)  # behind the journal, which begins in an empty folder
    example = calibrate.example_batch(plan.model, None)
    return Work(plan, job.spec, [example, *batches], journal, Shards(partial, found.rooms, journal.shards), job.device, team)


def _opened(job: Job, plan: Outline, found: Forecast, partial: Path, team: Team) -> Work:
    """The work, with what a run before left put in order, and room on the disk."""
    _say(plan, found, team.count)
    work = _work(job, plan, found, partial, team)
    work.shards.recover()
    written = sum(shard["bytes"] for group in work.shards.state.values() for shard in group)
    free = shutil.disk_usage(partial).free
    if free < found.bytes - written:
        raise ValueError(
            f"{partial} needs {(found.bytes - written) / 2**30:.2f} GiB more, and its disk has {free / 2**30:.2f} GiB free: "
            "make room, or choose another --output-dir"
        )
    if work.journal.units:
        logger.info("going on: %d parts are done", len(work.journal.units))
    return work


def calibration_batches(job: Job, plan: Outline, partial: Path) -> list[calibrate.Batch]:
    """Token ids for the residual profile, of the file that the job names or written by the model itself."""
    return own_text.batches(plan, job.calibration, partial / own_text.WRITTEN, job.device, job.max_memory)


def _put_in_place(job: Job, plan: Outline, found: Forecast, partial: Path, work: Work) -> None:
    """Headers, names, residual tables, config, index and companions: the folder is whole then, but for its name."""
    units = work.journal.units
    sites = [site for path in plan.layers for site in units[path]["sites"]]
    if not sites:
        raise ValueError(f"none of the experts of {job.source} reproduced its own output, so nothing was encoded: report this")
    index = _place(partial, work.shards)
    unreached = {path: ids for unit in units.values() for path, ids in unit["unreached"].items()}
    held = checkpoint.settings_of(job.spec, job.spend, _relative_source(job), sites, unreached)
    storage.copy_companions(job.source, partial)
    if getattr(plan.model, "generation_config", None) is not None:
        plan.model.generation_config.save_pretrained(partial)
    (partial / "README.md").write_text(_card(job, len(sites)), encoding="utf-8")
    write_json(partial / "config.json", storage.plain_config(plan.model) | {"quantization_config": held})
    for pattern in ("*.growing", "*.new", "*.partial", f"{WORKER}.*", own_text.WRITTEN):  # also of runs that were killed
        for leftover in partial.glob(pattern):
            leftover.unlink()
    write_json(partial / checkpoint.INDEX, index)
    _check_size(job, plan, found, partial, work, [site["path"] for site in sites])


def _check_size(job: Job, plan: Outline, found: Forecast, partial: Path, work: Work, sites: list[str]) -> None:
    tensors = {
        name: fields for group in work.shards.state.values() for shard in group for name, fields in shard["tensors"].items()
    }
    size, reasons = written_size(plan, job.spec, found, sites, tensors)
    written = sum(file.stat().st_size for file in partial.iterdir() if file.name not in (JOURNAL, checkpoint.MARKER))
    check_size(size, written, reasons, found, partial, len(sites))


def _place(partial: Path, shards: Shards) -> dict[str, dict]:
    """Give the weights their files; returns the index."""
    index = checkpoint.new_index()
    placed = shards.place([group for group in shards.state if group != "residuals"])
    index["weight_map"], index["files"], index["hashes"] = placed
    file = partial / checkpoint.RESIDUALS
    if not file.is_file():
        beside = file.with_name(f"{file.name}.new")
        save_file(shards.read("residuals"), beside, metadata={"format": "pt"})
        beside.chmod(0o644)
        sync(beside)
        beside.rename(file)
    index["weight_map"] |= {name: file.name for shard in shards.state["residuals"] for name in shard["tensors"]}
    index["files"][file.name] = file.stat().st_size
    return index


def _card(job: Job, sites: int) -> str:
    spec = job.spec
    return storage.CARD.format(
        name=job.out.name, budget=job.spend.budget, lower=spec.k_min, sites=sites, k_max=spec.k_max, k_min=spec.k_min,
        group=spec.group_size,
    )  # fmt: skip


def described(job: Job, plan: Outline, refused: dict[str, str]) -> dict:
    """What a converted folder holds, as `dpamoe convert` reports it."""
    held, weight_map = checkpoint.read_index(job.out)
    sites = [Site.from_dict(fields) for fields in held["sites"]]
    sizes = checkpoint.tensor_bytes(job.out, sorted(set(weight_map.values())))
    weights = sum(site.weights for site in sites)
    encoded = {name for name in checkpoint.expected_tensors(held) if not name.endswith(".residuals")}
    planes = sum(sizes[name] for name in encoded if checkpoint.group_of(name) != "base")
    fixed = sum(sizes[name] for name in encoded if checkpoint.group_of(name) == "base")
    replaced = tuple(f"{site.path}." for site in sites)
    others = sum(plan.numbers_of(name) for name in plan.mapping.wanted if not name.startswith(replaced))
    refused = {**plan.refused, **refused, **dict.fromkeys(plan.ignored, "ignored, as --ignore asks")}
    return {
        "source": str(job.source), "output_dir": str(job.out), "sites": len(sites),
        "bytes": sum(file.stat().st_size for file in job.out.iterdir()), "experts": sum(site.experts for site in sites),
        "experts_found": max(plan.experts, sum(site.experts for site in sites)), "budget": held["default_budget"],
        "encoded_bytes": planes + fixed,
        "original_bytes": sum(site.weights * getattr(torch, site.dtype).itemsize for site in sites),
        "bits_per_weight": 8 * (planes * held["default_budget"] / held["k_max"] + fixed) / weights,
        "expert_share": weights / (weights + others), "unreached": held["unreached"], "refused": refused,
        "refused_bytes": _bytes_left(plan, refused),
    }  # fmt: skip


def _bytes_left(plan: Outline, refused: Iterable[str]) -> dict[str, int]:
    """Bytes that experts take which stay as they are."""
    return {path: plan.bytes_of(plan.mapping.below(path)) for path in refused}
