"""hpcgen data plan: what is chosen, what is refused, and a manifest that is not replaced unasked."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from hpcgen.data.manifest import manifest_path, read_manifest
from hpcgen.errors import HpcgenError
from tests.cli.command import Ended, hpcgen, listing
from tests.http_server import fake_hub, http_server

EXAMPLES = Path(__file__).parents[2] / "examples"
LINE = '{"text": "a"}\n'
COMPRESSED = {".gz": gzip.compress, ".zst": zstandard.compress}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run file whose corpus is the directory in/."""
    for name in (
        "train/chunk1/a.jsonl",
        "train/chunk10/b.jsonl",
        "train/chunk2/c.jsonl.zst",
        "validation/v.jsonl.gz",
        "test/t.jsonl",
        "README.md",
    ):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(COMPRESSED.get(path.suffix, bytes)(LINE.encode()))
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: x\ncluster: local\npreset: tiny\npaths: {run_dir: run}\n"
        "data:\n  tokenizer: {kind: bytes}\n"
        "  corpus: {directory: corpus, num_output_files: 3, source: {directory: in}}\n"
    )
    return path


def plan(run: Path, *arguments: object) -> Ended:
    return hpcgen("data", "plan", "-c", run, *arguments)


def planned(run: Path) -> list[tuple[str, str]]:
    manifest = read_manifest(manifest_path(run.parent / "corpus"))
    return [(file.split, file.name) for file in manifest.files]


def splits(**patterns: str) -> list[str]:
    return [f"--set=data.corpus.splits.{split}=[{pattern}]" for split, pattern in patterns.items()]


# the command


def test_a_corpus_is_frozen(run: Path) -> None:
    ended = plan(run)
    assert ended.status == 0
    assert ended.stdout == (
        f"source    directory {run.parent}/in\n"
        "files     5 (99 B)\n"
        "corpus    5 files, 99 B -> 3 .bin/.idx pairs\n"
        "left out  1 file not recognized as data by name\n"
        "space     prepare: 239 to 881 B\n"
        "space     extract + concat + tokenize: 495 B to 1.7 kB\n"
        "note      5 files known only by size and modification time: damage is detected only by checksums inside "
        "the files; --hash records their SHA-256\n"
    )
    assert ended.stderr == f"wrote {run.parent}/corpus/manifest.jsonl\nnext: hpcgen submit prepare -c {run}\n"
    assert planned(run) == [
        ("corpus", "test/t.jsonl"),
        ("corpus", "train/chunk1/a.jsonl"),
        ("corpus", "train/chunk10/b.jsonl"),
        ("corpus", "train/chunk2/c.jsonl.zst"),
        ("corpus", "validation/v.jsonl.gz"),
    ]


def test_a_dry_run_writes_nothing(run: Path) -> None:
    before = listing(run.parent)
    ended = plan(run, "--dry-run")
    assert (ended.status, ended.stderr.partition(" /")[0]) == (0, "dry run: did not write")
    assert listing(run.parent) == before


def test_planning_again_changes_nothing(run: Path) -> None:
    plan(run)
    before = listing(run.parent)
    assert plan(run).stderr.startswith(f"{run.parent}/corpus/manifest.jsonl is up to date\n")
    assert listing(run.parent) == before


def test_a_manifest_that_differs_is_not_replaced_unasked(run: Path) -> None:
    plan(run)
    before = listing(run.parent / "corpus")
    (run.parent / "in/test/t.jsonl").unlink()
    (run.parent / "in/train/chunk1/a.jsonl").write_text(LINE * 2)
    (run.parent / "in/new1.jsonl").write_text(LINE)
    (run.parent / "in/new2.jsonl").write_text(LINE)
    ended = plan(run)
    assert ended.status == 2
    assert ended.stderr == (
        f"{run.parent}/corpus/manifest.jsonl already exists and differs from this plan, which has 2 added, 1 removed, "
        "1 changed; keep it, or replace it with --replan: later stages then make the outputs of changed files again\n"
    )
    assert listing(run.parent / "corpus") == before
    ended = plan(run, "--replan")
    assert "changes   from the existing manifest: 2 added, 1 removed, 1 changed\n" in ended.stdout
    assert ("corpus", "new2.jsonl") in planned(run)
    assert plan(run).status == 0


def test_a_manifest_that_cannot_be_read_is_not_replaced_unasked(run: Path) -> None:
    path = run.parent / "corpus" / "manifest.jsonl"
    path.parent.mkdir()
    path.write_text("torn")
    ended = plan(run)
    assert ended.status == 2
    assert "not an hpcgen manifest" in ended.stderr
    assert "--replan" in ended.stderr
    assert path.read_text() == "torn"
    assert plan(run, "--replan").status == 0
    assert len(planned(run)) == 5


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_parquet_files_are_planned_but_not_next_to_json_lines(run: Path) -> None:
    (run.parent / "pq").mkdir()
    for name in ("a.parquet", "b.parquet", "a.jsonl"):
        pq.write_table(pa.table({"text": ["a", "b"]}), run.parent / "pq" / name)
    source = f"--set=data.corpus.source.directory={run.parent}/pq"
    ended = plan(run, source, "--dry-run")
    assert ended.status == 2
    assert (
        "1 file of JSON Lines and 2 files of Parquet, which may be the same documents; "
        "set data.corpus.include to the names to use, such as ['*.parquet'], or ['*.jsonl*', '*.parquet'] for both"
    ) in ended.stderr
    both = plan(run, source, "--dry-run", "--set=data.corpus.include=['*.jsonl*', '*.parquet']")
    assert "may be the same documents" not in both.stderr
    (run.parent / "pq" / "a.jsonl").unlink()
    assert json.loads(plan(run, source, "--dry-run", "--json").stdout)["files"] == 2


def test_differences_in_the_manifest_for_a_script(run: Path) -> None:
    plan(run)
    summary = json.loads(plan(run, "--replan", "--hash", "--json").stdout)
    assert summary["difference"] == {
        "added": 0,
        "removed": 0,
        "changed": 0,
        "restated": 5,
        "reordered": False,
    }
    assert (summary["files"], summary["bytes"], summary["files_of_known_hash"]) == (5, 99, 5)
    left_out = {"not_data": 1, "not_included": 0, "in_no_split": 0, "not_sampled": 0, "links": 0}
    assert summary["left_out"] == left_out
    assert summary["written"] is True
    assert summary["splits"]["corpus"] == {"split": "corpus", "files": 5, "bytes": 99, "outputs": 3}


def test_hashed_files_have_no_note(run: Path) -> None:
    assert "\nnote " not in plan(run, "--hash").stdout


def test_a_selection_that_takes_the_same_files_is_noted_without_replanning(run: Path) -> None:
    plan(run)
    path = manifest_path(run.parent / "corpus")
    before = read_manifest(path)
    assert plan(run, "--set=data.corpus.include=['*.jsonl*']").status == 0
    after = read_manifest(path)
    assert (before.files, before.selection.get("include")) == (after.files, None)
    assert after.selection == {"source.directory": f"{run.parent}/in", "include": "*.jsonl*"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "../../escaped.jsonl"}, "1 file with an unsafe name .*: '../../escaped.jsonl'"),
        ({"name": "/tmp/escaped.jsonl"}, "1 file with an unsafe name"),
        ({"name": "a\x1b]0;x.jsonl"}, "1 file with an unsafe name"),
        ({"name": "b.jsonl"}, "duplicate file names: b.jsonl"),
        ({"name": "b.jsonl/c.jsonl"}, "file names that are also directories of other files: b.jsonl"),
        (
            {"url": "ftp://host/a.jsonl"},
            "without exactly one of a valid URL and an absolute path",
        ),
        ({"url": "http://me:pw@host/a.jsonl"}, "without exactly one of a valid"),
        ({"url": None}, "without exactly one of a valid"),
        ({"path": "/etc/passwd"}, "without exactly one of a valid"),
        ({"path": "etc/passwd", "url": None}, "without exactly one of a valid"),
        ({"size": -5}, "with a negative size"),
        ({"sha256": "ab"}, "with a SHA-256 that is not 64 hexadecimal digits"),
        ({"split": "../x"}, "in a split other than train, valid, test, corpus"),
    ],
)
def test_a_manifest_that_somebody_edited_is_checked_as_if_it_were_planned(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """Nothing is fetched or written for any of its files."""
    good = {"name": "a.jsonl", "split": "corpus", "size": 5, "url": "http://127.0.0.1:1/a.jsonl"}
    listed = [good | change, good | {"name": "b.jsonl"}]
    lines = [{"hpcgen_manifest": 1, "source": "a test", "files": 2}]
    lines += [{key: value for key, value in file.items() if value is not None} for file in listed]
    path = tmp_path / "manifest.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    with pytest.raises(
        HpcgenError,
        match=f"{path}: .*{message}.*; the manifest was edited after planning: run hpcgen data plan",
    ):
        read_manifest(path)


def test_a_manifest_with_signatures_is_readable_only_by_its_owner(run: Path) -> None:
    signed = run.parent / "list.jsonl"
    signed.write_text(json.dumps({"url": "https://store.example/a.jsonl?sig=hf_x", "size": 5}) + "\n")
    source = ("--set=data.corpus.source.directory=null", f"--set=data.corpus.source.manifest={signed}")
    path = manifest_path(run.parent / "corpus")
    ended = plan(run, *source)
    assert "hf_x" not in ended.stdout + ended.stderr
    assert "which may be signatures, so only you can read the manifest\n" in ended.stdout
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    shutil.rmtree(path.parent)
    ended = plan(run, *source, "--set=share=group")
    assert "only you and your group can read the manifest\n" in ended.stdout
    assert (mode(path), mode(path.parent)) == (0o640, 0o2770)


@pytest.mark.parametrize(("share", "modes"), [("private", (0o600, 0o700)), ("group", (0o660, 0o2770))])
def test_share_determines_who_can_read_the_manifest(run: Path, share: str, modes: tuple[int, int]) -> None:
    umask = os.umask(0o022)
    try:
        plan(run, f"--set=share={share}")
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(umask)
    path = manifest_path(run.parent / "corpus")
    assert (mode(path), mode(path.parent)) == modes


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_job_s_file_cannot_be_planned(run: Path) -> None:
    (run.parent / "corpus.json").write_text("{}")
    ended = plan(run.parent / "corpus.json")
    assert (ended.status, ended.stderr.partition("; ")[2]) == (2, "use -c with the run file\n")


def test_splits_by_the_corpus_s_own_files(run: Path) -> None:
    ended = plan(run, *splits(train="train/**/*.jsonl*", valid="validation/*"))
    assert planned(run) == [
        ("train", "train/chunk1/a.jsonl"),
        ("train", "train/chunk10/b.jsonl"),
        ("train", "train/chunk2/c.jsonl.zst"),
        ("valid", "validation/v.jsonl.gz"),
    ]
    assert "train     3 files, 51 B -> 3 .bin/.idx pairs\n" in ended.stdout
    assert "valid     1 file, 34 B -> 1 .bin/.idx pair\n" in ended.stdout
    assert "left out  1 file matching no pattern of splits: test/t.jsonl\n" in ended.stdout


def test_more_pairs_than_a_split_has_documents_are_refused(run: Path) -> None:
    own = splits(train="train/*", valid="validation/*")
    ended = plan(run, *own, "--set=data.corpus.num_eval_output_files=2")
    assert ended.status == 2
    assert "data.corpus.num_eval_output_files = 2 is too many: " in ended.stderr
    assert ended.stderr.endswith("validation/v.jsonl.gz; use at most 1\n")
    assert not (run.parent / "corpus").exists()


def test_large_pairs_are_noted(run: Path) -> None:
    entries = [
        {"name": f"{n}.jsonl.zst", "size": 50 * 10**9, "url": f"https://x.example/{n}"} for n in range(3)
    ]
    (run.parent / "list.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    source = ("--set=data.corpus.source.directory=null", "--set=data.corpus.source.manifest=list.jsonl")
    ended = plan(run, *source, "--set=data.corpus.num_output_files=1", "--dry-run")
    assert (
        "150.0 GB in 1 pair: one task makes a pair, and starts it again after a kill; "
        "set data.corpus.num_output_files to about 10\n"
    ) in ended.stdout
    assert (
        "starts it again"
        not in plan(run, *source, "--set=data.corpus.num_output_files=9", "--dry-run").stdout
    )


def test_links_that_are_not_followed_are_named(run: Path) -> None:
    (run.parent / "in/linked.jsonl").symlink_to("test/t.jsonl")
    (run.parent / "in/gone.jsonl").symlink_to("nowhere")
    (run.parent / "in/more").symlink_to("test")
    ended = plan(run)
    assert "files     6 " in ended.stdout
    assert "left out  2 links to directories or to nothing: gone.jsonl, more\n" in ended.stdout
    (run.parent / "links").mkdir()
    (run.parent / "links/more").symlink_to("../in")
    ended = plan(run, f"--set=data.corpus.source.directory={run.parent}/links")
    assert ended.status == 2
    assert "contains no files, only links to directories or to nothing: more; set data.corpus" in ended.stderr


def test_a_file_in_two_splits_is_refused(run: Path) -> None:
    ended = plan(run, *splits(train="'*'", test="test/*"))
    assert ended.status == 2
    assert (
        "data.corpus.splits: files that match two splits: test/t.jsonl (train and test); use patterns"
        in ended.stderr
    )


def test_a_pattern_that_matches_nothing_is_refused(run: Path) -> None:
    ended = plan(run, *splits(train="train/*", valid="val/*"))
    assert ended.status == 2
    assert (
        "data.corpus.splits.valid = 'val/*' matches no file; the files are test/t.jsonl, train/"
        in ended.stderr
    )
    ended = plan(run, "--set=data.corpus.include=['*.parquet']")
    assert (
        "no file matches '*.parquet' (6 files found); its files are README.md, test/t.jsonl" in ended.stderr
    )


def test_an_empty_directory_is_refused(run: Path) -> None:
    (run.parent / "empty").mkdir()
    ended = plan(run, f"--set=data.corpus.source.directory={run.parent}/empty")
    assert ended.status == 2
    assert "no file is JSON Lines or Parquet (0 files found); the source is empty" in ended.stderr


def test_a_sample_has_each_split(run: Path) -> None:
    for number in range(97):
        (run.parent / f"in/train/{number:03}.jsonl").write_text(LINE)
    ended = plan(run, *splits(train="train/*", valid="validation/*"), "--set=data.corpus.sample_files=11")
    chosen = planned(run)
    assert [split for split, _ in chosen] == ["train"] * 10 + ["valid"]
    assert [name for split, name in chosen if split == "train"] == [
        f"train/{number:03}.jsonl" for number in range(5, 100, 10)
    ]
    assert "left out  90 files not in the sample\n" in ended.stdout
    ended = plan(run, *splits(train="train/*", valid="validation/*"), "--set=data.corpus.sample_files=1")
    assert "a sample of 1 file cannot have a file of each split (train, valid); set" in ended.stderr


def test_a_missing_source_is_one_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with http_server() as server, fake_hub(server):
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        ended = hpcgen(
            "data",
            "plan",
            "-c",
            EXAMPLES / "slimpajama.yaml",
            f"--set=data.corpus.directory={run.parent}/slim",
        )
    assert ended.status == 2
    assert ended.stderr.startswith("the repository cerebras/SlimPajama-627B on http://127.0.0.1:")
    assert ended.stderr.count("\n") == 1
    assert not (run.parent / "slim").exists()


# the examples


def test_slimpajama_is_planned_and_validates(tmp_path: Path) -> None:
    names = [
        f"{split}/chunk{chunk}/example_{word}_{number}.jsonl.zst"
        for split, word, chunks in (
            ("train", "train", 10),
            ("validation", "holdout", 5),
            ("test", "holdout", 5),
        )
        for chunk in range(1, chunks + 1)
        for number in range(9)
    ]
    lines = [{"name": name, "url": f"https://store.example/{name}", "size": 15_700_000} for name in names]
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = tmp_path / "slimpajama.yaml"
    run.write_text((EXAMPLES / "slimpajama.yaml").read_text())
    source = (
        "--set=data.corpus.source.huggingface=null",
        f"--set=data.corpus.source.manifest={tmp_path}/list.jsonl",
    )
    ended = plan(run, *source)
    assert ended.status == 0, ended.stderr
    assert "train     90 files, 1.4 GB -> 72 .bin/.idx pairs\n" in ended.stdout
    assert "test      45 files, 706.5 MB -> 1 .bin/.idx pair\n" in ended.stdout
    again = f"-c {run} {' '.join(source).replace('=', ' ', 1).replace('--set=', '--set ')}"
    assert ended.stderr.endswith(f"next: hpcgen submit download prepare {again}\n")
    assert hpcgen("validate", "download", "prepare", "-c", run).status == 0


@pytest.mark.process
@pytest.mark.usefixtures("forks")
def test_openwebtext_from_its_archive(tmp_path: Path) -> None:
    """The archive as it is: text files in a .tar.xz in a .tar.xz."""

    def archive(files: dict[str, bytes]) -> bytes:
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w:xz") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        return target.getvalue()

    texts = {f"./000{number}-x.txt": f"\n\ndoc {number}\n\n\n\nend\u2028é\n".encode() for number in (2, 0, 1)}
    (tmp_path / "o.tar.xz").write_bytes(archive({"openwebtext-10k/10k.xz": archive(texts)}))
    target = tmp_path / "openwebtext/files/openwebtext-10k.jsonl"
    script = EXAMPLES / "openwebtext_10k.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path / "o.tar.xz", target], check=True, capture_output=True, text=True
    )
    assert done.stdout == f"{target}: 3 documents\n"
    lines = target.read_text(encoding="utf-8").split("\n")
    assert [json.loads(line)["text"] for line in lines[:-1]] == [f"doc {n}\n\nend\u2028é" for n in range(3)]
    run = tmp_path / "openwebtext.yaml"
    run.write_text((EXAMPLES / "openwebtext.yaml").read_text())
    assert plan(run).status == 0
    assert hpcgen("validate", "prepare", "-c", run).status == 0


@pytest.mark.slow
def test_the_whole_of_slimpajama(run: Path) -> None:
    """59,166 files, as many as SlimPajama has. How long it takes: benchmarks, not tests."""
    names = [f"train/chunk{chunk}/example_train_{n}.jsonl.zst" for chunk in range(1, 11) for n in range(5916)]
    names += [f"test/{n}.jsonl.zst" for n in range(6)]
    lines = [
        json.dumps({"name": name, "url": f"https://a.example/{name}", "size": 15_700_000}) for name in names
    ]
    (run.parent / "list.jsonl").write_text("\n".join(lines))
    ended = plan(
        run,
        "--set=data.corpus.source.directory=null",
        f"--set=data.corpus.source.manifest={run.parent}/list.jsonl",
        *splits(train="train/*", test="test/*"),
    )
    assert ended.status == 0
    assert "files     59,166 (928.9 GB)\n" in ended.stdout
    assert planned(run) == [(name.partition("/")[0], name) for name in names]
