"""An original model folder as tensors on disk: every header is checked before anything is read, and no file is mapped.

Quantised tensors appear under the name and with the shape of the plain weight they stand for: an FP8 `weight` with its
`weight_scale_inv`, mxfp4 `…_blocks` with `…_scales`.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dpamoe import formats
from dpamoe.checkpoint import AGAIN, read_config, read_header
from dpamoe.files import read_json

INDEX = "model.safetensors.index.json"
FP8 = ("F8_E4M3", "F8_E5M2")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
METHODS = ("fp8", "mxfp4")
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
BLOCK = (128, 128)


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: bytes start to start + size of a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Stored:
    """One weight: its tensors on disk (the weight alone, or with its scales), and its plain shape."""

    entries: tuple[Entry, ...]
    shape: tuple[int, ...]
    block: tuple[int, int] | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """As stored; None for a quantised weight, which has none of its own."""
        return DTYPES[self.entries[0].dtype] if len(self.entries) == 1 else None


@dataclass(frozen=True)
class Source:
    """A model folder: its weights by name, and its config."""

    folder: Path
    tensors: dict[str, Stored]
    config: dict

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One weight from disk, in `dtype` if given; quantised ones in `dtype` or bf16."""
        stored = self.tensors[name]
        parts = [read_entry(entry) for entry in stored.entries]
        if len(parts) == 1:
            return parts[0] if dtype is None else parts[0].to(dtype)
        plain = torch.bfloat16 if dtype is None else dtype
        if stored.block is None:
            return formats.from_mxfp4(*parts, plain)
        return formats.from_blocks(*parts, stored.block, plain)

    def dtype(self) -> torch.dtype:
        """What the model computes in: as the config says, else the type of its first float weight."""
        for part in (self.config, self.config.get("text_config") or {}):
            named = part.get("dtype") or part.get("torch_dtype")
            if isinstance(named, str) and isinstance(getattr(torch, named, None), torch.dtype):
                return getattr(torch, named)
        kinds = (stored.dtype for stored in self.tensors.values())
        return next((kind for kind in kinds if kind is not None and kind.is_floating_point), torch.bfloat16)

    @property
    def bytes(self) -> int:
        """Bytes of all weights on disk."""
        return sum(entry.size for stored in self.tensors.values() for entry in stored.entries)


def read_entry(entry: Entry) -> Tensor:
    """One tensor as it is stored; its memory is its own, since pages of a mapped file would count as ours."""
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    view = memoryview(tensor.view(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")
    done = 0
    with entry.file.open("rb", buffering=0) as handle:
        handle.seek(entry.start)
        while done < entry.size:
            count = handle.readinto(view[done:])
            if not count:
                raise ValueError(f"{entry.file} ended while it was read: it was changed meanwhile, {AGAIN}")
            done += count
    return tensor


def open_source(folder: str | Path) -> Source:
    """Check the headers of a model folder and list its weights; no weight is read.

    Raises ValueError, naming file, tensor and remedy, for a file that is missing, truncated or padded, an index that does
    not agree with the files, and quantised weights without their scales.
    """
    folder = Path(folder)
    config = read_config(folder)
    settings = config.get("quantization_config") or {}
    method = settings.get("quant_method")
    if method == "dpamoe":
        raise ValueError(f"{folder} is encoded already: give the original model")
    if method is not None and method not in METHODS:
        raise ValueError(
            f"{folder} is quantized with {method}: give the model with plain bf16, fp16 or fp32 weights, with FP8 weights and "
            "block scales, or with mxfp4"
        )
    entries = _entries(folder)
    block = tuple(settings.get("weight_block_size") or BLOCK)
    return Source(folder, _plain(entries, block), config)


def _entries(folder: Path) -> dict[str, Entry]:
    file = folder / INDEX
    placed = read_json(file, AGAIN).get("weight_map") if file.is_file() else None
    if file.is_file() and not isinstance(placed, dict):
        raise ValueError(f"{file} has no weight_map: {AGAIN}")
    names = sorted(set(placed.values())) if placed else sorted(found.name for found in folder.glob("*.safetensors"))
    if not names:
        other = next((file.name for file in sorted(folder.iterdir()) if file.suffix in OTHER_WEIGHTS), None)
        held = f", only {other}: load it with transformers and save it again" if other else ": download the model again"
        raise ValueError(f"{folder} has no safetensors files{held}, since weights are read from safetensors")
    entries: dict[str, Entry] = {}
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing, and {INDEX} puts tensors there: {AGAIN}")
        for tensor, entry in _file_entries(folder / name).items():
            if placed is not None and placed.get(tensor) != name:
                raise ValueError(f"{folder / name} holds {tensor}, which {INDEX} does not put there: {AGAIN}")
            if tensor in entries:
                raise ValueError(f"{tensor} is in {entries[tensor].file.name} and in {name} of {folder}: remove one of them")
            entries[tensor] = entry
    lacking = sorted(placed.keys() - entries.keys()) if placed else []
    if lacking:
        raise ValueError(f"{folder / placed[lacking[0]]} lacks {lacking[0]}, which {INDEX} puts there: {AGAIN}")
    return entries


def _file_entries(file: Path) -> dict[str, Entry]:
    start, held = read_header(file)
    entries = {}
    for name, fields in held.items():
        begin, end = fields["data_offsets"]
        if fields["dtype"] not in DTYPES:
            raise ValueError(f"{file} holds {name} as {fields['dtype']}, which is not supported: use {', '.join(DTYPES)}")
        entry = Entry(file, fields["dtype"], tuple(fields["shape"]), start + begin, end - begin)
        if math.prod(entry.shape) * DTYPES[entry.dtype].itemsize != entry.size or begin < 0:
            raise ValueError(f"{file} gives {name} {entry.size} bytes for {entry.dtype} {list(entry.shape)}: {AGAIN}")
        entries[name] = entry
    return entries


def _plain(entries: dict[str, Entry], block: tuple[int, int]) -> dict[str, Stored]:
    """Weights by plain names; what scales others is taken with them."""
    tensors: dict[str, Stored] = {}
    taken: set[str] = set()
    for name, entry in entries.items():
        if name.endswith("_blocks") and entry.dtype == "U8":
            stem = name.removesuffix("_blocks")
            scales = entries.get(f"{stem}_scales")
            if scales is None or len(entry.shape) != 4 or scales.shape != entry.shape[:-1]:
                raise ValueError(f"{entry.file} holds {name} without {stem}_scales of its shape: {AGAIN}")
            tensors[stem] = Stored((entry, scales), (entry.shape[0], 32 * entry.shape[2], entry.shape[1]))
            taken |= {name, f"{stem}_scales"}
        elif entry.dtype in FP8:
            scale = _scale_name(name, entries)
            if scale is None:
                raise ValueError(
                    f"{entry.file} holds {name} as {entry.dtype} without its scales ({name}_scale_inv), so its values are "
                    "unknown: download the whole model again, or give it with bf16 weights"
                )
            size = formats.block_size(entry.shape, entries[scale].shape, block, f"{entry.file.name}: {name}")
            tensors[name] = Stored((entry, entries[scale]), entry.shape, size)
            taken |= {name, scale}
    taken |= {name for name in entries if name.endswith(("activation_scale", "activation_scale_inv", "input_scale"))}
    return {name: tensors.get(name) or Stored((entries[name],), entries[name].shape) for name in [*tensors, *entries]
            if name in tensors or name not in taken}  # fmt: skip


def _scale_name(name: str, entries: dict[str, Entry]) -> str | None:
    """The tensor that scales an FP8 weight: weight_scale_inv, or scale, beside it."""
    beside = (f"{name}_scale_inv", f"{name.removesuffix('weight')}scale" if name.endswith(".weight") else "")
    return next((other for other in beside if other in entries), None)
