from __future__ import annotations

import json
import re

import pytest

from hpcgen.config.presets import PRESETS
from tests.cli.command import hpcgen, listing
from tests.runs import big_run, minimal_run, write_yaml


@pytest.fixture
def run_file(workplace):
    return write_yaml(workplace / "run.yaml", big_run())


def test_it_prints_a_summary_of_the_run(workplace, run_file):
    before = listing(workplace)
    found = hpcgen("validate", "-c", run_file)
    assert found.status == 0
    lines = dict(line.split("  ", 1) for line in found.stdout.splitlines())
    assert lines["layout"].strip() == "TP4 PP8 VPP6 CP1 DP4, 384 microbatches on 128 ranks"
    assert lines["parameters"].strip() == "174,604,836,864"
    sizes = re.findall(r"[\d.]+(?= GiB)", lines["memory"])
    total, available, *parts = map(float, sizes)
    assert available == 79.6
    assert len(parts) == 3
    assert total == pytest.approx(sum(parts), abs=0.16)
    assert "was not checked, because this machine has no" in found.stderr
    assert listing(workplace) == before


def test_strict_refuses_warnings_but_not_what_only_the_cluster_can_tell(workplace, run_file):
    write_yaml(workplace / "site.yaml", {"extends": "azure-ndv5", "storage_write_gb_s": 70.0})
    strict = ("-c", run_file, "--strict", "--set", "cluster=./site.yaml")
    found = hpcgen("validate", *strict)
    assert "was not checked, because this machine has no" in found.stderr
    assert found.status == 0
    for options in ((), ("--json",)):
        found = hpcgen("validate", *strict, "--set", "parallelism.tensor_model_parallel_size=16", *options)
        assert found.status == 2
        assert "layout" in found.stdout
        assert re.fullmatch(r"--strict refuses \d warnings?", found.stderr.splitlines()[-1])


def test_strict_refuses_a_missing_tokenizer_but_not_pairs_that_are_not_made_yet(workplace):
    tokenizer = {"kind": "huggingface", "tokenizer_file": "tokenizer.json", "eod_token": "<|endoftext|>"}
    corpus = {"directory": "data", "source": {"directory": "text"}}
    write_yaml(workplace / "run.yaml", minimal_run(data={"corpus": corpus, "tokenizer": tokenizer}))
    strict = ("-c", "run.yaml", "--strict", "--set", "model.vocab_size=1000")
    refused = hpcgen("validate", *strict)
    assert "tokenizer.json does not exist" in refused.stderr
    assert refused.status == 2
    (workplace / "tokenizer.json").touch()
    found = hpcgen("validate", *strict)
    assert "do not exist yet" in found.stderr
    assert found.status == 0, found.stderr


def test_json_is_one_document(run_file):
    found = json.loads(hpcgen("validate", "-c", run_file, "--json").stdout)
    assert found["name"] == "big"
    assert found["layout"].startswith("TP4 PP8")
    assert found["mistakes"] == []
    parts = [found[f"{part}_gib_per_device"] for part in ("parameter", "activation", "kernel")]
    assert found["memory_gib_per_device"] == pytest.approx(sum(parts))
    assert any("was not checked, because this machine has no" in warning for warning in found["warnings"])


def test_json_of_a_run_with_mistakes(workplace):
    parallelism = {"tensor_model_parallel_size": "three"}
    run_file = write_yaml(workplace / "run.yaml", minimal_run(parallelism=parallelism))
    line = next(n for n, text in enumerate(run_file.read_text().splitlines(), 1) if "_parallel_size" in text)
    found = hpcgen("validate", "-c", run_file, "--json", "--set", "trainign.seed=1")
    assert found.status == 2
    document = json.loads(found.stdout)
    assert document.keys() == {"mistakes", "warnings"}
    tp, unknown = document["mistakes"]
    assert unknown.pop("hint") == "did you mean training?"
    nowhere = {"file": None, "line": None}
    assert unknown == {"key": "trainign", "value": None, "reason": "is not a known key", **nowhere}
    assert (tp["key"], tp["value"], tp["file"], tp["line"]) == (
        "parallelism.tensor_model_parallel_size",
        "three",
        str(run_file),
        line,
    )
    assert tp["reason"]
    assert [line.split(": ")[1].split(" ")[0] for line in found.stderr.splitlines()[:-1]] == [
        "parallelism.tensor_model_parallel_size",
        "trainign",
    ]


def test_json_has_the_values_of_mistakes(workplace):
    """A default is a value too. JSON has no infinite numbers, and a section is no single value."""
    run_file = write_yaml(workplace / "run.yaml", minimal_run())
    wrong = ("optimizer.lr=.inf", "training.seed=first", "logging.profile_ranks=[0, x]")
    text = hpcgen(
        "validate", "-c", run_file, "--json", *(part for each in wrong for part in ("--set", each))
    ).stdout
    found = {
        mistake["key"]: mistake["value"]
        for mistake in json.loads(text, parse_constant=pytest.fail)["mistakes"]
    }
    assert found["training.seed"] == "first"
    assert found["optimizer.lr"] == "Infinity"
    assert "x" in found.values()


def test_json_of_a_file_that_cannot_be_read(workplace):
    (workplace / "run.yaml").write_text("name: a\nname: [\n")
    found = hpcgen("validate", "-c", "run.yaml", "--json")
    assert found.status == 2
    [mistake] = json.loads(found.stdout)["mistakes"]
    assert (mistake["key"], mistake["file"]) == (None, "run.yaml")
    assert mistake["reason"].startswith("not valid YAML")
    (workplace / "run.yaml").write_text("name: a\nname: b\n")
    [mistake] = json.loads(hpcgen("validate", "-c", "run.yaml", "--json").stdout)["mistakes"]
    assert mistake == {
        "key": None,
        "value": None,
        "file": "run.yaml",
        "line": 2,
        "reason": "duplicate key name, first on line 1",
        "hint": "remove one of the two lines",
    }
    [mistake] = json.loads(hpcgen("validate", "-c", "none.yaml", "--json").stdout)["mistakes"]
    assert (mistake["file"], mistake["reason"]) == ("none.yaml", "no such file")


def test_mock_samples_need_no_tokenizer(workplace):
    run_file = write_yaml(workplace / "run.yaml", minimal_run())
    small = ("--set", "model.vocab_size=1000")
    assert hpcgen("validate", "-c", run_file, *small).status == 0
    datasets = ("--set", "data.mock=false", "--set", "data.datasets=[{prefix: /x/y}]")
    read = hpcgen("validate", "-c", run_file, *small, *datasets)
    assert "model.vocab_size = 1000 is less than the 50257 ids of data.tokenizer (gpt2" in read.stderr


def test_other_stages(workplace):
    corpus = {"directory": "data", "source": {"directory": "text"}}
    values = minimal_run(data={"corpus": corpus}, slurm={"prepare": {"time": "2:00:00"}})
    run_file = write_yaml(workplace / "run.yaml", values)
    found = hpcgen("validate", "prepare", "-c", run_file)
    assert (found.status, found.stdout) == (2, "")
    assert "data/manifest.jsonl: no such file. Stage prepare needs this manifest" in found.stderr
    (workplace / "data").mkdir()
    (workplace / "data/manifest.jsonl").touch()
    summary = json.loads(hpcgen("validate", "prepare", "-c", run_file, "--json").stdout)
    assert summary["stages"]["prepare"]["time_s"] == 7200
    assert "layout" not in summary


def test_a_stage_of_the_corpus_needs_one(run_file):
    found = hpcgen("validate", "download", "-c", run_file)
    assert (found.status, found.stdout) == (2, "")
    assert "data.corpus" in found.stderr
    assert "is missing, but stage download needs it" in found.stderr


def test_mistakes_of_the_corpus_have_their_place(workplace):
    source = {"directory": "text", "url": {"template": "https://h/a"}}
    values = minimal_run(data={"corpus": {"directory": "data", "source": source, "tokenise": True}})
    found = hpcgen("validate", "-c", write_yaml(workplace / "run.yaml", values))
    assert (found.status, found.stdout) == (2, "")
    assert "data.corpus.tokenise = true is not a known key" in found.stderr


def test_all_mistakes_one_line_each_and_their_number(run_file):
    sets = ("name=a b", "model.num_layers=x", "trainign.seed=1", "slurm.train.time=5:00")
    found = hpcgen("validate", "-c", run_file, *(word for each in sets for word in ("--set", each)))
    assert (found.status, found.stdout) == (2, "")
    *mistakes, summary = found.stderr.splitlines()
    assert [line.split(": ")[1].split(" ")[0] for line in mistakes] == [
        "model.num_layers",
        "trainign",
        "name",
    ]
    assert all(line.startswith("--set ") for line in mistakes)
    assert summary == "3 mistakes in keys and values; the rules are checked when they are corrected"
    assert "\x1b" not in found.stderr


@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if preset.eod_token])
def test_the_tokenizer_of_a_preset_is_asked_for_from_the_beginning(workplace, preset):
    """init, validate and `data plan` name the command; only the stages that read the file refuse to go on."""
    command = f"hf download {PRESETS[preset].tokenizer_repository} tokenizer.json --local-dir"
    started = hpcgen("init", "run.yaml", "--preset", preset)
    assert started.stderr == f"wrote run.yaml; next: {command} . && hpcgen validate -c run.yaml\n"
    assert f"#   {command} .\n" in (workplace / "run.yaml").read_text()
    missing = (
        "data.tokenizer.tokenizer_file = tokenizer.json does not exist. Stage prepare needs "
        f"{workplace}/tokenizer.json; download it with: {command} {workplace}\n"
    )
    (workplace / "corpus").mkdir()
    (workplace / "corpus/a.jsonl").write_text('{"text": "a"}\n')
    for words in (("validate",), ("render", "train", "-o", "x.sh"), ("data", "plan")):
        warned = hpcgen(*words, "-c", "run.yaml")
        assert warned.status == 0, warned.stderr
        assert missing in warned.stderr
    refused = hpcgen("submit", "prepare", "-c", "run.yaml", "--dry-run")
    assert refused.status == 2
    assert missing in refused.stderr


def test_a_tokenizer_on_storage_of_the_cluster_alone_is_no_mistake(workplace):
    hpcgen("init", "run.yaml", "--preset", "mixtral-8x7b")
    elsewhere = ("--set", "data.tokenizer.tokenizer_file=/no-such-storage/tokenizer.json")
    assert "tokenizer" not in hpcgen("validate", "-c", "run.yaml", *elsewhere).stderr
    (workplace / "data/run").mkdir(parents=True)
    (workplace / "data/run/manifest.jsonl").touch()
    prepare = hpcgen("validate", "prepare", "-c", "run.yaml", *elsewhere)
    assert prepare.status == 0
    assert "/no-such-storage/tokenizer.json was not checked" in prepare.stderr


def test_a_tokenizer_of_no_preset_is_to_be_put_there(workplace):
    tokenizer = {"kind": "huggingface", "tokenizer_file": "t.json", "eod_token": "</s>"}
    corpus = {"directory": "data", "source": {"directory": "text"}}
    values = minimal_run(data={"corpus": corpus, "tokenizer": tokenizer}, preset="mixtral-8x7b")
    found = hpcgen("validate", "prepare", "-c", write_yaml(workplace / "run.yaml", values))
    assert f"needs {workplace}/t.json; put the model's tokenizer.json there\n" in found.stderr


def test_file_systems_are_compared_for_the_checkpoints_of_a_run(run_file):
    """175b has checkpoints of 2.44 TB, of which five are kept and a sixth is written."""
    found = hpcgen("validate", "-c", run_file, "--storage")
    assert found.status == 0
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in found.stdout.splitlines() if "  " in line)
    assert lines["disk"].startswith("14.7 TB for up to 6 checkpoints; 606.0 GB for all tokens")
    assert lines["failures"].startswith("one expected in 16 d 11 h at the rate of Llama 3's training; ")
    assert re.split(r"  +", lines["AMLFS 500"])[:3] == ["128", "57", "64"]
    assert "* The ranks write less" not in found.stdout
    few = hpcgen(
        "validate",
        "-c",
        run_file,
        "--storage",
        "--set",
        "slurm.train.nodes=4",
        "--set",
        "memory_check=warning",
    )
    assert "* The ranks write less: 1 GB/s each is assumed." in few.stdout


def test_the_profile_says_how_often_jobs_fail(workplace):
    profile = {"extends": "azure-ndv5", "gpu_hours_between_failures": 1280}
    write_yaml(workplace / "site.yaml", profile)
    run_file = write_yaml(workplace / "run.yaml", big_run(cluster="./site.yaml"))

    def saving(*options):
        found = json.loads(hpcgen("validate", "-c", run_file, "--json", *options).stdout)
        doubted = [text for text in found["warnings"] if "repeated after failures" in text]
        return found["storage"]["saving"], doubted

    rare, [message] = saving()
    assert rare["hours_between_failures"] == 10
    assert "checkpoint.save_interval_minutes results in a save every 30 min. Saves, and steps" in message
    better = message.rpartition("; use about ")[2].removesuffix(" (minutes)")
    assert float(better) == pytest.approx(rare["best_interval_s"] / 60, rel=0.05)
    best, doubted = saving("--set", f"checkpoint.save_interval_minutes={better}")
    assert doubted == []
    assert best["least_lost"] <= best["lost"] < best["least_lost"] + 0.01
    _, [message] = saving("--set", "checkpoint.save_interval=1000")
    assert "checkpoint.save_interval = 1000 results in a save every " in message
    better = message.rpartition("; use about ")[2].removesuffix(" (steps)")
    assert saving("--set", f"checkpoint.save_interval={better}")[1] == []


def test_a_run_without_gpus_has_no_rate_of_failures(workplace):
    run_file = write_yaml(workplace / "run.yaml", minimal_run())
    found = json.loads(hpcgen("validate", "-c", run_file, "--json").stdout)
    assert found["storage"]["saving"] is None
    shown = hpcgen("validate", "-c", run_file, "--storage")
    assert "failures" not in shown.stdout
    assert "AMLFS 40" in shown.stdout


def test_file_systems_are_compared_only_for_training(run_file):
    found = hpcgen("validate", "nccl-test", "-c", run_file, "--storage")
    assert found.status == 2
    assert (
        "--storage compares file systems for training, which is not planned; add the stage train"
        in found.stderr
    )


def refused_prompts(workplace, *lines):
    (workplace / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    run = write_yaml(workplace / "run.yaml", big_run(answers={"prompts": "prompts.jsonl"}))
    ended = hpcgen("validate", "-c", run)
    assert ended.status == 2
    return ended.stderr


def test_prompts_for_answers_are_read_before_the_queue(workplace):
    chat = '{"messages": [{"role": "user", "content": "Hi"}]}'
    assert "a prompt has messages, but the tokenizer gpt2 has no chat template" in refused_prompts(
        workplace, chat
    )
    assert "prompts.jsonl:2: expected a line such as" in refused_prompts(
        workplace, '{"prompt": "a"}', '{"text": "b"}'
    )
    assert "has 65 prompts, and every evaluation would wait" in refused_prompts(
        workplace, *['{"prompt": "a"}'] * 65
    )


def test_a_corpus_of_chats_is_not_read_as_texts(workplace):
    corpus = {"directory": "chat-data", "source": {"directory": "chats"}, "chat": {}}
    document = big_run(data={"corpus": corpus, "sft": False})
    refused = hpcgen("validate", "-c", write_yaml(workplace / "run.yaml", document))
    assert refused.status == 2
    assert "data.sft = false contradicts data.corpus.chat" in refused.stderr


def test_seeds_are_those_of_numpy(run_file):
    refused = hpcgen("validate", "-c", run_file, "--set", "training.seed=4294967296")
    assert refused.status == 2
    assert "training.seed = 4294967296 must be at most" in refused.stderr
