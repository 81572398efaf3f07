# DPO with the original code, on four GPUs.
python -u train.py model=blank_model model.name_or_path=model model.archive=null \
    datasets=[hh] loss=dpo loss.beta=0.25 loss.label_smoothing=0.1 exp_name=small \
    gradient_accumulation_steps=2 batch_size=8 eval_batch_size=16 n_examples=24 lr=1e-4 warmup_steps=2 \
    trainer=FSDPTrainer sample_during_eval=false model.fsdp_policy_mp=float32
