deepspeed --module openrlhf.cli.train_sft --max_len 256 --dataset DATA_DIR/openrlhf.jsonl --input_key question \
   --output_key answer --input_template $'User: {}\nAssistant: ' --train_batch_size 16 --micro_train_batch_size 2 \
   --pretrain MODEL_DIR --save_path runs/openrlhf_sft --max_epochs 2 --learning_rate 5e-6 --packing_samples
