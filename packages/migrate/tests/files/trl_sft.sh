accelerate launch --num_processes 4 sft.py --model_name_or_path MODEL_DIR --train_dataset DATA_DIR/conversations.jsonl \
  --output_dir runs/trl_sft --learning_rate 2.0e-5 --num_train_epochs 1 --packing --max_length 256 \
  --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --assistant_only_loss true --eval_strategy no
