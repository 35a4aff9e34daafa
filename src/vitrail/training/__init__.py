"""Model + data + objective -> run folder.

runs                     the public functions train and finetune, and their result; resuming, run_extension
loop                     the training loop
trainer, setup           the components of a run: data, network, optimizer, schedule, EMA, evaluation
optimizer, muon, ema     updates of the weights; lr_schedule: their size
parallel                 DDP and FSDP; sharded_checkpoint
checkpointing            the full training state, written atomically; snapshots: weights over the run
custom_objects           datasets, networks and objectives from outside the package; callbacks: those and trackers
run_logger, meter        metrics, checkpoints and the final model; display, panel: what a terminal shows
nan_guard, interrupt     a loss that is not finite; signals
batch_size_search        batch_size=auto;   data_fingerprint: whether the data has changed since a checkpoint
"""
