"""`save_pretrained` of a model with encoded experts, so that no caller of it writes weights that load as noise."""

from functools import partial
from pathlib import Path

from torch import nn

from dpamoe.modules import encoded_experts


def keep_own_format(model: nn.Module) -> None:
    """Let `model.save_pretrained` write what `load` reads; transformers' own would write a folder that loads as noise."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = partial(save_pretrained, model)  # survives copying and pickling, as a method would not


def save_pretrained(model: nn.Module, save_directory: str | Path, push_to_hub: bool = False, **options) -> None:
    """`save` under the name and with the arguments that transformers calls; `save_directory` may be there if it is empty.

    A model with an adapter of peft writes the adapter alone, as always. The options say how transformers cuts and names its
    files, which `save` does in its own way. Raises ValueError as `save`, and for tensors other than the model's.
    """
    if getattr(model, "_hf_peft_config_loaded", False) or not encoded_experts(model):
        return type(model).save_pretrained(model, save_directory, push_to_hub=push_to_hub, **options)
    if push_to_hub or options.get("state_dict") is not None:
        name = "push_to_hub" if push_to_hub else "state_dict"
        raise ValueError(f"save_pretrained({name}=…) is not for encoded models: save the folder, then upload it as it is")
    from dpamoe.storage import save  # which needs the model's front door, and that needs this file

    out = Path(save_directory)
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
    save(model, out)
