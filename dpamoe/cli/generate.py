"""`dpamoe generate`: write text with an encoded or original model at a chosen budget."""

import dpamoe
from dpamoe import checkpoint, storage, text
from dpamoe.cli import options

NAME = "generate"
HELP = "write text with an encoded (or original) model"


def arguments(parser) -> None:
    """Flags of this command."""
    parser.add_argument("model", help="an encoded or original model folder")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--budget", type=float, help="average planes per selected expert")
    parser.add_argument("--k-max", type=int, help="read only this many planes from the checkpoint")
    parser.add_argument("--max-new-tokens", type=options.positive, default=64)
    options.device_flag(parser)


def run(args) -> dict:
    """Load, write, and say at which budget."""
    encoded = checkpoint.is_encoded(args.model)
    if encoded:
        model = storage.load(args.model, budget=args.budget, k_max=args.k_max, device=args.device)
    elif args.budget is None and args.k_max is None:
        model = storage.load_original(args.model).to(args.device)
    else:
        raise ValueError(f"{args.model} is not encoded, so it has no budget: run `dpamoe convert` on it first")
    written = complete(model, text.load_tokenizer(args.model), args.prompt, args.max_new_tokens)
    spent = dpamoe.stats(model)["mean_planes"] if encoded else None
    return {"model": args.model, "prompt": args.prompt, "text": written, "mean_planes": spent}


def complete(model, tokenizer, prompt: str, tokens: int) -> str:
    """Greedy continuation of a prompt, without the prompt."""
    import torch

    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=True)
    ids = encoded["input_ids"].to(next(model.parameters()).device)
    begin = tokenizer.bos_token_id
    if begin is not None and (ids.shape[1] == 0 or int(ids[0, 0]) != begin):
        ids = torch.cat([torch.full((1, 1), begin, device=ids.device), ids], 1)
    if ids.shape[1] == 0:
        raise ValueError("the prompt holds no tokens: give some text")
    with torch.no_grad():
        written = model.generate(
            input_ids=ids.long(), attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
        )  # fmt: skip
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


def show(outcome: dict) -> str:
    """The text alone."""
    return outcome["prompt"] + outcome["text"]
