"""Text generation from a checkpoint of any layout, in a notebook or with `python -m trainer.inference`.

    from trainer.inference import generate, load_model

    model, tokenizer = load_model("runs/gpt", tokenizer="tokenizer.json")
    for completion in generate(model, tokenizer, ["Once upon a time"]):
        print(completion.text)

`loading` builds the model and reads its weights, `model` computes logits, `cache` has the cache, in which `attention`
puts keys and values and `latent_attention` latents, `batch` is a step of several rows, `sampling` chooses tokens,
`ending` finds where a text ends, and `generation` is the loop around them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainer.distributed.rendezvous import Ranks
from trainer.inference.checkpoint import find_checkpoint
from trainer.inference.generation import Completion, Options, generate
from trainer.inference.start import prepare_device
from trainer.inference.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from trainer.inference.model import Model

__all__ = ["Completion", "Options", "Tokenizer", "generate", "load_model", "load_tokenizer"]


def load_model(
    path: str | Path,
    *,
    tokenizer: str | Path,
    eod_token: str | None = None,
    device: Literal["cuda", "cpu"] | None = None,
    precision: Literal["bf16", "fp16", "fp32"] | None = None,
) -> tuple[Model, Tokenizer]:
    """Load the model of a checkpoint into this process, and its tokenizer.

    `path` is an iter_... directory, or a directory of checkpoints or of a run, whose newest complete checkpoint is
    loaded. `tokenizer` is gpt2, bytes, a tokenizer.json or a directory with tokenizer files. `eod_token` is the token
    at the end of a document. The default device is a GPU if there is one. With "cpu", this hides GPUs from the
    process. The default precision is the one of training.

    Raises:
        TrainerError: there is no such checkpoint, it cannot be loaded, or the tokenizer does not fit it.
    """
    found = find_checkpoint(Path(path))
    loaded_tokenizer = load_tokenizer(tokenizer, eod_token)
    chosen = prepare_device(device)
    from trainer.inference.loading import load  # imports megatron.core: after `prepare_device`

    model = load(
        found,
        Ranks(0, 0, 1, "load_model"),
        device=chosen,
        precision=precision,
        vocab_size=loaded_tokenizer.size,
    )
    loaded_tokenizer.check_fits(model.vocab_size)
    return model, loaded_tokenizer
