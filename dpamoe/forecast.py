"""What a conversion will write and how much memory it needs, from the outline of a model alone."""

import json
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dpamoe import checkpoint
from dpamoe.kernels.layout import groups_of
from dpamoe.layers import Outline
from dpamoe.passes.weightless import Sketch
from dpamoe.shards import header_room
from dpamoe.sites import Stack
from dpamoe.spec import EncodeSpec, SpendSpec
from dpamoe.threshold import BINS

logger = logging.getLogger("dpamoe")
CARD_BYTES = 500
PROCESS = 700 << 20  # Python, torch and transformers themselves, threads included
VERIFY, ENCODE = 2, 1  # copies of a site's weights in fp32 while it is verified, and in its own type while it is encoded
CALIBRATION_TOKENS, COPIES = 128 * 512, 4  # hidden states of all batches, and what a layer makes of those of one batch
TOKENS_KEPT = 256
TOLERATED = 0.01  # of the size of a folder: more than that is an error
TEXTS = 4 << 10  # bytes for each site that config, index and card may differ by, which are estimated: matters in tiny models
WIDENED = re.compile(r"\.(gate_up_proj|down_proj)\.(scale(\.\d+)?|offset)$")  # fp32 where fp16 would overflow or vanish


@dataclass(frozen=True)
class Forecast:
    """bytes: of the folder; encoded: of planes, scales and offsets in it; rooms: for headers, by group; memory: at the peak.

    layer: where that is; companions: bytes of files that are copied; weighed: whether it holds what layers matter.
    """

    bytes: int
    encoded: int
    rooms: dict[str, int]
    memory: int
    layer: str
    companions: int
    weighed: bool


def forecast(
    plan: Outline, spec: EncodeSpec, companions: int, rooms: dict[str, int] | None = None, weighed: bool = False
) -> Forecast:  # fmt: skip
    """Predict the size of the folder, and the peak of memory. companions: bytes of tokenizer files and the like.

    rooms: bytes kept free for headers, where that is settled already. weighed: what layers matter is measured and written too.
    """
    groups: dict[str, dict[str, int]] = {"base": {}, "residuals": {}}
    replaced = tuple(f"{sketch.path}." for sketch in plan.sketches)
    for name in plan.mapping.wanted:
        if not name.startswith(replaced):
            groups["base"][name] = plan.bytes_of([name])
    encoded = 0
    for sketch in plan.sketches:
        for name, size in encoded_sizes(plan, sketch, spec).items():
            groups.setdefault(checkpoint.group_of(name), {})[f"{sketch.path}.{name}"] = size
            encoded += size if name.startswith(("gate_up_proj", "down_proj")) else 0
        if weighed:
            sizes = dict(zip(checkpoint.IMPORTANCE, (4, 4 * sketch.experts * BINS), strict=True))
            groups["residuals"] |= {f"{sketch.path}.{name}": size for name, size in sizes.items()}
    rooms = rooms or {name: header_room(list(group)) for name, group in groups.items()}
    data = {name: sum(group.values()) for name, group in groups.items()}
    headers = sum(rooms[name] * (1 + size // checkpoint.SHARD_BYTES) for name, size in data.items() if name != "residuals")
    headers += _plain_header(groups["residuals"], (plan.sketches[0].experts, spec.k_max + 1))
    texts = companions + _texts(plan, spec, [name for group in groups.values() for name in group])
    memory, layer = _memory(plan, spec)
    return Forecast(sum(data.values()) + headers + texts, encoded, rooms, memory, layer, companions, weighed)


def _plain_header(sizes: dict[str, int], shape: tuple[int, int]) -> int:
    """Bytes of the header of a file that safetensors writes itself, all tensors fp32 of about this shape."""
    total = sum(sizes.values())
    fields = {name: {"dtype": "F32", "shape": shape, "data_offsets": [total, total]} for name in sizes}
    return 8 + len(json.dumps({"__metadata__": {"format": "pt"}, **fields}, separators=(",", ":")))


def written_size(
    plan: Outline, spec: EncodeSpec, found: Forecast, sites: list[str], tensors: dict[str, dict]
) -> tuple[int, list[str]]:
    """What the folder has to take now that it is known which experts were encoded, and why that is not the forecast.

    sites: paths of those that were; tensors: dtype and data_offsets of all that was written, by name.
    """
    kept = [sketch for sketch in plan.sketches if sketch.path in sites]
    foreseen = replace(plan, sketches=kept)
    size = forecast(foreseen, spec, found.companions, found.rooms, found.weighed).bytes if kept else found.bytes
    reasons = [f"{sketch.path} stays as it is" for sketch in plan.sketches if sketch.path not in sites]
    lengths = {name: fields["data_offsets"][1] - fields["data_offsets"][0] for name, fields in tensors.items()}
    for path in set(sites) - {sketch.path for sketch in kept}:
        reasons.append(f"{path} could be encoded after all")
        size += sum(length for name, length in lengths.items() if name.startswith(f"{path}."))
        size -= plan.bytes_of(plan.mapping.below(path))
    own = tuple(f"{sketch.path}.{part}." for sketch in kept for part in ("act", "post"))
    size += sum(length for name, length in lengths.items() if name.startswith(own))
    size -= sum(sum(own_sizes(plan, sketch).values()) for sketch in kept)
    known = tuple(f"{sketch.path}." for sketch in kept)
    wide = [name for name in tensors if WIDENED.search(name) and name.startswith(known) and tensors[name]["dtype"] == "F32"]
    if wide:
        more = sum(lengths[name] for name in wide) // 2
        reasons.append(f"{len(wide)} tensors of scales need fp32, since fp16 does not hold their range (+{more:,} bytes)")
        size += more
    return size, reasons


def check_size(size: int, written: int, reasons: list[str], found: Forecast, folder: Path, sites: int) -> None:
    """ValueError if a folder is not as large as all that is known of it; what was foreseen may have been less, with reasons."""
    logger.info("predicted %d bytes, wrote %d (%+.2f %%)", found.bytes, written, 100 * (written / found.bytes - 1))
    if abs(written - size) > max(TOLERATED * size, TEXTS * sites):
        raise ValueError(
            f"{folder} has {written:,} bytes, and what was encoded takes {size:,}: something is there twice or missing; start "
            "again with --no-resume, and report this if it comes again"
        )
    for reason in reasons:
        logger.warning("not as predicted: %s", reason)


def rows_of(plan: Outline, sketch: Sketch, stack: Stack) -> int:
    """Outputs of one expert in a stacked weight."""
    shape = plan.mapping.wanted[f"{sketch.path}.{stack.names[0]}"][0]
    if len(stack.names) == 1 and len(shape) == 2:
        shape = (sketch.experts, shape[0] // sketch.experts, shape[1])
    return shape[-1] if stack.transposed else shape[-2]


def encoded_sizes(plan: Outline, sketch: Sketch, spec: EncodeSpec) -> dict[str, int]:
    """Bytes of each tensor of a site's encoded experts, by its name in the module; scales in fp16."""
    sizes: dict[str, int] = {}
    rows = sum(rows_of(plan, sketch, stack) for stack in sketch.layout.ups)
    for weight, out, inputs in (("gate_up_proj", rows, sketch.hidden), ("down_proj", sketch.out, sketch.inner)):
        per_group = sketch.experts * out * groups_of(inputs, spec.group_size)
        for plane in range(spec.k_max):
            sizes[f"{weight}.plane.{plane}"] = sketch.experts * out * -(-inputs // 8)
            if spec.scale_mode == "shared":
                sizes[f"{weight}.scale.{plane}"] = 2 * per_group
        if spec.scale_mode == "tied":
            sizes |= {f"{weight}.scale": per_group, f"{weight}.offset": per_group, f"{weight}.unit": 4 * sketch.experts}
        else:
            sizes[f"{weight}.offset"] = 2 * per_group
    for name, stacks in (("up_bias", sketch.layout.up_biases), ("down_bias", (sketch.layout.down_bias,))):
        held = [f"{sketch.path}.{own}" for stack in stacks if stack is not None for own in stack.names]
        if held:
            sizes[name] = plan.bytes_of(held)
    return sizes | own_sizes(plan, sketch) | {"residuals": 4 * sketch.experts * (spec.k_max + 1)}


def own_sizes(plan: Outline, sketch: Sketch) -> dict[str, int]:
    """Bytes of what else an experts module holds, such as norms; how much of it its programs read, and keep, is not known."""
    layout = sketch.layout
    stacks = (*layout.ups, layout.down, *layout.up_biases, *([layout.down_bias] if layout.down_bias else ()))
    known = {f"{sketch.path}.{name}" for stack in stacks for name in stack.names}
    others = [name for name in plan.mapping.below(sketch.path) if name not in known]
    return {f"post.{name.removeprefix(sketch.path + '.').replace('.', '_')}": plan.bytes_of([name]) for name in others}


def _texts(plan: Outline, spec: EncodeSpec, names: list[str]) -> int:
    """Bytes of config, index and card."""
    sites = [{**sketch.as_dict(), "path": sketch.path, "up_rows": 0, "weigh_input": False} for sketch in plan.sketches]
    settings = checkpoint.settings_of(spec, SpendSpec(), None, sites, {})
    config = plan.model.config.to_json_string(use_diff=False) + json.dumps({"quantization_config": settings}, indent=2)
    file = "model-plane-0-00001-of-00001.safetensors"
    index = {"weight_map": dict.fromkeys(names, file), "hashes": dict.fromkeys(names, "0" * 64)}
    return len(config) + len(json.dumps(index, indent=2)) + CARD_BYTES


def _memory(plan: Outline, spec: EncodeSpec) -> tuple[int, str]:
    """Peak of memory and the layer where it is reached: the layer, copies to verify and encode it, hidden states, samples."""
    dtype = plan.source.dtype()
    hidden = max(sketch.hidden for sketch in plan.sketches) * dtype.itemsize
    rest = plan.bytes_of(plan.rest)
    peak, where = 0, ""
    for layer in plan.layers:
        size = plan.bytes_of(plan.mapping.below(layer))
        for sketch in plan.sketches:
            if sketch.path.startswith(f"{layer}.") or sketch.path == layer:
                own = plan.bytes_of(plan.mapping.below(sketch.path))
                encoded = sum(encoded_sizes(plan, sketch, spec).values())
                samples = TOKENS_KEPT * sketch.experts * hidden
                verify = VERIFY * own * torch.float32.itemsize // dtype.itemsize
                size = max(size, plan.bytes_of(plan.mapping.below(layer)) + max(verify, ENCODE * own + encoded + samples))
        if size > peak:
            peak, where = size, layer
    return PROCESS + rest + peak + COPIES * CALIBRATION_TOKENS * hidden, where


def check_memory(plan: Outline, found: Forecast, limit: int | None) -> None:
    """ValueError if the forecast exceeds `limit` bytes."""
    if limit is not None and found.memory > limit:
        size = plan.bytes_of(plan.mapping.below(found.layer))
        raise ValueError(
            f"converting {plan.source.folder} needs about {found.memory / 2**30:.1f} GiB of memory, of which its largest "
            f"layer, {found.layer}, takes {size / 2**30:.1f} GiB, and --max-memory allows {limit / 2**30:.1f} GiB: "
            "allow more, or use a machine that has it"
        )


def companions_of(folder: Path, suffixes: tuple[str, ...], anew: tuple[str, ...]) -> int:
    """Bytes of the files of a folder that are copied beside the weights."""
    return sum(
        file.stat().st_size for file in folder.iterdir()
        if file.is_file() and not file.name.endswith(suffixes) and file.name not in anew and not file.name.startswith(".")
    )  # fmt: skip
