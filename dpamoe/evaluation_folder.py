"""The folder of an evaluation: one file per finished point, so that a run that was cut short goes on where it stopped.

settings.json          what was measured on what; another run here must agree
full_precision.json    the full-precision model's own scores
points/*.json          one point each (see `evaluate`)
residuals.json         the residual tables of the encoded model
reference.logits       full-precision log-probabilities with reference.json; only while points are missing
sample.safetensors     some weights of the full-precision model, to tell another one by; likewise
results.json           everything, once all points are there
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dpamoe.evaluate import Job
from dpamoe.files import read_json, write_json
from dpamoe.modules import encoded_experts
from dpamoe.score import remove_reference

RESULTS, RESIDUALS, SAMPLE, LOCK = "results.json", "residuals.json", "sample.safetensors", "lock"
AGAIN = "delete it, and run the evaluation again"
SHOWN = 12  # letters of a setting that a person can compare


@dataclass(frozen=True)
class Folder:
    """One folder of results; all files in it are whole."""

    path: Path

    @property
    def reference(self) -> Path:
        """Where the full-precision log-probabilities go."""
        return self.path / "reference.logits"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out of this folder inside the block; ValueError if one is in it."""
        lock = FileLock(self.path / LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(
                f"another run is measuring into {self.path}: wait for it, or choose another --output-dir"
            ) from error
        try:
            yield
        finally:
            (self.path / LOCK).unlink(missing_ok=True)
            lock.release()

    def keep_sample(self, weight: Tensor) -> None:
        """Store some weights of the full-precision model."""
        save_file({"weight": weight.cpu().contiguous()}, self.path / SAMPLE)

    def sample(self) -> Tensor | None:
        """The weights that `keep_sample` stored."""
        return load_file(self.path / SAMPLE)["weight"] if (self.path / SAMPLE).is_file() else None

    def full_precision(self) -> dict | None:
        """The full-precision scores, if they are there."""
        return _read(self.path / "full_precision.json", "other_bytes")

    def keep_full_precision(self, scores: dict) -> None:
        """Store the full-precision scores."""
        write_json(self.path / "full_precision.json", scores)

    def point(self, allocation: str, budget: float | None) -> dict | None:
        """A finished point, if it is there."""
        return _read(self._file(allocation, budget), "allocation", "budget", "weight_bytes")

    def keep(self, point: dict) -> None:
        """Store a finished point."""
        write_json(self._file(point["allocation"], point["budget"]), point)

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs that have no point yet."""
        return [job for job in jobs if self.point(*job) is None]

    def points(self) -> list[dict]:
        """All finished points: by budget, static formats last, then by allocation."""
        found = [_read(file, "allocation", "budget", "weight_bytes") for file in sorted((self.path / "points").glob("*.json"))]
        return sorted(found, key=lambda point: (point["budget"] is None, point["budget"] or 0.0, point["allocation"]))

    def keep_residuals(self, model: nn.Module) -> None:
        """Store the residual tables of an encoded model."""
        held = encoded_experts(model)
        k_min = next(iter(held.values())).spec.k_min
        write_json(
            self.path / RESIDUALS, {"k_min": k_min, "sites": {p: experts.residuals.tolist() for p, experts in held.items()}}
        )

    def finish(self, outcome: dict) -> None:
        """Store the whole outcome; what is only needed to measure, and large, goes."""
        write_json(self.path / RESULTS, outcome)
        remove_reference(self.reference)
        (self.path / SAMPLE).unlink(missing_ok=True)

    def _file(self, allocation: str, budget: float | None) -> Path:
        return self.path / "points" / (f"{allocation}.json" if budget is None else f"{allocation}-{budget:.12g}.json")


def open_folder(path: Path, settings: dict) -> Folder:
    """Make a folder for these settings, or go on in one that has the same.

    Raises ValueError if it holds something else, or results of other settings.
    """
    held = _read(path / "settings.json") if path.is_dir() else None
    if held is None and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists and is no folder of an evaluation: choose another --output-dir")
    if held is not None:
        for name in sorted(settings.keys() | held.keys()):
            if held.get(name) != settings.get(name):
                there, here = (str(of.get(name)) for of in (held, settings))
                what = f": {there} there, {here} now" if max(len(there), len(here)) <= SHOWN else ""
                raise ValueError(
                    f"{path} holds results of another {name}{what}; choose another --output-dir, or delete that folder"
                )
    if not path.absolute().parent.is_dir():
        raise ValueError(f"folder {path.absolute().parent}, which should hold {path.name}, does not exist: make it first")
    (path / "points").mkdir(parents=True, exist_ok=True)
    if held is None:
        write_json(path / "settings.json", settings)
    return Folder(path)


def _read(file: Path, *keys: str) -> dict | None:
    """An object of a JSON file, None if there is no such file; ValueError if it is damaged or lacks a key."""
    if not file.is_file():
        return None
    found = read_json(file, AGAIN)
    if not found.keys() >= set(keys):
        raise ValueError(f"{file} lacks {', '.join(sorted(set(keys) - found.keys()))}: {AGAIN}")
    return found
