"""The model "dpamoe" of lm-eval: importing this file makes `simple_evaluate(model="dpamoe", …)` know it.

    import dpamoe.harness
    lm_eval.simple_evaluate(model="dpamoe", model_args="pretrained=FOLDER,budget=3.5", tasks=["arc_easy"])

The stock `lm_eval` command imports nothing of ours, so there the name stays unknown, and its model "hf" refuses an encoded
folder (unknown quantization type) before it reads a weight. In a process that has imported dpamoe, "hf" opens it as well.
"""

import copy
import inspect
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import Collator
    from lm_eval.models.utils_hf import get_dtype
except ImportError as error:
    raise ImportError(f'dpamoe.harness needs lm-eval: pip install "dpamoe[eval]" ({error})') from error

from dpamoe import api, checkpoint, storage
from dpamoe.evaluate import to_run
from dpamoe.modules import encoded_experts
from dpamoe.spec import SpendSpec

logger = logging.getLogger("dpamoe")
Request = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, ids of the context, ids of the continuation
OTHER_LOADERS = ("parallelize", "tp_plan", "peft", "delta", "autogptq", "gptqmodel", "gguf_file", "subfolder", "device_map")


@register_model("dpamoe")
class DpamoeLM(HFLM):
    """lm-eval's `HFLM` over a dpamoe model, or over the original that it is compared with.

    pretrained: an encoded folder, an original model folder, or a model in memory. budget, allocation: planes to spend, see
    `SpendSpec`; None keeps those of the model. k_max: read only the first k_max planes of an encoded folder. device: the GPU
    if there is one, else the CPU. On a CPU a model that is loaded here runs in fp32, unless dtype says otherwise. All other
    arguments are HFLM's. Log-probabilities are taken in fp32. Raises ValueError for a folder that is neither, for planes
    asked of a model that is not encoded, and for arguments of HFLM's loader that ours does not know.
    """

    def __init__(
        self, pretrained: str | Path | nn.Module, budget: float | None = None, allocation: str | None = None,
        k_max: int | None = None, device: str | None = None, softmax_dtype: str | torch.dtype = "float32", **others,
    ):  # fmt: skip
        if allocation is not None:
            SpendSpec(allocation=allocation)
        self._budget, self._allocation, self._k_max = budget, allocation, k_max
        if isinstance(pretrained, nn.Module):
            if k_max is not None:
                raise ValueError(f"k_max={k_max} says what to read from a folder, the model is in memory: leave it out")
            self._spend(pretrained)
        else:
            pretrained = str(pretrained)
            self._check_folder(pretrained, others)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(pretrained=pretrained, device=device, softmax_dtype=softmax_dtype, **others)
        accepted = inspect.signature(self.model.forward).parameters
        self._partial_logits = {"logits_to_keep", "use_cache"} <= accepted.keys()

    def _check_folder(self, folder: str, others: dict) -> None:
        asked = [name for name in OTHER_LOADERS if others.get(name)]
        if asked:
            raise ValueError(f'{", ".join(asked)} cannot be used with the model "dpamoe": leave it out, or use lm-eval\'s "hf"')
        planes = {"budget": self._budget, "allocation": self._allocation, "k_max": self._k_max}
        given = [f"{name}={value}" for name, value in planes.items() if value is not None]
        if not checkpoint.is_encoded(folder) and given:
            raise ValueError(
                f"{folder} is an original model, so {', '.join(given)} means nothing: convert it first (dpamoe convert)"
            )

    def _create_model(self, pretrained: str, dtype: str | torch.dtype | None = "auto", **others) -> None:
        """Load a folder onto `self.device`; what HFLM gives beyond that was checked before."""
        if checkpoint.is_encoded(pretrained):
            model = storage.load(pretrained, budget=self._budget, k_max=self._k_max)
        else:
            model = storage.load_original(pretrained)
        wanted = get_dtype(dtype)
        self._model = model.to(self.device, wanted) if isinstance(wanted, torch.dtype) else to_run(model, self.device)
        self._spend(self._model)

    def _spend(self, model: nn.Module) -> None:
        allocator = None if self._allocation is None else "exact"  # thresholds know no other allocation
        asked = {"budget": self._budget, "allocation": self._allocation, "allocator": allocator}
        changes = {name: value for name, value in asked.items() if value is not None}
        if changes:
            api.set_spend(model, **changes)

    @property
    def config(self):
        """The model's config without its quantization_config, in which HFLM would look for a method of transformers' own."""
        config = copy.copy(self._config)
        config.__dict__.pop("quantization_config", None)
        return config

    def get_model_info(self) -> dict:
        """What lm-eval writes beside the scores; the hub is not asked. Parameters count the encoded weights."""
        held = encoded_experts(self.model)
        info = {
            "model_num_parameters": sum(tensor.numel() for tensor in self.model.parameters())
            + sum(experts.site.weights for experts in held.values()),
            "model_dtype": str(self.model.dtype),
            "model_revision": "",
            "model_sha": "",
        }
        spend = next((experts.spend for experts in held.values()), None)
        return info if spend is None else info | {"budget": spend.budget, "allocation": spend.allocation}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **others) -> list[int]:
        """Token ids; with add_bos_token the first is the begin token, also of tokenizers that never add one on their own."""
        ids = super().tok_encode(string, add_special_tokens, **others)
        begin = self.tokenizer.bos_token_id
        if add_special_tokens is None and self.add_bos_token and begin is not None and ids[:1] != [begin]:
            return [begin, *ids]
        return ids

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As HFLM's, with bars on a terminal only."""
        return super().loglikelihood(requests, disable_tqdm or not sys.stderr.isatty())

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation and whether it is the greedy one; HFLM's order and batches.

        HFLM computes logits, and their softmax, at every position of a batch. Here they end at the continuations.
        """
        self._check_lengths(requests)
        order = Collator(
            requests, sort_fn=_longest_first, group_fn=_all_but_last, group_by="contexts" if self.logits_cache else None
        )
        detect = self.batch_size == "auto" and not override_bs and bool(requests)
        self.batch_sizes = {}
        size = (override_bs or 0) if self.batch_size == "auto" else self.batch_size
        answers = []
        silent = disable_tqdm or self.rank != 0 or not sys.stderr.isatty()
        with tqdm(total=len(requests), disable=silent, desc="loglikelihood") as bar:
            for chunk in order.get_batched(n=size, batch_fn=self._batch_scheduler if detect else None):
                logits = self._last_logits(chunk)
                for (texts, context, continuation), own in zip(chunk, logits, strict=True):
                    log_p = own.log_softmax(-1, dtype=self.softmax_dtype)
                    for name, ids, values in order.get_cache(texts, context, continuation, log_p[None]):
                        answers.append(_score(values[0, -len(ids) :], ids))
                        if name is not None:
                            self.cache_hook.add_partial("loglikelihood", name, answers[-1])
                        bar.update(1)
        return order.get_original(answers)

    def _check_lengths(self, requests: list[Request]) -> None:
        longest = max((len(continuation) for _, _, continuation in requests), default=1)
        shortest = min((len(continuation) for _, _, continuation in requests), default=1)
        if shortest < 1 or longest > self.max_length:
            raise ValueError(
                f"the continuations of a task have {shortest} to {longest} tokens, 1 to {self.max_length} can be scored: "
                "leave the task out, or raise max_length"
            )
        cut = sum(len(context) + len(continuation) > self.max_length + 1 for _, context, continuation in requests)
        if cut:
            logger.warning("%d of %d texts are cut on the left to %d tokens", cut, len(requests), self.max_length)

    def _last_logits(self, chunk: Sequence[Request]) -> list[Tensor]:
        """Logits [L, V] of each request at the positions that predict its continuation of L tokens."""
        rows = [(context + continuation)[-(self.max_length + 1) : -1] for _, context, continuation in chunk]
        starts = [len(row) - len(request[2]) for row, request in zip(rows, chunk, strict=True)]
        ids = [torch.tensor(row, dtype=torch.long) for row in rows]
        batch = nn.utils.rnn.pad_sequence(ids, batch_first=True).to(self.device)
        first = min(starts)
        spans = zip(self._logits_from(batch, first), starts, rows, strict=True)
        return [own[start - first : len(row) - first] for own, start, row in spans]

    def _logits_from(self, ids: Tensor, first: int) -> Tensor:
        """Logits of a batch [B, S] at positions `first` and later."""
        if not self._partial_logits:
            return self._model_call(ids)[:, first:]
        precision = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, precision, precision is not None):
            return self.model(ids, logits_to_keep=ids.shape[1] - first, use_cache=False).logits


def _longest_first(request: Request) -> tuple[int, tuple[int, ...]]:
    ids = request[1] + request[2]
    return -len(ids), tuple(ids)


def _all_but_last(request: Request) -> list[int]:
    return request[1] + request[2][:-1]


def _score(log_p: Tensor, ids: list[int]) -> tuple[float, bool]:
    """Sum of the log-probabilities [L, V] at ids, and whether each of them is the likeliest."""
    targets = torch.tensor(ids, device=log_p.device)
    values = log_p.gather(-1, targets[:, None])
    return float(values.sum()), bool((log_p.argmax(-1) == targets).all())
