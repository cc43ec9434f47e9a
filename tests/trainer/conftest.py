"""Corpora, configurations and uninterrupted runs that the trainer's tests share."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest

from tests.trainer.runs import EOD, LLAMA, QWEN, Run, finished, free_port, gpt_config, write_corpus
from trainer.contract.code import code_loading
from trainer.distributed import device

with warnings.catch_warnings():  # megatron.core warns at import of each CUDA library that is not there
    warnings.simplefilter("ignore")
    device.stand_in_for_cuda()
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    import trainer.train  # noqa: F401  # here, so that no test imports it first, with warnings as errors
    from tests.trainer.single_rank import resolved
    from trainer.distributed import groups
    from trainer.distributed.rendezvous import Ranks


@pytest.fixture(scope="module")
def process_groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessGroupCollection]:
    """The process groups of a single rank."""
    config = resolved(tmp_path_factory.mktemp("run"), LLAMA)
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    yield groups.initialize(config, Ranks(0, 0, 1, "test"), environ)
    groups.finalize()


@pytest.fixture
def mtp_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the number of MTP layers of earlier models, which Core keeps for the process."""
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})


@pytest.fixture
def code_of_this_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets the user's code that a test loads. Later tests of the same process may give its names to other files."""
    path, finders, modules = sys.path.copy(), sys.meta_path.copy(), set(sys.modules)
    monkeypatch.setattr(code_loading, "_FINDER", code_loading._Finder())
    yield
    sys.path[:], sys.meta_path[:] = path, finders
    for name in sys.modules.keys() - modules:
        if not _is_installed(sys.modules[name]):
            del sys.modules[name]


def _is_installed(module: ModuleType) -> bool:
    """True for modules of libraries, of the trainer and of the tests. Importing these again costs seconds."""
    if module.__name__.partition(".")[0] in ("hpcgen", "tests", "trainer"):
        return True
    places = [getattr(module, "__file__", None) or "", *(getattr(module, "__path__", None) or ())]
    return not any(places) or any(place.startswith((sys.prefix, sys.base_prefix)) for place in places)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a corpus whose tokens are below 500."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "low", documents=120)


@pytest.fixture(scope="session")
def other_corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a corpus whose tokens are 500 and above."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "high", documents=120, first_token=500)


@pytest.fixture(scope="session")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a corpus of documents of 1 to 40 tokens, so that a sample has several."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path_factory.mktemp("documents") / "short"
    random = numpy.random.default_rng(5)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(300):
        start, length = random.integers(0, 400), random.integers(0, 40)
        document = [*((start + numpy.arange(length)) % 500), EOD]
        builder.add_document(numpy.array(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def config(corpus: str, tmp_path: Path) -> dict[str, Any]:
    """Six steps of a tiny GPT on one process."""
    return gpt_config(corpus, tmp_path / "run")


@pytest.fixture(scope="session")
def single_gpt(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run of one process, with which layouts, resumes and stops are compared."""
    return finished(gpt_config(corpus, tmp_path_factory.mktemp("gpt")))


@pytest.fixture(scope="session")
def single_llama(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A configuration with rotary embeddings, RMSNorm, SwiGLU, grouped queries and a separate output matrix."""
    return finished(gpt_config(corpus, tmp_path_factory.mktemp("llama"), LLAMA))


@pytest.fixture(scope="session")
def single_qwen(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A configuration with a QKV bias, normalized queries and keys, a sliding window and YaRN."""
    return finished(gpt_config(corpus, tmp_path_factory.mktemp("qwen"), QWEN))
