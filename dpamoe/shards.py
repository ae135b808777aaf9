"""Safetensors files that grow: tensors are appended group by group, and the header goes into room kept free in front.

What was appended and synced survives a crash: the state, which a journal keeps, says how far each file counts, and whatever
stands behind that is cut off before the work goes on. The same tensors in the same order always give the same bytes.
"""

import hashlib
import json
import os
from pathlib import Path

import torch
from torch import Tensor

from dpamoe.checkpoint import RESIDUALS, SHARD_BYTES
from dpamoe.files import sync

ALIGN = 8  # a file that ends elsewhere is closed, since the header may not leave gaps
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
FIELDS_BYTES, SPARE_BYTES = 112, 2048  # room in a header: dtype, shape and offsets of one tensor; tensors not foreseen


class Shards:
    """Growing files of a folder, by group.

    state: {group: [{"file", "bytes", "tensors": {name: {"dtype", "shape", "data_offsets"}}, "hashes"}]}, plain data. rooms:
    bytes kept free for the header of each file of a group, the same in every run.
    """

    def __init__(self, folder: Path, rooms: dict[str, int], state: dict | None = None, shard_bytes: int = SHARD_BYTES):
        self.folder, self.rooms, self.shard_bytes = folder, rooms, shard_bytes
        self.state: dict[str, list[dict]] = state or {}
        self.touched: set[Path] = set()

    def recover(self) -> None:
        """Cut off what the state does not know. Raises ValueError if a file is shorter than it says."""
        known = {shard["file"] for group in self.state.values() for shard in group}
        for file in self.folder.glob("*.growing"):
            if file.name not in known:
                file.unlink()
        for group, shards in self.state.items():
            for number, shard in enumerate(shards, 1):
                file, length = self.folder / shard["file"], self.rooms[group] + shard["bytes"]
                if not file.is_file() and self._final(group, number).is_file():
                    continue
                found = file.stat().st_size if file.is_file() else 0
                if found < length:
                    raise ValueError(f"{file} has {found} bytes, {length} were written: start again with --no-resume")
                os.truncate(file, length)

    def _final(self, group: str, number: int) -> Path:
        if group == "residuals":
            return self.folder / RESIDUALS
        return self.folder / f"model-{group}-{number:05}-of-{len(self.state[group]):05}.safetensors"

    def append(self, group: str, tensors: dict[str, Tensor]) -> None:
        """Write tensors behind those that are there; wide types first, so that all stay aligned."""
        for name in sorted(tensors, key=lambda name: -tensors[name].element_size()):
            self._append(group, name, tensors[name].detach().cpu().contiguous())

    def _append(self, group: str, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        shards = self.state.setdefault(group, [])
        if not shards or not self._fits(shards[-1], size, tensor.element_size()):
            file = f"{group}-{len(shards) + 1:05}.growing"
            shards.append({"file": file, "bytes": 0, "tensors": {}, "hashes": {}})
        shard = shards[-1]
        file, start = self.folder / shard["file"], shard["bytes"]
        data = tensor.reshape(-1).view(torch.uint8).numpy() if size else b""
        with file.open("r+b" if file.exists() else "w+b", buffering=0) as handle:
            handle.seek(self.rooms[group] + start)
            view, done = memoryview(data), 0
            while done < size:
                done += handle.write(view[done:])
            if not size:
                handle.truncate(self.rooms[group] + start)
        self.touched.add(file)
        offsets = [start, start + size]
        shard["tensors"][name] = {"data_offsets": offsets, "dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
        shard["hashes"][name] = hashlib.sha256(data).hexdigest()
        shard["bytes"] += size

    def _fits(self, shard: dict, size: int, width: int) -> bool:
        return shard["bytes"] % min(ALIGN, width) == 0 and (not shard["bytes"] or shard["bytes"] + size <= self.shard_bytes)

    def sync(self) -> None:
        """Wait until everything appended so far is on the disk."""
        for file in sorted(self.touched):
            sync(file)
        if self.touched:
            sync(self.folder)
        self.touched.clear()

    def read(self, group: str) -> dict[str, Tensor]:
        """All tensors of a group that was not placed yet."""
        kinds, tensors = {name: dtype for dtype, name in NAMES.items()}, {}
        for shard in self.state.get(group, []):
            data = (self.folder / shard["file"]).read_bytes()[self.rooms[group] :]
            for name, fields in shard["tensors"].items():
                begin, end = fields["data_offsets"]
                flat = torch.frombuffer(bytearray(data[begin:end]), dtype=kinds[fields["dtype"]])
                tensors[name] = flat.view(fields["shape"])
        return tensors

    def place(self, groups: list[str]) -> tuple[dict[str, str], dict[str, int], dict[str, str]]:
        """Write the headers of some groups and give their files names; may be called again after a crash.

        A file is called model-{group}-{number}-of-{count}.safetensors. Returns tensor -> file, file -> bytes, and tensor ->
        sha256 of its data.
        """
        weight_map, sizes, hashes = {}, {}, {}
        for group in groups:
            shards = self.state.get(group, [])
            for number, shard in enumerate(shards, 1):
                file = self.folder / shard["file"]
                final = self._final(group, number)
                if not final.is_file():
                    self._write_header(file, shard["tensors"], self.rooms[group])
                    file.rename(final)
                weight_map |= dict.fromkeys(shard["tensors"], final.name)
                sizes[final.name] = self.rooms[group] + shard["bytes"]
                hashes |= shard["hashes"]
        sync(self.folder)
        return weight_map, sizes, hashes

    def _write_header(self, file: Path, tensors: dict[str, dict], room: int) -> None:
        in_order = dict(sorted(tensors.items(), key=lambda item: (item[1]["data_offsets"], item[0])))  # as JSON loses it
        content = json.dumps({"__metadata__": {"format": "pt"}, **in_order}, separators=(",", ":")).encode()
        if len(content) > room - 8:
            raise ValueError(f"the header of {file} needs {len(content)} bytes, {room - 8} were kept: report this")
        with file.open("r+b") as handle:
            handle.write((room - 8).to_bytes(8, "little") + content.ljust(room - 8))
        file.chmod(0o644)
        sync(file)


def header_room(names: list[str]) -> int:
    """Bytes to keep free for the header of a file that holds these tensors at most."""
    room = 8 + SPARE_BYTES + sum(len(name.encode()) + FIELDS_BYTES for name in names)
    return -(-room // ALIGN) * ALIGN
