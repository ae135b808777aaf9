"""Convert a model folder with one layer in memory: found, verified, profiled, encoded, written, journaled, and the next.

The calibration batches go through the model together, layer by layer. What is finished is on the disk and never done twice;
a run that goes on sends the batches through the finished layers again, without encoding them.
"""

import contextlib
import copy
import ctypes
import hashlib
import logging
from dataclasses import asdict, dataclass, replace

import psutil
import torch
from torch import Tensor, nn

from dpamoe import calibration as calibrate
from dpamoe import checkpoint
from dpamoe.api import encode_site
from dpamoe.encode import check_encodable
from dpamoe.journal import Journal
from dpamoe.layers import Outline
from dpamoe.mapping import drop_part, load_part, make_tensors
from dpamoe.passes import find
from dpamoe.profile import TOKENS_PER_EXPERT, collecting
from dpamoe.progress import track
from dpamoe.shards import Shards
from dpamoe.sites import Site, all_finite, gather
from dpamoe.spec import EncodeSpec
from dpamoe.sweep import Sweep
from dpamoe.team import ALONE, Team, wait_for

logger = logging.getLogger("dpamoe")
REST = "the rest"  # in the journal: all that is in no layer
AS_GRAPH = "it would become a graph, which cannot be stored: transform the model in memory"


@dataclass(frozen=True)
class Work:
    """One conversion under way."""

    plan: Outline
    spec: EncodeSpec
    batches: list[calibrate.Batch]
    journal: Journal
    shards: Shards
    device: str = "cpu"
    team: Team = ALONE

    @property
    def wanted(self) -> list[str]:
        """Layers with experts to encode."""
        return [path for path in self.plan.layers if any(_inside(sketch.path, path) for sketch in self.plan.sketches)]

    @property
    def swept(self) -> list[str]:
        """Layers that are written on the way: all up to the last with experts."""
        return self.plan.layers[: 1 + self.plan.layers.index(self.wanted[-1])]

    def owner(self, layer: str) -> int:
        """The process that writes a layer: of n processes each does every n-th."""
        return self.plan.layers.index(layer) % self.team.count


def source_settings(plan: Outline) -> dict:
    """What tells one source from another, without reading it: config and headers, sizes and times of its files."""
    files = sorted({entry.file for stored in plan.source.tensors.values() for entry in stored.entries})
    state = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    shapes = [(name, stored.shape, [entry.dtype for entry in stored.entries]) for name, stored in plan.source.tensors.items()]
    content = repr((state, shapes, sorted(plan.source.config.items(), key=str)))
    return {"source": hashlib.sha256(content.encode()).hexdigest(), "ignored": list(plan.ignored)}


def stream(work: Work) -> None:
    """Do all layers that are not done yet, then the rest. The files are complete then, and not yet in place.

    One of several processes does its own layers; the first one waits for the others and does the rest.
    """
    plan, journal = work.plan, work.journal
    todo = {path for path in work.swept if path not in journal.units and work.owner(path) == work.team.index}
    if todo and not journal.units.keys() >= set(work.wanted):
        _sweep(work, todo)
    if not work.team.main:
        return
    _catch_up(work, work.wanted)
    for path in plan.layers:
        if path not in journal.units:
            _write_plain(work, path, plan.mapping.below(path))
    if REST not in journal.units:
        _write_plain(work, REST, plan.rest)


def _catch_up(work: Work, layers: list[str]) -> None:
    """Wait until other processes have written these layers."""
    for layer in layers:
        if layer not in work.journal.units:
            wait_for(work.team, work.journal, layer, work.owner(layer))
    work.shards.state = work.journal.shards


def _inside(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.")


def outer_tensors(plan: Outline) -> list[str]:
    """What the model needs outside of its layers to run as far as its last layer: all but an output head of its own."""
    head = plan.model.get_output_embeddings() if hasattr(plan.model, "get_output_embeddings") else None
    own = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    tied = {other for name, others in plan.mapping.aliases.items() for other in (name, *others)}
    parameters = dict(plan.model.named_parameters(remove_duplicate=False))
    return [name for name in plan.rest if name in tied or id(parameters.get(name)) not in own]


def _sweep(work: Work, todo: set[str]) -> None:
    """Send all batches through the model until every layer of `todo` is done."""
    plan, swept, wanted = work.plan, set(work.swept), set(work.wanted)
    outer = outer_tensors(plan)
    load_part(plan.mapping, plan.model, plan.source, outer, work.device)
    names = [sketch.path for sketch in plan.sketches if any(_inside(sketch.path, path) for path in todo)]
    bar = iter(track(names, "encode", str))
    try:
        with Sweep(plan.model, plan.layers, [_moved(batch, plan.model, work.device) for batch in work.batches]) as sweep:
            passed = []
            while todo and not wanted.issubset(passed) and (layer := sweep.at) is not None:
                _layer(work, sweep, layer, bar, passed if layer in todo else None)
                todo = todo - {layer}
                passed += [layer] if layer in swept else []
        next(bar, None)
    finally:
        drop_part(plan.mapping, plan.model, outer)
    if missed := todo & wanted:
        raise ValueError(f"the calibration text never reached {min(missed)}: the model runs no such layer on text alone")


def _moved(batch: calibrate.Batch, model: nn.Module, device: str) -> calibrate.Batch:
    """A batch on the device, and without a cache, which would grow with every layer."""
    import inspect

    args, kwargs = batch
    kwargs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    return args, {**kwargs, **({"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {})}


def _layer(work: Work, sweep: Sweep, layer: str, bar, behind: list[str] | None) -> None:
    """One layer: into memory, through, out of memory. behind: the layers it is to be written behind; None: not encoded."""
    plan = work.plan
    names = plan.mapping.below(layer)
    logger.debug("%s: %.2f GiB into memory; %s", layer, plan.bytes_of(names) / 2**30, _memory())
    load_part(plan.mapping, plan.model, plan.source, names, work.device)
    try:
        if layer not in work.journal.units:
            check_finite(plan, names)
        if behind is None:
            sweep.first()
            sweep.others()
        else:
            _encode_layer(work, sweep, layer, bar, behind)
    finally:
        drop_part(plan.mapping, plan.model, names)
        give_back()


def _memory() -> str:
    """What this process holds and what the machine has left, in words."""
    held, free = psutil.Process().memory_info().rss, psutil.virtual_memory().available
    return f"{held / 2**30:.2f} GiB held, {free / 2**30:.1f} GiB free"


def give_back() -> None:
    """Return freed memory to the system: glibc keeps that of each thread, which adds up over the batches."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _encode_layer(work: Work, sweep: Sweep, layer: str, bar, behind: list[str]) -> None:
    model, mapping = work.plan.model, work.plan.mapping
    sites, refused = verified_sites(work.plan, layer, copy.deepcopy(sweep.inputs))  # caches that it fills are its own
    for site in sites:
        check_encodable(gather(model.get_submodule(site.path), site.layout, site.experts), work.spec, site.path)
    sweep.first()
    with collecting(model, sites, TOKENS_PER_EXPERT) as samples:
        sweep.others()
    unreached = {}
    for number, site in enumerate(sites):
        next(bar, None)
        encoded = encode_site(model.get_submodule(site.path), site, work.spec, samples.pop(site.path))
        if number == 0:
            _catch_up(work, behind)  # as late as one layer's encoded tensors allow
        _append_site(work, site, encoded.state_dict())
        unreached |= {site.path: encoded.unreached} if encoded.unreached else {}
    if not sites:
        _catch_up(work, behind)
    replaced = tuple(f"{site.path}." for site in sites)
    held = {name: _held(model, name) for name in mapping.below(layer) if not name.startswith(replaced)}
    work.shards.append("base", held)
    finish_unit(work, layer, {"sites": [site.as_dict() for site in sites], "unreached": unreached, "refused": refused})


def _append_site(work: Work, site: Site, encoded: dict[str, Tensor]) -> None:
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in encoded.items():
        groups.setdefault(checkpoint.group_of(name), {})[f"{site.path}.{name}"] = tensor
    for group, tensors in groups.items():
        work.shards.append(group, tensors)


def verified_sites(plan: Outline, layer: str, inputs: tuple[tuple, dict]) -> tuple[list[Site], dict[str, str]]:
    """Routed experts of a layer that is in memory, verified on these inputs, without ignored ones; and what was refused."""
    found = find.find_sites(plan.model.get_submodule(layer), *inputs)
    sites = [replace(site, path=f"{layer}.{site.path}") for site in found.sites]
    refused = {f"{layer}.{refusal.path}": refusal.reason for refusal in found.refused}
    refused |= {site.path: AS_GRAPH for site in sites if site.block}
    for path, reason in refused.items():
        logger.warning("left alone: %s: %s", path, reason)
    return [site for site in sites if not site.block and site.path not in plan.ignored], refused


def _held(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    return module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]


def check_finite(plan: Outline, names: list[str]) -> None:
    """ValueError, naming file and tensor, for a weight in memory that is NaN or infinite."""
    for name in names:
        _check_finite(plan, name, _held(plan.model, name))


def _check_finite(plan: Outline, name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or all_finite(tensor):
        return
    keys = [key for keys in plan.mapping.recipes[name].sources.values() for key in keys]
    bad = next((key for key in keys if not all_finite(plan.source.read(key))), keys[0])
    file = plan.source.tensors[bad].entries[0].file
    raise ValueError(f"{file} holds NaN or infinite weights in {bad}: repair the checkpoint or download it again")


def _write_plain(work: Work, unit: str, names: list[str]) -> None:
    """Copy tensors that are not encoded, one at a time."""
    for name in names:
        tensors = make_tensors(work.plan.mapping, work.plan.model, work.plan.source, [name])
        _check_finite(work.plan, name, tensors[name])
        work.shards.append("base", tensors)
    finish_unit(work, unit, {"sites": [], "unreached": {}, "refused": {}})


def finish_unit(work: Work, unit: str, outcome: dict) -> None:
    """Put what was appended on the disk, then say so in the journal."""
    work.shards.sync()
    work.journal.units[unit] = outcome
    work.journal.shards = work.shards.state
    work.journal.write()
    size = sum(shard["bytes"] for group in work.shards.state.values() for shard in group)
    logger.debug("%s: on the disk, %.2f GiB in all; %s", unit, size / 2**30, _memory())


def settings(plan: Outline, spec: EncodeSpec, batches: list[calibrate.Batch], device: str) -> dict:
    """Everything that the result depends on: a run with other settings must not go on with this one's files."""
    digest = hashlib.sha256()
    for _, kwargs in batches:
        for name, value in sorted(kwargs.items()):
            if isinstance(value, Tensor):
                digest.update(f"{name}{list(value.shape)}".encode() + value.cpu().numpy().tobytes())
    kind = torch.device(device).type
    return {
        "format": checkpoint.FORMAT_VERSION, "spec": asdict(spec), "calibration": digest.hexdigest(), "device": kind,
        **source_settings(plan),
    }  # fmt: skip
