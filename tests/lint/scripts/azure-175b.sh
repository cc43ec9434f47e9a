#!/bin/bash
#SBATCH --job-name=gpt3-175b
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=2-00:00:00
#SBATCH --partition=hpc
#SBATCH --account=research
#SBATCH --mail-type=FAIL
#SBATCH --output=/shared/logs/%j.log
set -euo pipefail
module load cuda/12.8

STAGE=/shared/stage
TP=${TP:-8}
PP=${PP:-16}
export CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_DEBUG=WARN NCCL_PXN_DISABLE=0 NCCL_MIN_CHANNELS=32
export NCCL_TOPO_FILE=/opt/microsoft/ndv5-topo.xml LOG_LEVEL=INFO
export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567
export DATA_DATE=$(date +%F)
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))

srun --ntasks=16 nvidia-smi -L

DISTRIBUTED_ARGS=(
    --nproc_per_node 8
    --nnodes "$SLURM_NNODES"
    --rdzv_backend c10d
    --rdzv_endpoint "$MASTER_ADDR:$MASTER_PORT"
)
MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --num-layers-per-virtual-pipeline-stage 2
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --train-samples 146484375
    --lr-decay-samples 126953125
    --lr-warmup-samples 183105
    --lr 6.0e-5
    --min-lr 6.0e-6
    --lr-decay-style cosine
    --adam-beta2 0.95
    --weight-decay 0.1
    --clip-grad 1.0
    --init-method-std 0.006
    --attention-dropout 0
    --hidden-dropout 0
    --recompute-activations
    --bf16
    --fp8-format hybrid
)
DATA_ARGS=(
    --train-data-path 0.7 "$STAGE/tokens/a" 0.3 "$STAGE/tokens/b"
    --valid-data-path "$STAGE/tokens/c"
    --data-cache-path "$STAGE/cache"
    --num-workers 4
)
OUTPUT_ARGS=(
    --save "$STAGE/checkpoints"
    --load "$STAGE/checkpoints"
    --save-interval 500
    --eval-interval 200
    --eval-iters 10
    --log-interval 10
    --log-throughput
    --tensorboard-dir "$STAGE/logs"
    --distributed-timeout-minutes 30
)

srun --kill-on-bad-exit=1 --cpus-per-task=96 \
    --container-image=nvcr.io/nvidia/pytorch:25.03-py3 \
    --container-mounts="$STAGE:$STAGE,/opt/microsoft:/opt/microsoft:ro,$HOME/code:/code" \
    --container-workdir=/workspace \
    --container-env=NCCL_TOPO_FILE \
    torchrun "${DISTRIBUTED_ARGS[@]}" /opt/Megatron-LM/pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}"
