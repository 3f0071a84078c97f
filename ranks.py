"""Training in several processes: who is who, and the few sums that they share. (Data parallel; not in the paper.)

    torchrun --nproc-per-node 2 train.py fit         every rank takes its share of each batch's dialogues
    torchrun --nproc-per-node 2 train.py generate    every rank writes its share of the shards

torchrun starts `world` processes of the same program that differ in one number, their rank. Each holds the whole drafter and its own
optimizers; DistributedDataParallel averages the gradients, so all take the same step and stay equal. All see the same folders.
Rank 0 prints, evaluates, and writes checkpoint, weights and record. Without torchrun there is rank 0 of 1, and nothing here does anything.
"""
import os
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta

import torch
import torch.distributed as dist


def rank_and_world() -> tuple[int, int]:
    """(0, 1) unless run() has started a group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def launched() -> bool:
    """Whether torchrun has started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def run(task, together):
    """task() on all ranks as one group; if not together, on rank 0 alone, outside any group: no other rank is waited for."""
    if not launched():
        return task()
    if not together:
        return task() if os.environ["RANK"] == "0" else None
    # a day: rank 0 may evaluate for long, and a rank that dies is noticed by torchrun, which ends the others
    dist.init_process_group("gloo", timeout=timedelta(days=1))
    with open(os.devnull, "w") as nowhere:
        if dist.get_rank() == 0:
            task()
        else:  # errors pass through: they are printed outside
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                task()
    dist.barrier()  # no rank closes its connections while another still uses them
    dist.destroy_process_group()


def first_to_fail() -> bool:
    """To be asked once by a rank that ends with an error: is it the first? It alone speaks. The others' errors are mostly what
    follows from its end (a closed connection), or the same one again."""
    if not launched():
        return True
    # torchrun's own store: it outlives every rank, and is new whenever the ranks are started anew (--max-restarts)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return store.add("failed", 1) == 1


def barrier():
    """Wait until every rank is here."""
    if rank_and_world()[1] > 1:
        dist.barrier()


def mean(x):
    """The mean over ranks of a tensor that each has."""
    total, world = x.detach().clone(), rank_and_world()[1]
    if world > 1:
        dist.all_reduce(total)
    return total / world


def share(weight):
    """weight () of this rank's label rows -> their share of the whole batch's weight, times the number of ranks; 1 if there is one rank.

    Each rank's loss is a mean weighted by its own rows' weights, and DDP takes the plain mean of the ranks' gradients. That would let
    a rank with few rows count as much as one with many. Times this share, the mean over ranks is the mean over all rows."""
    return weight / mean(weight).clamp(min=1e-30)  # no row anywhere: 0, as is the loss


def parallel(module):
    """The module, in DDP if there are several ranks. Its forward must hold all of the loss: in the first step DDP learns which
    gradients to wait for, and which never come (an autoregressive drafter's W1). So nothing else may run backward through the
    module from here on: DDP would count it in, and never average again."""
    if rank_and_world()[1] == 1:
        return module
    # buffers are the target's, frozen: nothing to send anew at every step
    return torch.nn.parallel.DistributedDataParallel(module, forward_sync_buffers=False, static_graph=True)
