#!/usr/bin/env bash
set -xeuo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
max_prompt_length=${MAX_PROMPT_LENGTH:-1024}
max_response_length=$((1024 * 8))
rollout_tp=2
device=gpu
EXTRA=()

case "${DEVICE}" in
    npu)
        rollout_tp=4
        device=npu
        EXTRA+=(
            actor_rollout_ref.actor.use_torch_compile=False
        )
        ;;
esac

DATA=(
    data.train_files="['rows/gsm8k/train.parquet', 'rows/math/train.parquet']"
    data.train_batch_size=256  # prompts
    data.max_prompt_length=${max_prompt_length}
    data.max_response_length=${max_response_length}
)

ACTOR_CONFIG="
    actor_rollout_ref.model.path=${MODEL_PATH}
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.clip_ratio_low=3e-4
    actor_rollout_ref.actor.clip_ratio_high=4e-4"

ROLLOUT=(
    $ACTOR_CONFIG
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=${rollout_tp}
    actor_rollout_ref.rollout.max_model_len=$((max_prompt_length + max_response_length))
    actor_rollout_ref.actor.megatron.param_offload=True
)

python3 -m verl.trainer.main_ppo \
    --config-path=config \
    --config-name=ppo_megatron_trainer.yaml \
    algorithm.adv_estimator=grpo \
    "${DATA[@]}" \
    "${ROLLOUT[@]}" \
    "${EXTRA[@]}" \
    trainer.device=${device} \
    trainer.n_gpus_per_node=8 \
    trainer.total_training_steps=100 \
    "$@" 2>&1 | tee log
