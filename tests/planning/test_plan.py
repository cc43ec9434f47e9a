"""The plan of a run: what each stage will do, and everything that is wrong with it at once."""

from __future__ import annotations

import json
import re

import pytest

from hpcgen import load_run, plan
from hpcgen.config.document import parse
from hpcgen.errors import ConfigErrors, HpcgenError
from hpcgen.run_plan.summary import for_people, summarize
from tests.runs import big_run, loaded, minimal_run, planned, write_yaml

CORPUS = {"directory": "/data/corpus", "source": {"directory": "/in"}, "num_output_files": 16}
MANIFEST = "/data/corpus/manifest.jsonl"


def of_the_run(plan):
    """The warnings, without the one about the bandwidth that the shipped profile assumes."""
    return tuple(warning for warning in plan.warnings if "storage_write_gb_s" not in warning)


def test_the_plan_of_175b(tmp_path):
    found = planned(tmp_path, big_run())
    stage = found.stages["train"]
    assert str(found.layout) == "TP4 PP8 VPP6 CP1 DP4, 384 microbatches on 128 ranks"
    assert stage.directives == (
        "--job-name=big",
        "--nodes=16",
        "--ntasks-per-node=8",
        "--cpus-per-task=12",
        "--gpus-per-node=8",
        "--exclusive",
        "--mem=0",
        "--time=1-00:00:00",
        "--partition=hpc",
        "--signal=B:USR2@410",
        "--requeue",
        "--open-mode=append",
        "--propagate=NONE",
        "--output=/shared/runs/big/train-%j.log",
        "--comment=hpcgen",
    )
    assert tuple(item.path for item in stage.inputs) == ("/shared/data/pile.idx", "/shared/data/pile.bin")
    assert stage.arguments == ("-m", "trainer")


@pytest.mark.parametrize("place", ["site", "run"])
def test_a_comment_of_the_site_or_of_the_run_replaces_hpcgens(tmp_path, place):
    comment = {"extra_directives": ["--comment=project-7"]}
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "slurm": comment if place == "site" else {}})
    run = big_run(cluster="./site.yaml")
    run["slurm"]["train"] |= comment if place == "run" else {}
    directives = planned(tmp_path, run).stages["train"].directives
    assert [word for word in directives if word.startswith("--comment")] == ["--comment=project-7"]


def test_the_trainers_configuration_is_fully_resolved(tmp_path):
    trainer = planned(tmp_path, big_run()).trainer
    assert (trainer.world_size, trainer.device, trainer.peak_tflops) == (128, "cuda", 989.0)
    assert (trainer.model.vocab_size, trainer.model.padded_vocab_size) == (50257, 50304)
    assert trainer.model.ffn_hidden_size == 4 * 12288
    assert (trainer.optimizer.min_lr, trainer.optimizer.lr_decay_iters) == (
        6e-6,
        trainer.training.train_iters,
    )
    assert trainer.optimizer.lr_warmup_iters == 119


def test_stages_come_in_order_and_later_ones_read_the_output_of_earlier_ones(tmp_path):
    slurm = {"train": {"nodes": 16, "time": "1-00:00:00"}, "prepare": {"num_tasks": 4, "mem": "64G"}}
    run = loaded(tmp_path, big_run(data={"corpus": CORPUS}, slurm=slurm))
    found = plan(run, ["train", "index-cache", "prepare"], exists=lambda path: path == MANIFEST)
    assert list(found.stages) == ["prepare", "index-cache", "train"]
    assert of_the_run(found) == ()
    datasets = found.trainer.data.datasets
    assert datasets[0].prefix == "/data/corpus/tokens/corpus-00000-of-00016"
    index_cache, train = (found.stages[name].files for name in ("index-cache", "train"))
    assert index_cache["trainer.json"] == train["trainer.json"]
    prepare = found.stages["prepare"]
    assert prepare.directives == (
        "--job-name=big-prepare",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=96",
        "--exclusive",
        "--mem=64G",
        "--time=12:00:00",
        "--partition=hpc",
        "--array=0-3",
        "--requeue",
        "--open-mode=append",
        "--propagate=NONE",
        "--output=/shared/runs/big/prepare-%A_%a.log",
        "--comment=hpcgen",
    )
    assert prepare.arguments == ("-m", "hpcgen", "data", "prepare", "--num-tasks=4")
    assert prepare.striped_directories == ("/data/corpus/tokens",)
    mounts = {mount.source: mount.read_only for mount in prepare.container.mounts}
    assert (mounts["/data/corpus"], mounts["/in"]) == (False, True)
    alone = plan(run, ["train"], exists=lambda path: path == MANIFEST)
    said = "tokens/corpus-00000-of-00016.idx and 31 more files do not exist yet. Run the stage prepare (or tokenize)"
    assert [warning for warning in alone.warnings if said in warning]


def test_each_data_stage_touches_its_own_files(tmp_path):
    """Downloaded and extracted files are many, and not striped; the tokenizer is read where tokens are made."""
    data = {
        "tokenizer": {"kind": "huggingface", "tokenizer_file": "/t/tokenizer.json", "eod_token": "</s>"},
        "corpus": CORPUS,
    }
    stages = ["download", "extract", "concat", "tokenize", "prepare"]
    found = planned(tmp_path, minimal_run(data=data), stages).stages
    assert {name: stage.striped_directories for name, stage in found.items()} == {
        "download": (),
        "extract": (),
        "concat": ("/data/corpus/concat",),
        "tokenize": ("/data/corpus/tokens",),
        "prepare": ("/data/corpus/tokens",),
    }
    assert found["download"].directories == ("/data/corpus", "/data/corpus/download")
    assert {
        name for name, stage in found.items() if "/t/tokenizer.json" in {item.path for item in stage.inputs}
    } == {
        "tokenize",
        "prepare",
    }
    assert {name for name, stage in found.items() if "/in" in stage.required} == {
        "extract",
        "concat",
        "prepare",
    }
    assert all(
        json.loads(stage.files["corpus.json"])["corpus"]["num_output_files"] == 16 for stage in found.values()
    )
    assert not [word for stage in found.values() for word in stage.directives if word.startswith("--signal")]


def test_an_unknown_stage(tmp_path):
    with pytest.raises(HpcgenError, match="unknown stage 'trian'; use image, download, extract, "):
        plan(loaded(tmp_path, minimal_run()), ["trian"])


def test_the_data_stages_need_a_corpus(tmp_path):
    with pytest.raises(ConfigErrors, match=r"data\.corpus (= null )?is missing, but stage extract needs it"):
        planned(tmp_path, minimal_run(), ["extract"])
    empty = {"mock": True, "corpus": {"directory": "x"}}
    with pytest.raises(ConfigErrors, match=r"data\.corpus\.source .*has no source"):
        planned(tmp_path, minimal_run(data=empty), ["extract"])


def test_an_unplanned_corpus_is_an_error(tmp_path):
    """An error once for all stages where this machine can tell, else a warning."""
    run = loaded(tmp_path, minimal_run(data={"corpus": {**CORPUS, "directory": f"{tmp_path}/c"}}))
    with pytest.raises(ConfigErrors) as error:
        plan(run, ["extract", "concat"])
    [message] = error.value.messages
    assert message.startswith(f"{tmp_path}/c/manifest.jsonl: no such file. Stage extract needs this manifest")
    assert message.endswith("run hpcgen data plan with this run file first")
    corpus = {**CORPUS, "directory": "/no-such-mount/c"}
    unseen = plan(loaded(tmp_path, minimal_run(data={"corpus": corpus})), ["extract"])
    assert (
        "/no-such-mount/c/manifest.jsonl was not checked, because this machine has no /no-such-mount"
        in unseen.warnings
    )


def test_all_broken_rules_are_reported_at_once(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("""\
name: a
cluster: azure-ndv5
preset: 175b
paths: {run_dir: /shared/a}
environment:
  HF_TOKEN: x
container:
  mounts: [{source: /a, target: /t}, {source: /t}]
slurm:
  train: {nodes: 16, partition: gpu, time: 5:00, extra_directives: [--nodes=4]}
data: {mock: true}
model: {num_attention_heads: 90}
""")
    with pytest.raises(ConfigErrors) as error:
        plan(load_run(path))
    found = [message.replace(f"{tmp_path}/", "").partition(": ")[::2] for message in error.value.messages]
    places = [(where, what.split(" ")[0]) for where, what in found]
    assert places == [
        ("run.yaml:6", "environment.HF_TOKEN"),
        ("run.yaml:8", "container.mounts[1].source"),
        ("run.yaml:10", "slurm.train.partition"),
        ("run.yaml:10", "slurm.train.extra_directives[0]"),
        ("run.yaml:12", "model.num_attention_heads"),
    ]
    assert "x" not in error.value.messages[1].split()


def test_a_rule_names_both_values_and_values_that_work(tmp_path):
    run = minimal_run(slurm={"train": {"ntasks_per_node": 3}})
    with pytest.raises(ConfigErrors) as error:
        planned(tmp_path, run, overrides=["parallelism.tensor_model_parallel_size=3"])
    [message] = error.value.messages
    assert message.startswith(
        "--set parallelism.tensor_model_parallel_size: parallelism.tensor_model_parallel_size = 3 "
    )
    assert "model.num_attention_heads = 4" in message


def test_a_value_from_a_preset_that_conflicts_with_the_users_is_reported_where_the_user_set_it(tmp_path):
    expected = (
        r"^--set model\.num_layers: parallelism\.\w+ = 6 \(preset 175b\) does not divide .*model\.num_layers"
    )
    with pytest.raises(ConfigErrors, match=expected):
        planned(tmp_path, big_run(), overrides=["model.num_layers=64"])


@pytest.mark.parametrize(("nodes", "use"), [(3, "1, 2 or 4"), (1000, "4, 8 or 16")])
def test_nodes_that_the_batch_of_a_preset_does_not_fit_are_the_mistake(tmp_path, nodes, use):
    run = {**big_run(), "preset": "1.3b", "parallelism": {}}
    with pytest.raises(ConfigErrors) as error:
        planned(tmp_path, run, overrides=[f"slurm.train.nodes={nodes}"])
    [message] = error.value.messages
    assert message.startswith(
        f"--set slurm.train.nodes: slurm.train.nodes = {nodes} results in {nodes} x 8 = "
    )
    assert f"; use {use}, or set training.global_batch_size to a multiple of " in message


def test_a_default_that_conflicts_with_the_users_value_is_reported_where_the_user_set_it(tmp_path):
    expected = r"run\.yaml:\d+: training\.eval_iters = 10 \(default\) requires validation documents"
    with pytest.raises(ConfigErrors, match=expected):
        planned(tmp_path, minimal_run(data={"datasets": [{"prefix": "/d"}], "split": "1,0,0"}))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_prefix_with_a_suffix_is_reported(tmp_path, suffix):
    for extension in (".idx", ".bin"):
        (tmp_path / f"corpus{extension}").touch()
    named = [{"prefix": str(tmp_path / f"corpus{suffix}")}]
    run = loaded(tmp_path, minimal_run(data={"train": named}))
    with pytest.raises(ConfigErrors) as error:
        plan(run)
    [mistake] = error.value.messages
    assert re.match(r"\S+run\.yaml:\d+: data\.train\[0\]\.prefix = \S+ is not a \.bin/\.idx pair\. ", mistake)
    assert mistake.endswith(f"corpus{suffix}.idx, which does not exist; remove {suffix} from it")


def test_missing_data_is_an_error_if_this_machine_sees_the_storage(tmp_path):
    run = loaded(tmp_path, minimal_run(data={"datasets": [{"prefix": str(tmp_path / "corpus")}]}))
    with pytest.raises(
        ConfigErrors, match=r"Stage train needs \S+corpus\.idx, which does not exist"
    ) as error:
        plan(run)
    assert len(error.value.mistakes) == 1  # for both files of the pair
    for extension in (".idx", ".bin"):
        (tmp_path / f"corpus{extension}").touch()
    assert of_the_run(plan(run)) == ()


def test_data_on_a_file_system_that_only_the_nodes_see_is_a_warning(tmp_path):
    found = plan(loaded(tmp_path, big_run(data={"datasets": [{"prefix": "/no-such-mount/pile"}]})))
    assert of_the_run(found)[:2] == (
        "/no-such-mount/pile.idx was not checked, because this machine has no /no-such-mount",
        "/no-such-mount/pile.bin was not checked, because this machine has no /no-such-mount",
    )


def test_a_batch_far_above_the_presets_is_a_warning(tmp_path):
    assert of_the_run(planned(tmp_path, big_run(), overrides=["training.global_batch_size=3072"])) == ()
    [warning] = of_the_run(planned(tmp_path, big_run(), overrides=["training.global_batch_size=6144"]))
    assert "training.global_batch_size = 6144 is more than twice that of preset 175b (1536)" in warning


def test_a_tokenizer_whose_files_are_missing(tmp_path):
    data = {"mock": True, "tokenizer": {"kind": "huggingface", "tokenizer_file": "/no/t.json"}}
    with pytest.raises(ConfigErrors, match=r"model\.vocab_size.*cannot read the tokenizer file /no/t\.json"):
        planned(tmp_path, minimal_run(data=data))
    known = planned(tmp_path, minimal_run(data=data), overrides=["model.vocab_size=1000"])
    assert known.trainer.model.padded_vocab_size == 1024


def test_an_incomplete_tokenizer_is_one_message(tmp_path):
    run = minimal_run(data={"mock": True, "tokenizer": {"kind": "huggingface"}})
    with pytest.raises(ConfigErrors, match=r"tokenizer_file is required with data\.tokenizer\.kind") as error:
        planned(tmp_path, run)
    assert len(error.value.messages) == 1


def test_gpus_that_the_node_type_does_not_have(tmp_path):
    (tmp_path / "site.yaml").write_text("extends: azure-ndv5\ngres: gpu:4\n")
    with pytest.raises(
        ConfigErrors,
        match=r"site\.yaml:2: gres = gpu:4 requests 4 GPUs per node, but node type ndv5 has 8",
    ):
        planned(tmp_path, big_run(cluster="./site.yaml"))


def test_the_summary(tmp_path):
    found = summarize(planned(tmp_path, big_run()))
    assert found["parameters"] == 174_604_836_864  # 96 x (12 h^2 + 13 h) + (50304 + 2048 + 2) h, h = 12288
    assert found["stages"]["train"] == {
        "nodes": 16,
        "ntasks_per_node": 8,
        "array_tasks": None,
        "time_s": 86400,
        "spare_nodes": 0,
        "segment": None,
        "container_image": "/shared/images/gpt.sqsh",
    }
    assert found["signal_lead_s"] == 410
    assert json.loads(json.dumps(found)) == found
    lines = dict(for_people(found))
    assert lines["train"] == "16 nodes x 8 tasks, limit 1-00:00:00, container /shared/images/gpt.sqsh"
    assert lines["parameters"] == "174,604,836,864"


def test_the_summary_of_an_array_and_of_the_index_cache_alone(tmp_path):
    run = minimal_run(data={"corpus": CORPUS})
    found = summarize(planned(tmp_path, run, ["download", "index-cache"]))
    assert "layout" not in found
    assert (
        dict(for_people(found))["download"]
        == "array of 8 tasks, one node each, limit 1-00:00:00, no container"
    )


def test_the_same_run_gives_the_same_plan(tmp_path):
    assert planned(tmp_path, big_run()) == planned(tmp_path, big_run())
    assert parse("a: 1", "f") == parse("a: 1", "f")


def test_an_unmeasured_bandwidth_is_a_warning_for_large_checkpoints(tmp_path):
    [warning] = [w for w in planned(tmp_path, big_run()).warnings if "storage_write_gb_s" in w]
    assert "azure-ndv5.yaml:" in warning
    assert "storage_write_gb_s = 64 was not measured on your storage" in warning
    assert "saving 2,444 GB takes 39 s, at 64 GB/s" in warning
    small = big_run(preset="125m", slurm={"train": {"nodes": 1, "time": "1-00:00:00"}})
    assert "storage_write_gb_s" not in " ".join(planned(tmp_path, small).warnings)


@pytest.mark.parametrize("directory", ["site", "xdg/hpcgen/clusters", "opt/hpcgen/clusters"])
def test_a_profile_in_any_directory_measures_its_bandwidth(tmp_path, monkeypatch, directory):
    """Wherever it is, a profile of the site is not one that hpcgen ships."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    profile = {"extends": "azure-ndv5", "storage_write_gb_s": 64}
    path = write_yaml(tmp_path / directory / "mine.yaml", profile)
    run = big_run(cluster="mine" if directory.startswith("xdg") else str(path))
    assert planned(tmp_path, run).warnings == ()
    write_yaml(path, {**profile, "storage_write_gb_s": None})
    [warning] = planned(tmp_path, run).warnings
    assert "was not measured on your storage" in warning


def test_keeping_every_checkpoint_is_a_warning_if_that_takes_much_space(tmp_path):
    def warned(**sections):
        return [
            text for text in planned(tmp_path, big_run(**sections)).warnings if "checkpoint.keep_last" in text
        ]

    one_node = {"train": {"nodes": 1, "time": "1-00:00:00"}}
    [warning] = warned(checkpoint={})
    assert "keeps every checkpoint of the run, 2.4 TB each; set the number of newest checkpoints" in warning
    assert warned() == warned(checkpoint={}, slurm=one_node, preset="125m") == []
