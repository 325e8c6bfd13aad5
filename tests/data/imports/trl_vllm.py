import trl

args = trl.GRPOConfig(
    max_steps=400,
    per_device_train_batch_size=16,
    steps_per_generation=4,
    gradient_accumulation_steps=2,
    num_generations=8,
    use_vllm=True,
    vllm_mode="colocate",
    vllm_gpu_memory_utilization=0.3,
    vllm_importance_sampling_mode="token_truncate",
    vllm_importance_sampling_clip_max=2.0,
    epsilon=0.2,
    epsilon_high=0.28,
    delta=4.0,
    bf16=True,
    gradient_checkpointing=False,
    warmup_steps=40,
    eval_strategy="steps",
    eval_steps=50,
    save_steps=100,
    num_generations_eval=4,
    optim="paged_adamw_8bit",
    seed=3,
)


def reward(completions, **_):
    return [0.0] * len(completions)


trl.GRPOTrainer("Qwen/Qwen3-4B", reward, args)
