"""What runs inside a worker: the control link, the elastic trainer, checkpoints, the zygote and the serving replica."""
