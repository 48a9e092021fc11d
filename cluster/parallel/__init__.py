"""How the processes of one site share one model: layouts of torch.distributed behind one local step."""
