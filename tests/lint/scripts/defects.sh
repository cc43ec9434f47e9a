#!/bin/bash
#SBATCH --job-name=gpt3-175b
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=h100:8
#SBATCH --cpus-per-task=8
#SBATCH --output=gpt3_%j.out
# One script with the mistakes that launch scripts for Megatron-LM are known for; tests/lint/test_defects.py names them.
set -xe

STAGE=/shared/stage
SEQ_LENGTH=${SEQ_LENGTH:-2048}
USE_SHARP=${USE_SHARP:-0}
IMAGE=${IMAGE:-$STAGE/pytorch.sqsh}
export HF_TOKEN=${HF_TOKEN:-}
export CUDA_DEVICE_MAX_CONNECTIONS=1 \
    NCCL_DEBUG=INFO \
    NCCL_IB_QPS_PER_CONN=4 \
    NCCL_TOPO_FILE=/opt/microsoft/ndv5-topo.xml \
    UCX_TLS=rc
if [ "$USE_SHARP" -eq 1 ]; then
    export NCCL_COLLNET_ENABLE=1
fi
export RUN_OPTIONS=--verbose --trace

VOCAB_FILE=${VOCAB_FILE:-/shared/stage/bpe/vocab.json}
MERGE_FILE=${MERGE_FILE:-/shared/stage/bpe/vocab.json}
IMAGE=$STAGE/images/pytorch+25.03+py3.sqsh

NUM_FILES=$(find $STAGE/tokens -name "*.bin" | wc -l)
readarray -t TRAIN < <(find $STAGE/tokens -name "*.bin" | sort | head -n $((NUM_FILES - 30)))
readarray -t NAMES < <(printf '%s\n' "${TRAIN[@]}" | sed "s/.bin//g")

DISTRIBUTED_ARGS=(
    --nproc_per_node "$SLURM_GPUS_PER_NODE"
    --nnodes "$SLURM_NNODES"
    --rdzv_backend c10d
    --rdzv_endpoint "$(hostname)":29500
)
MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings 2048
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 12
    --data-parallel-size 1
    --checkpoint-activations
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 512
    --train-iters 1500
    --fp16
    --lr 6.0e-5
    --lr-decay-iters 430000
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --train-data-path "${NAMES[@]}"
    --save /shared/stage/checkpoints
    --tensorboard-dir /var/logs/tensorboard
    --use-persistent-ckpt-worker
)
if [ "$USE_SHARP" -eq 1 ]; then
    TRAINING_ARGS+=(--use-sharp)
fi

srun --container-image="$IMAGE" \
    --container-mounts="$STAGE:$STAGE" \
    --container-env=CUDA_DEVICE_MAX_CONNECTIONS,NCCL_TOPO_FILE \
    torchrun "${DISTRIBUTED_ARGS[@]}" "$STAGE/Megatron-LM/pretrain_gpt.py" "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}"
