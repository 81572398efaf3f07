#!/bin/bash
# A DPO script with LoRA, over two processes.
export WANDB_MODE=offline

CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes 2 --mixed_precision no \
    trl/scripts/dpo.py \
    --model_name_or_path model \
    --dataset_name preferences.jsonl \
    --output_dir "runs/trl dpo lora" \
    --learning_rate 5e-5 --beta=0.2 --loss_type ipo \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 2 \
    --max_steps 3 --warmup_steps 1 --lr_scheduler_type constant_with_warmup \
    --use_peft --lora_r 4 --lora_alpha 12 --lora_dropout 0.1 \
    --bf16 false --no_remove_unused_columns \
    --report_to none
