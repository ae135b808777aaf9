"""Ratios on the CPU: a pass of an encoded model against the original with eager experts, and the encoder per million weights.

python tests/benchmarks/bench_cpu.py MODEL TEXT [--max-tokens 20000] [--budget 4]
"""

import argparse
import platform
import time
from datetime import date

import torch
import transformers

import dpamoe
from dpamoe import evaluate, storage, text
from dpamoe.encode import encode
from dpamoe.passes.find import find_sites
from dpamoe.sites import gather


def seconds(run, repeats: int = 3) -> float:
    """Median time of a few runs after one warm-up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


def one_pass(model, windows):
    """One forward pass over all windows."""
    with torch.no_grad():
        for ids in windows:
            model(input_ids=ids, use_cache=False)


def encoder_speed(model) -> float:
    """Seconds per million weights on one thread, over the first site."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    site = find_sites(model, (), {"input_ids": torch.arange(2, 18).view(1, -1)}).sites[0]
    up = gather(model.get_submodule(site.path), site.layout, site.experts).up
    spent = seconds(lambda: encode(up, dpamoe.EncodeSpec(group_size=64)))
    torch.set_num_threads(threads)
    return spent / up.numel() * 1e6


def main():
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--max-tokens", type=int, default=20000)
    parser.add_argument("--budget", type=float, default=4.0)
    args = parser.parse_args()
    model = evaluate.to_run(storage.load_original(args.model), "cpu")
    ids = text.token_ids(text.load_tokenizer(args.model), text.read_text(args.text))
    windows = text.batches(text.windows(ids, 512, model.config.bos_token_id, args.max_tokens), evaluate.BATCH)
    speed = encoder_speed(model)
    model.set_experts_implementation("eager")
    original = seconds(lambda: one_pass(model, windows))
    dpamoe.transform(model, args.budget, calibration=ids[-8192:])
    encoded = seconds(lambda: one_pass(model, windows))
    print(f"{date.today()}, torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}, "
          f"{torch.get_num_threads()} threads")  # fmt: skip
    print(f"pass over {args.max_tokens} tokens: original (fp32, eager experts) {original:.2f} s, encoded at budget "
          f"{args.budget:g} {encoded:.2f} s, ratio {encoded / original:.2f}")  # fmt: skip
    print(f"encoder, group 64, one thread: {speed:.2f} s per million weights")


if __name__ == "__main__":
    main()
