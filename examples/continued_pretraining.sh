#!/usr/bin/env bash
# Continues the pretraining of a small Hugging Face model on a CPU, and exports the result.
#
# usage: examples/continued_pretraining.sh HF_DIR CORPUS WORK
#
# HF_DIR is a local Hugging Face model with its tokenizer, CORPUS a directory with .jsonl files, WORK a new directory.
set -euo pipefail

hf_dir=$(realpath "$1") corpus=$(realpath "$2") work=$3
mkdir "$work"
cd "$work"

# The run file takes model, tokenizer and sequence length from the directory.
hpcgen init run.yaml --from-hf "$hf_dir" --cluster local

# The weights become a checkpoint, which run.yaml names in checkpoint.load.
hpcgen checkpoint import "$hf_dir" --to run-weights

# Small settings for a CPU. In practice, edit run.yaml.
settings=(
    --set "data.corpus.source.directory=$corpus" --set data.corpus.directory=data
    --set data.split=90,5,5
    --set training.precision=fp32 --set training.global_batch_size=4 --set training.train_iters=4
    --set training.eval_iters=1 --set optimizer.lr_warmup_iters=1
)
hpcgen data plan -c run.yaml "${settings[@]}"
hpcgen submit prepare index-cache train --launcher local -c run.yaml "${settings[@]}"

hpcgen checkpoint export runs/run --to exported -c run.yaml
