"""hpcgen layouts: what it shows, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcgen import load_run, plan
from tests.cli.command import Ended, hpcgen, listing
from tests.cli.reports import Page
from tests.recorded_run import write_checkpoint
from trainer.contract.resuming.hyperparameters import sections

DATA = "train: [{prefix: data/absent}], valid: [{prefix: data/absent-too}]"
RUN = f"""\
# a small model
name: small
cluster: ./site.yaml
paths: {{run_dir: /runs/small}}
slurm:
  train:
    nodes: 1      # to begin with
    time: 1-00:00:00
model:
  num_layers: 1
  hidden_size: 4096
  num_attention_heads: 2
  kv_channels: 128
  seq_length: 4096
  vocab_size: 1024
parallelism:
  # tensor_model_parallel_size: 1
  context_parallel_size: 4  # too many
training:
  micro_batch_size: 1
  global_batch_size: 16
  train_iters: 10000000
  recompute_granularity: full
  recompute_method: uniform
  recompute_num_layers: 1
optimizer: {{lr: 1.0e-3}}
data: {{tokenizer: {{kind: bytes}}, {DATA}}}
"""
HUGE = {
    "num_layers": 1,
    "hidden_size": 73728,
    "num_attention_heads": 8,
    "seq_length": 512,
    "vocab_size": 1024,
}
SITE = """\
extends: azure-ndv5
price_per_gpu_hour: 2.0
currency: EUR
slurm: {partition: small}
partitions: {small: {max_nodes: 4}}
"""


@pytest.fixture
def run_file(workplace: Path) -> Path:
    (workplace / "site.yaml").write_text(SITE)
    (workplace / "one.yaml").write_text(SITE.replace("max_nodes: 4", "max_nodes: 1"))
    path = workplace / "run.yaml"
    path.write_text(RUN)
    return path


def layouts(*arguments: object) -> Ended:
    return hpcgen("layouts", *arguments)


def found_by(*arguments: object) -> dict[str, Any]:
    """The JSON of a search that succeeds."""
    ended = layouts("--json", *arguments)
    assert (ended.status, ended.stderr) == (0, "")
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


def validated(*arguments: object) -> dict[str, Any]:
    """The prediction of `hpcgen validate` for the same run file with mock data, since it refuses absent data."""
    Path("mock.yaml").write_text(Path("run.yaml").read_text().replace(DATA, "mock: true"))
    ended = hpcgen("validate", "-c", "mock.yaml", "--json", *arguments)
    assert ended.status == 0, ended.stdout
    prediction: dict[str, Any] = json.loads(ended.stdout)["prediction"]
    return prediction


def test_the_first_layout_has_the_figures_of_validate(run_file: Path) -> None:
    [found] = found_by()["nodes"]
    first, *others = found["layouts"]
    assert found["nodes"], found["gpus"] == (1, 8)
    assert first["tokens_per_s"] > found["own"]["tokens_per_s"]
    assert len(others) == 9
    assert found["valid"] >= found["fitting"] >= 10
    changes = [
        word for key, value in first["changes"].items() for word in ("--set", f"{key}={json.dumps(value)}")
    ]
    assert validated(*changes) == found["prediction"]
    assert found["prediction"]["step_time_s"] == first["step_time_s"]
    assert found["prediction"]["mfu"] == pytest.approx(first["mfu"])


def test_the_table_names_every_layout_on_lines_of_80_characters(run_file: Path) -> None:
    before = listing(run_file.parent)
    [found] = found_by("--top", "3")["nodes"]
    ended = layouts("--top", "3")
    assert ended.status == 0
    lines = ended.stdout.splitlines()
    rows = {line.split()[0]: line for line in lines if line[:3].strip() in ("1", "2", "3", "own")}
    assert rows.keys() == {"1", "2", "3", "own"}
    for name, layout in zip(("1", "2", "3"), found["layouts"], strict=True):
        assert layout["name"].split(",")[0] in rows[name]
    assert "recompute all" in ended.stdout  # of the run itself
    assert "1 node with 8 GPUs:" in lines
    assert " ".join(found["why"].split()) in " ".join(ended.stdout.split())
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []
    assert "\x1b" not in ended.stdout
    assert listing(run_file.parent) == before


@pytest.mark.parametrize(("size", "is_limit"), [(33, True), (32, False)])
def test_a_batch_that_allows_few_replicas_is_told(run_file: Path, size: int, is_limit: bool) -> None:
    run_file.write_text(RUN.replace("num_attention_heads: 2", "num_attention_heads: 32"))
    ended = layouts("--set", f"training.global_batch_size={size}", "--top", "1")
    assert ended.status == 0
    told = "= 33 allows at most 1 data-parallel replica on 8 GPUs, and 32 allows 8"
    assert (told in " ".join(ended.stdout.split())) == is_limit


def test_two_layouts_side_by_side(run_file: Path) -> None:
    [found] = found_by()["nodes"]
    ended = layouts("--compare", "own", "2")
    assert (ended.status, ended.stderr) == (0, "")
    speeds = next(line for line in ended.stdout.splitlines() if "tokens/s per GPU" in line).split()[-2:]
    assert speeds == [f"{each['tokens_per_s_per_gpu']:,.0f}" for each in (found["own"], found["layouts"][1])]


def test_little_free_memory_is_told_as_a_risk(run_file: Path) -> None:
    [found] = found_by("--top", "50")["nodes"]
    least = min(layout["memory_gib"] for layout in found["layouts"])
    node_type = run_file.with_name("topologies") / "tight.yaml"
    node_type.parent.mkdir()
    node_type.write_text(f"extends: ndv5\ngpu_memory_gib: {least + 3.1}\n")
    run_file.with_name("site.yaml").write_text(f"{SITE}node_type: tight\n")
    [tight] = found_by()["nodes"]
    assert {layout["is_risky"] for layout in tight["layouts"]} == {True}
    ended = layouts()
    assert "0.1!" in ended.stdout
    assert (
        "A recipe of NVIDIA for 70B at this edge ran out of memory in 30 to 60% of its starts" in ended.stderr
    )


@pytest.mark.parametrize("row", ["1", "3"])
def test_a_layout_is_written_into_the_run_file(run_file: Path, row: str) -> None:
    [found] = found_by("--nodes", "2")["nodes"]
    ended = layouts("--nodes", "2", "--write", row, "--set", "training.micro_batch_size=2")
    assert ended.status == 0
    assert "slurm.train.nodes: 1 -> 2" in ended.stderr
    text = run_file.read_text()
    assert text.count("# hpcgen layouts: ") == 1
    assert "tokens/s per GPU predicted" in text
    assert {"# a small model", "    nodes: 2      # to begin with"} <= set(text.splitlines())
    chosen = found["layouts"][int(row) - 1]
    assert validated()["step_time_s"] == pytest.approx(chosen["step_time_s"])
    [again] = found_by()["nodes"]
    assert again["own"] == {**chosen, "changes": {}}
    ended = layouts("--write", "own")
    assert ended.stderr.endswith("run.yaml has this layout already\n")
    assert run_file.read_text() == text


def test_a_deadline_chooses_the_fewest_nodes(run_file: Path) -> None:
    every = found_by("--nodes", "1,2,3,4", "--top", "1")["nodes"]
    days = {each["nodes"]: each["prediction"]["likely"]["days"] for each in every if each["layouts"]}
    assert days[1] > days[2] > days[4]
    hours = 24 * (days[1] + days[2]) / 2
    found = found_by("--finish-in", f"{hours}h", "--top", "1")
    assert found["chosen"] == 2
    assert found["goal"] == {"of": "time", "limit": pytest.approx(3600 * hours)}
    ended = layouts("--finish-in", f"{hours}h")
    assert "2 nodes, the fewest of those tried that finish in" in ended.stdout
    assert f"{days[1]:.3g}! " in ended.stdout
    ended = layouts("--finish-in", f"{hours}h", "--nodes", "4", "--top", "1")
    assert "4 nodes finish in" in ended.stdout
    ended = layouts("--finish-in", "1m")
    assert ended.status == 0
    assert "no number of nodes that was tried finishes in" in ended.stdout
    assert found_by("--finish-in", "1m", "--top", "1")["chosen"] is None


def test_a_deadline_may_be_met_between_two_numbers_of_the_ladder(run_file: Path) -> None:
    run_file.with_name("site.yaml").write_text(SITE.replace("max_nodes: 4", "max_nodes: 8"))
    batch = ("--set", "training.global_batch_size=240")
    days = {
        each["nodes"]: each["prediction"]["likely"]["days"]
        for each in found_by("--nodes", "4,5,6", "--top", "1", *batch)["nodes"]
    }
    assert days[4] > days[5] > days[6]
    found = found_by("--finish-in", f"{24 * (days[4] + days[5]) / 2}h", "--top", "1", *batch)
    assert found["chosen"] == 5
    assert [each["nodes"] for each in found["nodes"]][-2:] == [5, 6]


def test_only_the_rest_of_a_run_counts(run_file: Path) -> None:
    run_file.write_text(RUN.replace("/runs/small", "runs/small").replace(DATA, "mock: true"))
    whole = found_by("--top", "1")["nodes"][0]["prediction"]
    trainer = plan(load_run(run_file)).trainer
    assert trainer is not None
    checkpoints, samples = run_file.parent / "runs/small/checkpoints", trainer.training.global_batch_size
    last = trainer.training.train_iters
    for iteration in (last // 2, last):
        write_checkpoint(
            checkpoints, iteration, **sections(trainer), world_size=8, consumed_samples=iteration * samples
        )
        if iteration < last:
            [half] = found_by("--top", "1")["nodes"]
            assert half["prediction"]["remaining_tokens"] == whole["remaining_tokens"] / 2
            assert half["layouts"][0]["changes"]
    ended = layouts()
    assert ended.status == 2
    assert ended.stderr == "the run is finished and has nothing left to train\n"


def test_a_budget_chooses_the_fastest_nodes_within_it(run_file: Path) -> None:
    every = found_by("--nodes", "1,2,4", "--top", "1")["nodes"]
    costs = {each["nodes"]: each["prediction"]["likely"]["cost"] for each in every}
    assert costs[1] < costs[2] < costs[4]
    limit = (costs[2] + costs[4]) / 2
    assert found_by("--budget", limit, "--top", "1")["chosen"] == 2
    assert found_by("--budget", f"{limit / 2}GPUh", "--top", "1")["chosen"] == 2
    ended = layouts("--budget", limit, "--nodes", "4")
    assert "no number of nodes that was tried stays within" in ended.stdout
    assert "4 nodes come closest" in " ".join(ended.stdout.split())
    little_less = f"{costs[4] - 0.01:.2f}"
    ended = layouts("--budget", little_less, "--nodes", "2,4", "--top", "1")
    assert f"{float(little_less):,.9g}"[:6] in ended.stdout
    [row] = [line for line in ended.stdout.splitlines() if line.split()[:1] == ["4"]]
    assert "!" in row
    assert " EUR" in ended.stdout


def test_data_and_a_time_limit_may_be_missing(run_file: Path) -> None:
    run_file.write_text(RUN.replace(f", {DATA}", "").replace("    time: 1-00:00:00\n", ""))
    bare = found_by("--top", "1")
    run_file.write_text(RUN)
    [own], [complete] = (found["nodes"] for found in (bare, found_by("--top", "1")))
    assert own["layouts"] == complete["layouts"]
    [*others, guess] = own["prediction"]["guesses"]
    assert own["prediction"] | {"guesses": others} == complete["prediction"]
    assert guess == "jobs of 1-00:00:00, since the run file sets no time limit"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "1,x"], "'1,x' must be whole numbers from 1, such as 16 or 8,16,32"),
        (["--nodes", "0"], "'0' must be whole numbers from 1"),
        (["--nodes", "2,5,16"], "--nodes 16 is more than partition small allows; use at most 4"),
        (
            ["--finish-in", "soon"],
            "'soon' must be weeks, days, hours or minutes, such as 2w, 14d, 36h or 90m",
        ),
        (["--finish-in", "0d"], "'0d' must be weeks"),
        (["--budget", "-5"], "'-5' must be an amount above 0, such as 50000"),
        (["--budget", "gpuh"], "'gpuh' must be an amount above 0"),
        (["--html", "."], ".: cannot be written, because it is a directory; name a file in it"),
        (["--html", "absent/page.html"], "absent does not exist"),
        (["--html", "run.yaml/page.html"], "run.yaml is not a directory"),
        (["--budget", "5", "--finish-in", "1d"], "a deadline and a budget exclude each other"),
        (["--top", "0"], "0 is not in the range"),
        (["--compare", "1", "first"], "'first' must be a row of the table, such as 1, or own"),
        (["--write", "50"], "--write 50: the table has only 10 rows; show more with --top"),
        (["--write", "--nodes", "1,2"], "--write needs one number of nodes"),
        (["--write", "--finish-in", "1m"], "--write 1: no number of nodes meets the deadline or budget"),
        (
            ["--write", "--set", "training.global_batch_size=32"],
            "--write leaves out --set training.global_batch_size",
        ),
        (["--set", "cluster=local"], "the run trains on CPUs, whose speed hpcgen does not know"),
        (["--set", "model.layer_spec=a:b"], "builds layers whose time hpcgen does not know"),
        (
            ["--nodes", "4", "--set", "training.global_batch_size=31"],
            "training.global_batch_size = 31 suits no layout on 32 GPUs: the number of data-parallel replicas divides "
            "both, so it is at most 1",
        ),
        (["--nodes", "4", "--set", "training.global_batch_size=31"], "; use 32"),
        (["--set", "model.num_query_groups=3"], "model.num_query_groups = 3"),
        (["--set", f"model={HUGE}", "--nodes", "1"], "--nodes 1 is too few: no layout fits into 79.6 GiB"),
        (["--set", f"model={HUGE}", "--nodes", "1"], "use --nodes 2, on which TP8"),
        (
            ["--set", f"model={HUGE}", "--set", "cluster=./one.yaml", "--finish-in", "1d"],
            "tried up to 1 node",
        ),
        (
            ["--set", "parallelism.context_parallel_size=3", "--compare", "own", "1"],
            "context_parallel_size = 3",
        ),
        (["--set", "training.lr=1"], "training.lr = 1 is not a known key"),
    ],
)
def test_mistakes_are_refused_and_nothing_is_written(
    run_file: Path, arguments: list[str], message: str
) -> None:
    before = listing(run_file.parent)
    ended = layouts(*arguments)
    assert ended.status == 2
    assert message in ended.stderr
    assert listing(run_file.parent) == before


def test_a_write_protected_run_file_is_refused_before_the_search(run_file: Path) -> None:
    run_file.chmod(0o444)
    ended = layouts("-c", run_file, "--write")
    assert (ended.status, ended.stdout) == (2, "")
    assert ended.stderr == f"{run_file}: is write-protected; to replace it, run chmod u+w {run_file}\n"


def test_a_page_shows_the_layouts_and_other_numbers_of_nodes(run_file: Path) -> None:
    ended = layouts("-c", run_file, "--html", "page.html")
    assert (ended.status, ended.stderr) == (0, "wrote page.html\n")
    found = Page(Path("page.html").read_text(encoding="utf-8"))
    assert found.series("scaling")["x"] == [8, 16, 32]
    assert "the partition allows fewer than 8 nodes" in found.text
    best = found_by("-c", run_file, "--nodes", 1)["nodes"][0]["layouts"]
    assert {each["name"] for each in best} <= {line.strip() for line in found.texts}
    with_costs = found.series("cost")
    assert with_costs["low"][0] < with_costs["middle"][0] < with_costs["high"][0]


def test_a_page_on_standard_output_has_no_tables_around_it(run_file: Path) -> None:
    ended = layouts("-c", run_file, "--html", "-")
    assert ended.stdout.startswith("<!DOCTYPE html>")
    assert ended.stdout.endswith("</html>")
    refused = layouts("-c", run_file, "--html", "-", "--json")
    assert (refused.status, refused.stdout) == (2, "")
