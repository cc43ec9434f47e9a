"""Hello world of torch.distributed, for stage run with launcher srun: every rank says where it is."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
total = torch.ones((), device="cuda" if torch.cuda.is_available() else "cpu")
dist.all_reduce(total)
print(f"hello from rank {dist.get_rank()} of {int(total)} on {socket.gethostname()}", flush=True)
dist.destroy_process_group()
