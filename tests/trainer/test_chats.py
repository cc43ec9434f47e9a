"""Training on chats: what is learned, how samples are filled, and equal results at every layout."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from hpcgen.planning.mixture import readings
from hpcgen.run_plan import pair_summary
from tests.trainer.chat_pairs import Chat, chat_config, random_chats, write_chats
from tests.trainer.document_runs import CP2, PP2, TP2_SP
from tests.trainer.inference.models import ONE
from tests.trainer.runs import DEEPSEEK, GPT, LLAMA, QWEN, Run, finished, run, write_corpus
from tests.trainer.single_rank import small_router
from trainer.contract import config as configuration
from trainer.contract.config import ConfigError, TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.files.loss_mask import can_learn, mask_path
from trainer.data import documents, loader
from trainer.data.datasets import build_index, open_datasets
from trainer.distributed import groups
from trainer.inference.groups import open_groups
from trainer.model import build
from trainer.model.core_config import transformer_config
from trainer.model.initialization import initialize_by_name
from trainer.model.kernels import TORCH
from trainer.model.multi_token import PredictingModel
from trainer.packing.best_fit import best_fit_decreasing
from trainer.packing.samples import kept_tokens
from trainer.trials.samples import RandomSamples

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults

LENGTH = 64
MOE = LLAMA | {"num_layers": 2, "num_moe_experts": 4, "moe_router_topk": 2, "moe_z_loss_coeff": 1e-2}


# Packing


def naive_best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    rooms: list[int] = []
    bins: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= sizes[item]]
        if not fitting:
            fitting = [(capacity, len(bins))]
            rooms.append(capacity)
            bins.append([])
        room, number = min(fitting)
        rooms[number] = room - sizes[item]
        bins[number].append(item)
    return bins


@pytest.mark.parametrize("seed", range(20))
def test_packing_is_best_fit_decreasing(seed: int) -> None:
    random = numpy.random.RandomState(seed)
    capacity = int(random.randint(2, 40))
    sizes = random.randint(1, capacity + 1, int(random.randint(1, 80)))
    items, bins = best_fit_decreasing(sizes, capacity)
    found = [sorted(items[first:end].tolist()) for first, end in itertools.pairwise(bins)]
    assert found == [sorted(each) for each in naive_best_fit(sizes.tolist(), capacity)]


@pytest.mark.parametrize(
    ("mask", "kept", "learned"),
    [
        pytest.param("0110", 4, 2, id="fits"),
        pytest.param("000011", 6, 2, id="fills a sample of 5"),
        pytest.param("01000110", 2, 1, id="the second answer ends outside"),
        pytest.param("0100010", 6, 2, id="the second answer ends at the end of the sample"),
        pytest.param("0011111", 0, 0, id="no answer ends inside"),
        pytest.param("000000", 0, 0, id="no answer"),
        pytest.param("1000", 0, 0, id="nothing predicts the first token"),
        pytest.param("1", 0, 0, id="one token"),
        pytest.param("11011110", 2, 1, id="begins with an answer"),
    ],
)
def test_a_chat_ends_after_its_last_answer_that_fits(mask: str, kept: int, learned: int) -> None:
    """Chats of other lengths before and after it change nothing."""
    around = [1, 0, 1, 1]
    for before, after in (([], []), (around, around)):
        lengths = numpy.array(
            [*([len(before)] if before else []), len(mask), *([len(after)] if after else [])]
        )
        values = numpy.array([*before, *map(int, mask), *after], numpy.uint8)
        found = kept_tokens(lengths, values, seq_length=5)
        position = int(bool(before))
        assert [int(each[position]) for each in found] == [kept, learned]
    assert can_learn(bytes(map(int, mask)), 5) == (learned > 0)


def datasets(config: dict[str, Any], log: list[str] | None = None) -> dict[str, Any]:
    parsed = configuration.from_dict(TrainerConfig, config, "test")
    cache = Path(config["run_dir"]) / "index-cache"
    blends = build_index(parsed, cache, 1024, ([] if log is None else log).append)
    return open_datasets(blends, parsed, cache, 1024, is_needed=True)


def chats_of(sample: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int], list[int]]]:
    """Inputs, labels and loss mask of each chat in a sample."""
    end = LENGTH - int(sample["padding"])
    starts = [*sample["is_first"].nonzero()[:, 0].tolist(), LENGTH]
    ranges = [each for each in itertools.pairwise(starts) if each[0] < end]
    return [
        tuple(sample[name][first:last].tolist() for name in ("tokens", "labels", "loss_mask"))  # type: ignore[misc]
        for first, last in ranges
    ]


def shifted(chat: Chat) -> tuple[list[int], list[int], list[int]]:
    tokens, mask = chat
    return list(tokens[:-1]), list(tokens[1:]), list(mask[1:])


@pytest.mark.parametrize("packing", [True, False])
def test_each_epoch_has_each_chat_once_in_another_order(packing: bool, tmp_path: Path) -> None:
    chats = random_chats(30)
    config = chat_config(write_chats(tmp_path / "chats", chats), tmp_path / "run", sft_packing=packing)
    config["training"]["train_iters"] = 10 if packing else 20
    log: list[str] = []
    train = datasets(config, log)["train"]
    per_epoch = int("".join(log).partition(" chats in ")[2].split()[0])
    epochs = [
        [chats_of(train[number]) for number in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
        for epoch in range(2)
    ]
    for epoch in epochs:
        assert sorted(chat for sample in epoch for chat in sample) == sorted(map(shifted, chats))
        assert all(len(sample) == 1 for sample in epoch) != packing
    assert epochs[0] != epochs[1]
    padding = [train[number] for number in range(per_epoch) if int(train[number]["padding"])]
    assert padding
    for sample in padding:
        end = LENGTH - int(sample["padding"])
        assert sample["is_first"][end]
        assert not sample["loss_mask"][end:].any()


def test_the_log_counts_what_is_cut_and_left_out(tmp_path: Path) -> None:
    whole = random_chats(6)
    cut = (list(range(100)), [0] * 10 + [1] * 10 + [0] * 10 + [1] * 70)
    too_long = (list(range(80)), [0] * 10 + [1] * 70)
    silent = (list(range(20)), [0] * 20)
    prefix = write_chats(tmp_path / "chats", [*whole, cut, too_long, silent])
    log: list[str] = []
    datasets(chat_config(prefix, tmp_path / "run"), log)
    [line] = [line for line in log if "% full" in line]
    tokens = sum(len(tokens) - 1 for tokens, _ in whole) + 19
    learned = sum(sum(mask) for _, mask in whole) + 10
    assert (
        f"data: train: {prefix}: 7 chats in 4 samples of 64 tokens (1.0 steps of 4), {tokens / 256:.1%} full"
        in line
    )
    assert f"{learned / tokens:.1%} of the tokens are learned" in line
    assert "; 1 cut after their last answer that fits; 1 left out, since no answer fits; 1 left out" in line


@pytest.mark.parametrize("data", [{}, {"sft_packing": False}, {"split": "70,30,0"}], ids=str)
def test_validate_knows_the_samples_of_an_epoch(data: dict[str, Any], tmp_path: Path) -> None:
    chats = [*random_chats(30, (8, 90)), ([1] * 200, [0] * 200), ([1] * 20, [0] * 20)]
    prefix = write_chats(tmp_path / "chats", chats[::-1])
    config = chat_config(prefix, tmp_path / "run", **data)
    if "split" in data:
        config["data"]["datasets"] = config["data"].pop("train")
    log: list[str] = []
    datasets(config, log)
    [line] = [line for line in log if line.startswith("data: train") and "full" in line]
    samples = int(line.partition(" chats in ")[2].split()[0])
    parsed = configuration.from_dict(TrainerConfig, config, "test")
    [found] = readings(parsed, None)
    assert found.epochs == found.remaining / samples
    assert found.iterations_per_epoch == pytest.approx(samples / 4)
    assert found.chats is not None
    text = pair_summary.for_people([dataclasses.asdict(found)])[0][1]
    assert f"({found.epochs:.2f} epochs, " in text
    read, left_out = line.partition(" chats in ")[0].split()[-1], line.split("; ")[2:]
    counted = [f"one epoch is {samples / 4:,.1f} iterations", f"{read} of {found.chats.chats} chats read"]
    assert text.endswith("; ".join([*counted, *left_out]))
    assert "left out, since no answer fits; 1 left out, since nothing is learned" in text


def test_validate_says_when_epochs_of_chats_are_an_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More chats than are read within seconds."""
    monkeypatch.setattr("hpcgen.planning.mixture.MAX_CHAT_TOKENS", 100)
    config = chat_config(write_chats(tmp_path / "chats", random_chats(30)), tmp_path / "run")
    [found] = readings(configuration.from_dict(TrainerConfig, config, "test"), None)
    assert found.chats is None
    text = pair_summary.for_people([dataclasses.asdict(found)])[0][1]
    assert f"(about {found.epochs:.2f} epochs if all chats fit and samples have no padding, " in text


def test_validate_doubts_a_pair_that_the_training_refuses(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats", [(range(20), [0] * 10 + [1] * 10)] * 19 + [([1, 2], [0, 1])])
    config = chat_config(chats, tmp_path / "run", {**GPT, "seq_length": 4})
    reason = "only 1 of its 20 chats for train can be read with model.seq_length = 4: 19 have no answer"
    assert reason in refusal(config)
    parsed = configuration.from_dict(TrainerConfig, config, "test")
    assert any(reason in doubt.reason for doubt in pair_summary.doubts(parsed, readings(parsed, None)))


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        datasets(config)
    return str(caught.value)


def test_pairs_that_do_not_fit_the_run_are_refused(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats", [(range(20), [0] * 10 + [1] * 10)] * 10)
    config = chat_config(chats, tmp_path / "run")
    short = config | {"model": GPT | {"seq_length": 4}}
    assert (
        "only 0 of its 10 chats for train can be read with model.seq_length = 4: 10 have no answer"
        in refusal(short)
    )
    log: list[str] = []
    other = write_chats(tmp_path / "other", [([1, 2, 3], [0, 1, 1])] * 4)
    with_test = short | {"data": {"train": [{"prefix": other}], "test": [{"prefix": chats}], "sft": True}}
    with_test["training"] = config["training"] | {"eval_iters": 1}
    assert list(datasets(with_test, log)) == ["train"]
    assert any(f"data: warning: {chats}: only 0 of its 10 chats for test" in line for line in log)
    assert "has a loss mask" in refusal(config | {"data": config["data"] | {"sft": False}})
    mask = Path(mask_path(chats))
    content = mask.read_bytes()
    identity = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "modified_ns": None}
    (tmp_path / "chats.record.json").write_text(json.dumps({"outputs": [{"name": mask.name, **identity}]}))
    datasets(config)
    mask.write_bytes(content[::-1])
    assert f"{mask}: its SHA-256 is not the one in its record" in refusal(config)
    (tmp_path / "chats.record.json").unlink()
    mask.write_bytes(content[:-1])
    assert f"{mask}: the loss mask has {len(content) - 1:,} bytes" in refusal(config)
    mask.write_bytes(b"\2" + content[1:])
    assert f"{mask} has the value 2" in refusal(config)
    mask.unlink()
    assert "has no loss mask" in refusal(config)


def test_a_trial_of_a_run_on_chats_needs_no_chats(tmp_path: Path) -> None:
    config = resolve(
        configuration.from_dict(TrainerConfig, chat_config("/none", tmp_path, sft_packing=False), "test")
    )
    packed = loader._packed([RandomSamples(config, 1000)[number] for number in range(2)], config.data, None)
    assert packed.boundaries is not None
    assert packed.boundaries.tolist() == [0, LENGTH, 2 * LENGTH]
    assert packed.padding == (0, 0)


# Losses and gradients of one rank


@pytest.fixture
def model(tmp_path: Path) -> Iterator[tuple[TrainerConfig, GPTModel]]:
    yield from built(chat_config("/none", tmp_path, LLAMA))


def built(document: dict[str, Any]) -> Iterator[tuple[TrainerConfig, GPTModel]]:
    config = resolve(configuration.from_dict(TrainerConfig, document, "test"))
    collection = open_groups(config, ONE)
    [chunk] = build.build_chunks(config, transformer_config(config, TORCH), collection, TORCH)
    initialize_by_name(
        chunk, config.training.seed, config.model.init_method_std, config.model.num_layers, collection
    )
    yield config, chunk
    groups.finalize()


def gradients(chunk: GPTModel) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in chunk.named_parameters() if each.grad is not None}


def alone(chunk: GPTModel, chats: Sequence[Chat]) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss over the learned tokens of all chats, each by itself, and its gradients.

    torch's cross entropy of the logits, without boundaries, masks and padding.
    """
    chunk.zero_grad()
    losses = []
    for tokens, mask in chats:
        inputs, labels = torch.tensor([tokens[:-1]]), torch.tensor(tokens[1:])
        logits = chunk(inputs, torch.arange(len(tokens) - 1)[None], None)[0]
        losses += list(
            torch.nn.functional.cross_entropy(logits, labels, reduction="none")[torch.tensor(mask[1:]) > 0]
        )
    mean = torch.stack(losses).mean()
    mean.backward()
    return float(mean.detach()), gradients(chunk)


def test_a_packed_batch_has_the_loss_and_gradients_of_its_chats(
    model: tuple[TrainerConfig, GPTModel], tmp_path: Path
) -> None:
    config, chunk = model
    chats = random_chats(12)
    document = chat_config(write_chats(tmp_path / "chats", chats), tmp_path / "run", LLAMA)
    document["training"] |= {"train_iters": 2, "global_batch_size": 2}
    train = datasets(document)["train"]
    loss, expected = alone(chunk, chats)
    chunk.zero_grad()
    packed = loader._packed([train[number] for number in range(len(train))], config.data, None)
    tokens, labels, mask, positions = packed.fields
    losses = chunk(tokens, positions, packed.boundaries, labels=labels)
    mean = (losses * mask).sum() / mask.sum()
    mean.backward()
    assert float(mean.detach()) == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients(chunk).items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=0, atol=1e-6 * float(expected[name].abs().max())
        )


@pytest.mark.parametrize("learns", [True, False])
def test_multi_token_losses_stay_within_a_chat(learns: bool, tmp_path: Path) -> None:
    """The last chat of the sample changes no loss of the first, and nothing to learn is no division by zero."""
    _, chunk = next(built(chat_config("/none", tmp_path, LLAMA | {"mtp_num_layers": 2})))
    assert isinstance(chunk, PredictingModel)
    first, second, other = random_chats(3, (30, 31))
    found = []
    for chats in ((first, second), (first, other)):
        rows = [shifted(chat) for chat in chats]
        inputs, labels, mask = (torch.tensor([[*rows[0][row], *rows[1][row]]]) for row in range(3))
        is_first = torch.zeros(1, 58, dtype=torch.bool)
        is_first[0, [0, 29]] = True
        mask[:, 29:] = 0
        if not learns:
            mask[:] = 0
        chunk.zero_grad()
        losses = chunk(
            inputs,
            documents.positions(is_first),
            documents.boundaries(is_first),
            labels=labels,
            loss_mask=mask.float(),
        )
        (losses * mask).sum().backward()
        found.append([*chunk.losses(), *(each for _, each in sorted(gradients(chunk).items()))])
        assert all(each.isfinite().all() for each in found[-1])
    groups.finalize()
    torch.testing.assert_close(found[0][:4], found[1][:4])
    assert bool(found[0][1] > 0) == learns


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_experts_are_balanced_over_learned_tokens_only(
    kind: str, process_groups: ProcessGroupCollection
) -> None:
    """The third sample learns nothing. Its loss is zero, and those of the others are of their learned tokens."""
    length, experts, topk = 8, 4, 2
    router = small_router(process_groups, moe_router_topk=topk, moe_router_load_balancing_type=kind)
    inputs = torch.randn(length, 3, 16)
    learned = torch.rand(length, 3) < 0.5
    learned[0], learned[:, 2] = True, False
    probs, chosen = router(inputs, ~learned)
    (0 * probs).sum().backward()

    weight = router.weight.detach().requires_grad_()
    total = torch.zeros(())
    parts = (
        [learned] if kind == "aux_loss" else [learned & (torch.arange(3) == sample) for sample in range(2)]
    )
    for part in parts:
        logits = inputs[part] @ weight.t()
        share = chosen.view(length, 3, experts)[part].float().mean(0) / topk
        total = total + len(logits) * 0.1 * experts * (share * logits.softmax(-1).mean(0)).sum()
        total = total + 0.01 * logits.logsumexp(-1).square().sum()
    total.backward()
    torch.testing.assert_close(router.weight.grad, weight.grad)


def test_a_microbatch_that_learns_nothing_balances_nothing(process_groups: ProcessGroupCollection) -> None:
    router = small_router(
        process_groups, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True
    )
    probs, _ = router(torch.randn(8, 2, 16), torch.ones(8, 2, dtype=torch.bool))
    (0 * probs).sum().backward()
    assert not router.weight.grad.any()
    assert router.local_tokens_per_expert is not None
    assert not router.local_tokens_per_expert.any()


# Training


def batch_of_chats() -> list[Chat]:
    """24 chats that fill eight samples, three in each."""
    lengths = [
        base + offset * (number % 2) for number in range(8) for base, offset in ((35, 1), (20, -1), (8, 0))
    ]
    return [random_chats(1, (length, length + 1), seed)[0] for seed, length in enumerate(lengths)]


def batch_config(directory: Path, model: dict[str, Any], packing: bool, **keys: Any) -> dict[str, Any]:
    """A step over all of `batch_of_chats`, packed or not."""
    directory.mkdir(exist_ok=True)
    config = chat_config(
        write_chats(directory / "chats", batch_of_chats()), directory / "run", model, sft_packing=packing
    )
    config["training"] |= {"train_iters": 1, "global_batch_size": 8 if packing else 24}
    config["optimizer"]["lr_warmup_iters"] = 0
    return config | keys


@pytest.fixture(
    scope="module",  # a layer of MOE is dense, too
    params=[pytest.param(LLAMA, id="dense", marks=pytest.mark.slow), pytest.param(MOE, id="experts")],
)
def unpacked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Run]:
    """A model, and its step over chats that have a sample each."""
    model = (
        request.param | {"moe_aux_loss_coeff": 0.0} if "num_moe_experts" in request.param else request.param
    )
    return model, finished(batch_config(tmp_path_factory.mktemp("unpacked"), model, packing=False))


@pytest.mark.process
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param({}, 1, id="one", marks=pytest.mark.slow),
        pytest.param({}, 2, id="DP2", marks=pytest.mark.slow),
        pytest.param(TP2_SP, 2, id="TP2+SP", marks=pytest.mark.slow),
        pytest.param(PP2, 2, id="PP2", marks=pytest.mark.slow),
        pytest.param(CP2, 2, id="CP2", marks=pytest.mark.slow),
        pytest.param({"expert_model_parallel_size": 2}, 2, id="EP2", marks=pytest.mark.slow),
        pytest.param(PP2 | TP2_SP, 4, id="PP2xTP2"),
        pytest.param(CP2 | {"expert_model_parallel_size": 2}, 4, id="CP2xDP2xEP2"),
    ],
)
def test_packed_chats_train_as_unpacked_ones_at_every_layout(
    layout: dict[str, Any], world_size: int, unpacked: tuple[dict[str, Any], Run], tmp_path: Path
) -> None:
    model, reference = unpacked
    if "num_moe_experts" not in model:
        layout = {key: size for key, size in layout.items() if key != "expert_model_parallel_size"}
    keys = {"world_size": world_size, "parallelism": layout}
    packed = finished(batch_config(tmp_path / "packed", model, packing=True, **keys))
    numpy.testing.assert_allclose(packed.steps, reference.steps, rtol=1e-6)
    [line] = (event for event in packed.events if event["event"] == "step")
    tokens = sum(len(tokens) - 1 for tokens, _ in batch_of_chats())
    assert line["consumed_tokens"] == tokens
    assert line["packing_efficiency"] == pytest.approx(tokens / (8 * LENGTH))
    assert line["tokens_per_s"] == pytest.approx(tokens / line["step_time_s"])


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Chats that fill ten samples."""
    return write_chats(tmp_path_factory.mktemp("chats") / "chats", random_chats(24))


BALANCED = LLAMA | {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.3,
    "moe_z_loss_coeff": 0.1,
}
AXES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "layout", "training"),
    [
        pytest.param(BALANCED, {}, RECOMPUTED, id="experts-recomputed"),
        pytest.param(BALANCED, {}, {"micro_batch_size": 4}, id="experts-microbatch"),
        pytest.param(
            BALANCED, PP2 | TP2_SP | {"virtual_pipeline_model_parallel_size": 2}, {}, id="experts-VPP2xTP2"
        ),
        pytest.param(BALANCED, CP2 | PP2, RECOMPUTED, id="experts-CP2xPP2"),
        pytest.param(DEEPSEEK | {"mtp_num_layers": None}, CP2, {}, id="latent-CP2"),
        pytest.param(LLAMA | {"mtp_num_layers": 2}, PP2 | CP2, {}, id="MTP-PP2xCP2"),
        pytest.param(QWEN, TP2_SP | CP2, {}, id="window-TP2xCP2"),
    ],
)
def test_chats_train_alike_with_other_models_and_settings(
    model: dict[str, Any], layout: dict[str, Any], training: dict[str, Any], prefix: str, tmp_path: Path
) -> None:
    """Auxiliary losses of samples do not depend on the microbatch either."""
    alone, other = (chat_config(prefix, tmp_path / name, model) for name in ("alone", "other"))
    for config in (alone, other):
        config["training"]["train_iters"] = 3
        config["optimizer"]["lr"] = 2e-4
    other |= {"parallelism": layout, "world_size": 2 ** sum(name in layout for name in AXES)}
    other["training"] |= training
    found, expected = (
        [
            [value for name, value in event.items() if "loss" in name or name == "grad_norm"]
            for event in run.events
            if event["event"] == "step"
        ]
        for run in (finished(other), finished(alone))
    )
    numpy.testing.assert_allclose(found, expected, rtol=2e-6)


@pytest.mark.process
def test_a_run_resumes_exactly_in_its_second_epoch(prefix: str, tmp_path: Path) -> None:
    """Epochs of the two pairs are ten samples and five. The first attempt ends with the 16th sample of 24."""
    config = chat_config(prefix, tmp_path / "through")
    second, held_out = (
        write_chats(tmp_path / name, random_chats(count, seed=count))
        for name, count in (("second", 11), ("valid", 9))
    )
    config["data"] |= {
        "num_workers": 1,
        "train": [{"prefix": prefix}, {"prefix": second}],
        "valid": [{"prefix": held_out}],
    }
    config["training"] |= {"train_iters": 6, "eval_iters": 1}
    config["optimizer"] |= {"lr": 1e-3, "lr_decay_iters": 6}
    through = finished(config)
    assert [part in through.log for part in ("24 chats in 10 samples", "11 chats in 5 samples")] == [
        True,
        True,
    ]
    resumed = config | {"run_dir": str(tmp_path / "resumed")}
    finished(resumed | {"training": config["training"] | {"train_iters": 4}})
    layout = resumed | {"run_dir": str(tmp_path / "layout"), "world_size": 2, "parallelism": PP2}
    layout["checkpoint"] = {"load": str(tmp_path / "resumed" / "checkpoints")}
    other = finished(layout)
    same = finished(resumed)
    assert same.steps == through.steps
    losses = [
        [event["loss"] for event in each.events if event["event"] == "evaluation"] for each in (through, same)
    ]
    assert losses[0] == losses[1][-len(losses[0]) :]
    numpy.testing.assert_allclose(other.steps, through.steps[4:], rtol=1e-6)
    assert [event["consumed_tokens"] for event in other.events if event["event"] == "step"] == [
        event["consumed_tokens"] for event in through.events if event["event"] == "step"
    ][4:]


@pytest.mark.process
def test_a_resume_with_other_samples_or_another_mask_is_refused(prefix: str, tmp_path: Path) -> None:
    chats = random_chats(24)
    own = write_chats(tmp_path / "chats", chats)
    config = chat_config(own, tmp_path / "run")
    config["training"]["train_iters"] = 2
    finished(config)
    config["training"]["train_iters"] = 3
    refused = run(config | {"data": config["data"] | {"sft_packing": False}})
    assert refused.statuses == (2,)
    assert "data.sft_packing: true -> false" in refused.log
    tokens, mask = chats[0]
    write_chats(tmp_path / "chats", [(tokens, [1 - learned for learned in mask]), *chats[1:]])
    refused = run(config)
    assert refused.statuses == (2,)
    assert f"data.train: {own}." in refused.log


@pytest.mark.process
def test_a_run_on_chats_evaluates_texts_too(prefix: str, tmp_path: Path) -> None:
    """The loss of texts is over all of their tokens, in samples that are cut from a stream of documents."""
    texts = write_corpus(tmp_path / "texts", 40)
    sets = [
        {"name": "chats", "datasets": [{"prefix": prefix}]},
        {"name": "texts", "datasets": [{"prefix": texts}]},
    ]
    config = chat_config(write_chats(tmp_path / "chats", random_chats(20, seed=1)), tmp_path / "both")
    config["training"] |= {"train_iters": 2, "eval_iters": 1}
    config["data"]["validation"] = [sets[0], sets[1] | {"sft": False}]
    both = finished(config)
    weights = {"checkpoint": {"load": str(tmp_path / "both/checkpoints"), "finetune": True}}
    alone = (
        config
        | weights
        | {"run_dir": str(tmp_path / "alone"), "data": {"train": [{"prefix": texts}], "num_workers": 0}}
    )
    alone["data"]["validation"] = [sets[1] | {"datasets": [{"prefix": write_corpus(tmp_path / "same", 40)}]}]
    alone["optimizer"] = config["optimizer"] | {"lr": 1e-30}
    [chats, text] = (event for event in both.events if event["event"] == "evaluation")
    [of_text] = (event for event in finished(alone).events if event["event"] == "evaluation")
    assert (chats["split"], text["split"]) == ("valid/chats", "valid/texts")
    assert text["loss"] == pytest.approx(of_text["loss"], rel=1e-6)
