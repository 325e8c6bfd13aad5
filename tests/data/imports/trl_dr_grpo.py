import os

from my_rewards import format_reward
from my_rewards import length_reward as brevity
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen2.5-3B-Instruct"
NUM_GENERATIONS = 16
model = AutoModelForCausalLM.from_pretrained(MODEL)
size = 2
size = size * 4

raise SystemExit("this script must not be executed")

training_args = GRPOConfig(
    output_dir="out",
    num_generations=NUM_GENERATIONS,
    per_device_train_batch_size=size,
    gradient_accumulation_steps=4,
    learning_rate=5e-6,
    lr_scheduler_type="cosine",
    warmup_ratio=0.1,
    adam_beta2=0.99,
    max_completion_length=1024,
    max_prompt_length=512,
    loss_type="dr_grpo",
    scale_rewards=False,
    beta=0.04,
    num_iterations=2,
    reward_weights=[1.0, 0.5],
    hub_token=os.environ.get("TOKEN"),
    report_to=["wandb", "tensorboard"],
    **os.environ,
)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=[format_reward, brevity],
    args=training_args,
    train_dataset="rows.jsonl",
    eval_dataset="test.jsonl",
    peft_config=LoraConfig(lora_alpha=32, target_modules=["q_proj", "v_proj"], lora_dropout=0.1),
)
